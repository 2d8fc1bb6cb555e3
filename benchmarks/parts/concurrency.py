"""Does the pool find how many requests a server holds best, beside settings that are fixed?

    benchmarks/bench.py concurrency

Simulated, on the virtual clock: the real pool with its limit, and a server that batches as vLLM
does. It decodes a token of every running request in a step, whose time grows with how many they
are; keys and values take room for each token, and stay for the next turn of their session as long
as nobody else needs it; when there is none left, the last request that came is preempted and
computed again. Trajectories take turns with tools between them that have long tails.

What is found is the throughput of each fixed limit, where all trajectories ask at once, and that of
the pool's own, where they begin as the feeder of a run lets them, both after a few steps' worth of
trajectories; and what share this is of the best.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from agentenv.engines.pool.limit import ConcurrencyLimit
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.remote.server import PartEnd, Request, ServerInfo, ServerLoad
from agentenv.server_config import PoolConfig
from agentenv.types import Chunk, SamplingParams, VersionSpan
from agentenv.virtual_clock import run_virtual
from benchmarks.parts.overhead import WaitingServer

QUANTUM = 16  # decode steps that the server takes at once
NUM_TURNS, TURN_TOKENS, RESULT_TOKENS, PROMPT_TOKENS = 6, 200, 300, 500
ROOM_S = 0.2  # between two looks at whether a trajectory may begin
TOOL_S = 2.0  # of most calls; a tenth takes ten times as long
STEP_TREES = 128  # trajectories of a training step
WARM_STEPS, NUM_STEPS = 10, 20
FIXED = (8, 16, 32, 48, 64, 96, 128, 256, 512)
EOS, VOCAB = 1, 1000


class Shape(Struct, frozen=True, kw_only=True):
    """What a server can do, and how many trajectories ask it."""

    name: str
    num_open: int
    max_running: int = 256
    cache_tokens: int = 200_000
    base_s: float = 0.008  # of a decode step
    request_s: float = 5e-5  # more for each request in it
    prefill_s: float = 2e-5  # for each token of a prompt that is not in the cache


SHAPES = (
    Shape(name="few ask", num_open=48),
    Shape(name="the batch is full", num_open=600, cache_tokens=2_000_000),
    Shape(name="the cache is full", num_open=600),
    Shape(name="a small cache", num_open=600, cache_tokens=50_000),
)


class _Running:
    def __init__(self, request: Request, done: asyncio.Future[None], session: str) -> None:
        self.request, self.done, self.session = request, done, session
        self.size = len(request.prompt_ids)  # tokens that it keeps
        self.left = request.sampling.max_tokens


class BatchingServer(WaitingServer):
    """As the module says. A session is the routing key of a request."""

    def __init__(self, shape: Shape) -> None:
        super().__init__("batching")
        self.shape = shape
        self.num_tokens = 0  # sampled so far
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._kept: OrderedDict[str, int] = OrderedDict()  # tokens of sessions that may come again
        self._num_preemptions = 0
        self._came = asyncio.Event()
        self._working: asyncio.Task[None] | None = None

    async def connect(self, policy_version: int) -> ServerInfo:
        return ServerInfo("batching", "1", "policy", 100_000, frozenset())

    async def generate(self, request: Request, on_chunk: Callable[[Chunk], None]) -> PartEnd:
        size = request.sampling.max_tokens
        if size > 1:  # else a probe of the weights
            self._working = self._working or asyncio.create_task(self._work())
            one = _Running(request, asyncio.get_running_loop().create_future(), request.session)
            self._waiting.append(one)
            self._came.set()
            await one.done
        on_chunk(Chunk([2] * size, [-1.0] * size, [0.0] * size))
        return PartEnd("length", [VersionSpan(self.policy_version, 0, size)], size)

    async def load(self) -> ServerLoad:
        share = min(1.0, self._used() / self.shape.cache_tokens)
        return ServerLoad(len(self._running), len(self._waiting), share, self._num_preemptions)

    async def close(self) -> None:
        if self._working is not None:
            self._working.cancel()

    def _used(self) -> int:
        return sum(one.size for one in self._running)

    async def _work(self) -> None:
        shape = self.shape
        while True:
            if not self._running and not self._waiting:
                self._came.clear()
                await self._came.wait()
            prefilled = self._admit()
            num = len(self._running)
            step_s = shape.base_s + shape.request_s * num
            await asyncio.sleep(QUANTUM * step_s + shape.prefill_s * prefilled)
            for one in self._running:
                taken = min(QUANTUM, one.left)
                one.left -= taken
                one.size += taken
                self.num_tokens += taken
            for one in [one for one in self._running if one.left == 0]:
                self._running.remove(one)
                self._kept[one.session] = one.size
                if not one.done.done():
                    one.done.set_result(None)
            self._make_room(0)
            while self._used() > shape.cache_tokens and len(self._running) > 1:
                last = self._running.pop()
                self._num_preemptions += 1
                self._waiting.appendleft(last)

    def _admit(self) -> int:
        """Take in who waits, while there is room. Tokens that have to be computed for it."""
        computed = 0
        while self._waiting and len(self._running) < self.shape.max_running:
            one = self._waiting[0]
            if self._running and self._used() + one.size + QUANTUM > self.shape.cache_tokens:
                break
            self._waiting.popleft()
            computed += one.size - min(one.size, self._kept.pop(one.session, 0))
            self._running.append(one)
            self._make_room(one.size)
        return computed

    def _make_room(self, size: int) -> None:
        """Forget what was kept longest, until all that runs fits."""
        free = self.shape.cache_tokens - self._used()
        kept = sum(self._kept.values())
        while self._kept and kept > free:
            kept -= self._kept.popitem(last=False)[1]


class Fixed(ConcurrencyLimit):
    """A limit that stays."""

    def observe(self, load: ServerLoad, in_flight: int, **done: float) -> None:
        pass


async def throughput(
    shape: Shape, folder: Path, limit: int | None, *, feeds: bool, seed: int = 0
) -> float:
    """Sampled tokens a second, of steps NUM_STEPS behind the first WARM_STEPS, with this limit or
    the pool's own. `feeds`: as the feeder of a run, which begins none before the pool has room."""
    server: Any = BatchingServer(shape)
    pool = EnginePool([server], folder, 0, vocab_size=VOCAB, eos_ids={EOS}, config=PoolConfig())
    await pool.start(fresh=True)
    if limit is not None:
        pool.servers[0].limit = Fixed(limit, limit)
    rng, num_done = Random(seed), 0
    marks: list[tuple[float, int]] = []
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    places, live = asyncio.Semaphore(shape.num_open), set[asyncio.Task[None]]()

    async def feed() -> None:
        for number in count():
            await places.acquire()
            while feeds and live and not pool.has_room(len(live)):  # noqa: ASYNC110 (as a run)
                await asyncio.sleep(ROOM_S)
            trajectory = asyncio.create_task(grow(number))
            live.add(trajectory)
            trajectory.add_done_callback(live.discard)

    async def grow(number: int) -> None:
        nonlocal num_done
        ids = [2] * PROMPT_TOKENS
        for turn in range(NUM_TURNS):
            size = max(20, round(TURN_TOKENS * rng.expovariate(1.0)))
            await pool.generate(
                ids, SamplingParams(size), session=str(number), order=(number, turn)
            )
            ids += [2] * (size + RESULT_TOKENS)
            seconds = TOOL_S * (0.5 + rng.random())
            await asyncio.sleep(seconds * (10 if rng.random() < 0.1 else 1))
        places.release()
        num_done += 1
        if num_done in (WARM_STEPS * STEP_TREES, (WARM_STEPS + NUM_STEPS) * STEP_TREES):
            marks.append((loop.time(), server.num_tokens))
            if len(marks) == 2:
                over.set()

    feeding = asyncio.create_task(feed())
    await over.wait()
    for task in (feeding, *live):
        task.cancel()
    await asyncio.gather(feeding, *live, return_exceptions=True)
    await pool.close()
    (began, before), (ended, after) = marks
    return (after - before) / (ended - began)


class Figures(Struct, frozen=True):
    """Sampled tokens a second with the best fixed limit, which one that is, with the pool's own,
    and the share that this is of the best."""

    best_fixed: float
    limit: int
    own: float
    share: float


def run(shapes: Sequence[Shape] = SHAPES, fixed: Sequence[int] = FIXED) -> dict[str, Figures]:
    """Figures by the name of a shape."""
    from agentenv.envs.quickstart_setup import build_model

    with tempfile.TemporaryDirectory(prefix="agentenv-") as text:
        folder = Path(text)
        build_model(folder, seed=0)  # of which the pool's client reads the tokenizer
        return {shape.name: _figures(shape, folder, fixed) for shape in shapes}


def _figures(shape: Shape, folder: Path, fixed: Sequence[int]) -> Figures:
    found = {limit: run_virtual(throughput(shape, folder, limit, feeds=False)) for limit in fixed}
    own = run_virtual(throughput(shape, folder, None, feeds=True))
    best = max(found, key=found.__getitem__)
    return Figures(round(found[best]), best, round(own), round(own / found[best], 3))
