"""Simulation of a run with other settings: the real loop with a virtual clock, and an engine, tools
and a learner whose times come from a recorded run.

    python benchmarks/bench.py simulate CONFIG [key=value ...] [--trace RUN]

The trace (RUN/timings.jsonl, see timings.py) also provides the work. The configured algorithm grows
new trees; each turn is a recorded turn from the same depth of a recorded tree, with its tokens,
entropies, tools and reward. No turn is used twice before all have been used.

    engine    a decoding step takes `decode_s` plus `running_s` for each running turn, and gives
              each of them one token; prompts take `prefill_s` per token that is not cached, and
              delay decoding; new weights empty the caches; a server runs `slots` turns, others
              wait; decoding is `beside` times slower while a learner trains on the same machine
    tools     times are drawn from the recorded ones, with a tail beyond the longest; concurrency
              and rate are limited as configured
    learner   an optimizer step takes `update_s`, a trained token `token_s`, and a third more if its
              proximal log-prob is computed; all is `shared` times slower while turns run on the
              same machine; then `publish_s`, and `score_s` for the parity probe
    envs      `env_s` from the end of a turn and its tools to the next turn: texts, copies, grades
    loop      one core, or one per rollout worker, on which a turn takes `turn_s` of `env_s`;
              `tree_s` for each tree of a step

Not simulated: faults, evaluations, checkpoints, and a pool's admission control by cache use.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    ExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from itertools import count
from operator import mul
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace
from rich.console import Console

from agentenv.assembly.keys.cluster import SpreadCluster
from agentenv.assembly.keys.rl import EvalConfig, LogConfig, TrainConfig
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.deadline import admitted, waiting
from agentenv.base.errors import ConfigError, DataError
from agentenv.base.tree import Prefix, TrajectoryTree
from agentenv.base.types import (
    Chunk,
    Completion,
    Info,
    Limit,
    Message,
    SamplingParams,
    Task,
    ToolCall,
    VersionSpan,
)
from agentenv.contract.engine import Engine
from agentenv.envs.sandbox.keys import python_config
from agentenv.envs.search.upstream import BURST, TokenBucket
from agentenv.envs.web_search import search_config
from agentenv.learners.algorithms.credit import CreditedTree
from agentenv.learners.keys import LearnerConfig, Score
from agentenv.learners.trees.encoded_tree import EncodedTree, encoded_nodes
from agentenv.rollout.actor import Actor
from agentenv.rollout.frames import JournalConfig
from agentenv.rollout.journal import COMMIT_S
from agentenv.rollout.metrics import Metrics
from agentenv.training.loop.batching import StepBatch
from agentenv.training.loop.feeder import Feeder, InflightRollout
from agentenv.training.loop.parity import ParityProbe
from agentenv.training.loop.parts import NUM_PROBE_PROMPTS, Parts
from agentenv.training.loop.publishers import DirectoryPublisher
from agentenv.training.loop.step_report import StepReport
from agentenv.training.loop.training import Training
from agentenv.training.start import make_training
from benchmarks.parts.timings import FILE, Shape, StepTimes, Timings, Trace, begin
from tests.support.virtual_clock import run_virtual

MIN_TAIL = 40  # calls of a tool from which a tail is estimated
TAIL = 0.05  # the share of the longest calls that it is estimated from
DEFAULT_SLOTS = 1 << 20
SMALL_GAIN = 0.03
CHECK_S = 0.05  # between two checks of the number of growing branches
PROXIMAL = 1 / 3  # a forward pass, relative to forward and backward
UPDATE_SHARE, SLOWER = 0.05, 1.0  # prior values for what a trace does not determine
NUM_CHECKS = 100  # checks per update of whether turns run at the same time


class ServiceModel(Struct, frozen=True, kw_only=True):
    """Times of the parts; see the module docstring."""

    decode_s: float
    running_s: float
    prefill_s: float
    beside: float
    update_s: float
    token_s: float
    shared: float
    publish_s: float
    score_s: float
    turn_s: float
    env_s: float
    tree_s: float


def fitted(*traces: Trace) -> ServiceModel:
    """Fit the times to the turns and steps of traces, with non-negative least squares.

    Traces with different settings separate the constant part of a time from the part that grows
    with the work; traces with equal steps cannot.
    """
    steps = [step for trace in traces for step in trace.steps]
    turns = [turn for step in steps for turn in step.turns if turn.num_sampled]
    if not turns:
        raise DataError("the trace has no turns")
    decode_s, running_s, prefill_s, slower_s = _least_squares(
        [
            (t.num_sampled, t.num_sampled * t.running, t.computed, t.num_sampled * t.beside)
            for t in turns
        ],
        [turn.seconds for turn in turns],
    )
    mean_running = fmean(turn.running for turn in turns)
    decoded_s = decode_s + running_s * mean_running
    trained = [step for step in steps if step.num_tokens]
    update_s, token_s, shared = _of_updates(trained)
    rest = [
        step for trace in traces for step in trace.steps[1:]
    ]  # the first step's start is unknown
    score_s = [step.parity_s for step in rest if step.parity_s]  # and it has no probe
    nodes = [shape for step in rest for tree in step.trees for shape in tree]
    num_turns = max(1, sum(shape.num_sampled > 0 for shape in nodes))
    num_measured = max(1, sum(len(step.turns) for step in rest))  # also of untrained trees
    tools_s = sum(sum(seconds) for shape in nodes for _, *seconds in shape.tools)
    return ServiceModel(
        decode_s=decode_s,
        running_s=running_s,
        prefill_s=prefill_s,
        beside=1 + slower_s / decoded_s if decoded_s else 1.0,
        update_s=update_s,
        token_s=token_s,
        shared=shared,
        publish_s=fmean(step.publish_s for step in trained) if trained else 0.0,
        turn_s=sum(step.loop_s for step in rest) / num_measured,
        env_s=max(0.0, sum(step.branch_s for step in rest) - tools_s) / num_turns,
        score_s=min(score_s, default=0.0),  # others waited for the engine's part, too
        tree_s=sum(step.rest_s for step in rest) / sum(len(step.trees) for step in rest),
    )


def _of_updates(steps: Sequence[StepTimes]) -> tuple[float, float, float]:
    """Return the seconds of an optimizer step and of a token, and the slowdown while an engine
    samples on the same machine. Equal steps do not determine all three: by default, an update costs
    as much as its tokens, and has no slowdown."""
    if not steps:
        return 0.0, 0.0, 1.0
    tokens = [step.num_tokens + PROXIMAL * step.num_proximal_tokens for step in steps]
    rows = [
        (step.num_steps, size, size * step.busy) for step, size in zip(steps, tokens, strict=True)
    ]
    seconds = [step.update_s for step in steps]
    found = _least_squares(rows, seconds)
    error = fmean(
        (sum(map(mul, found, row)) - one) ** 2 for row, one in zip(rows, seconds, strict=True)
    )
    doubt = math.sqrt(error) / fmean(seconds)
    alike = [
        (doubt / UPDATE_SHARE * fmean(step.num_steps for step in steps), 0.0, 0.0),
        (0.0, 0.0, doubt / SLOWER * fmean(tokens)),
    ]
    update_s, token_s, slower_s = _least_squares([*rows, *alike], [*seconds, 0.0, 0.0])
    return update_s, token_s, 1 + slower_s / token_s if token_s else 1.0


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    import numpy as np
    from scipy.optimize import nnls  # takes half a second

    found, _ = nnls(np.asarray(rows, np.float64), np.asarray(values, np.float64))
    return [float(value) for value in found]


def together(traces: Sequence[Trace]) -> Trace:
    """Combine traces: trees and tools of all runs, settings of the first."""
    return replace(traces[0], steps=[step for trace in traces for step in trace.steps])


class Durations:
    """The distribution of a tool's call times in seconds. With many calls, it has a Pareto tail
    beyond the longest, from Hill's estimator (1975) over the longest twentieth."""

    def __init__(self, seconds: Iterable[float]) -> None:
        self._seconds = sorted(seconds)
        num = len(self._seconds)
        self._index = 0.0  # of the tail; 0: no tail
        self._start = self._seconds[-1]
        if num >= MIN_TAIL:
            tail = self._seconds[-max(2, math.ceil(TAIL * num)) :]
            if tail[0] > 0 and tail[-1] > tail[0]:
                self._index = 1 / fmean(math.log(value / tail[0]) for value in tail[1:])
                self._start, self._share = tail[0], len(tail) / num

    def draw(self, rng: Random) -> float:
        place = rng.random()
        if self._index and place > 1 - self._share:
            return float(self._start * ((1 - place) / self._share) ** (-1 / self._index))
        return self._seconds[min(int(place * len(self._seconds)), len(self._seconds) - 1)]


class Work:
    """The recorded trees, from which new trees are grown. `key` numbers the nodes of all trees.
    `after` has the keys of the nodes that may follow a node. A text generated from a node ends with
    a unique token, which `ids` maps to its key."""

    def __init__(self, trace: Trace) -> None:
        self.shapes: list[Shape] = []
        self.after: list[list[int]] = []
        self.roots: list[int] = []
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        self.ids: list[int] = [-1]
        for tree in (tree for step in trace.steps for tree in step.trees):
            self._add(tree)
            for shape in tree:
                for name, value, _ in shape.tools:
                    seconds[name].append(value)
        if not self.roots:
            raise DataError("the trace has no tree with a trajectory that ended well")
        self.tools = {name: Durations(values) for name, values in seconds.items()}

    def token(self, key: int) -> int:
        """Return a new unique token for a text of this node."""
        self.ids.append(key)
        return len(self.ids) - 1

    def _add(self, tree: Sequence[Shape]) -> None:
        """Add a tree. Any of its nodes at the depth of a node's children may follow the node."""
        parents = {shape.parent for shape in tree}
        is_bad = [
            shape.end == "failed" or (not shape.end and place not in parents)
            for place, shape in enumerate(tree)
        ]
        first, depths = len(self.shapes), [0] * len(tree)
        by_depth: defaultdict[int, list[int]] = defaultdict(list)
        for place, shape in enumerate(tree):
            depths[place] = depths[shape.parent] + 1 if shape.parent >= 0 else 0
            if not is_bad[place]:
                by_depth[depths[place]].append(first + place)
        if not by_depth[1]:
            return
        self.roots.append(first)
        self.shapes += tree
        self.after += [by_depth[depth + 1] for depth in depths]


class Machine:
    """An engine server. All running turns get a token in each decoding step. `num_learning` is the
    number of learners at work on the same machine."""

    def __init__(self, model: ServiceModel, slots: int) -> None:
        self.model, self.slots = model, slots
        self.num_learning = 0
        self.num_waiting = 0
        self._running = 0
        self._num_steps = 0.0  # decoding steps so far
        self._debt_s = 0.0  # of prompts to compute before the next decoding step
        self._since = 0.0
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []
        self._number = count()
        self._timer: asyncio.TimerHandle | None = None
        self._queue: list[tuple[tuple[int, int], int, asyncio.Future[None]]] = []

    @property
    def load(self) -> int:
        return self._running + self.num_waiting

    @property
    def is_busy(self) -> bool:
        return self._running > 0

    def _step_s(self) -> float:
        model = self.model
        slower = model.beside if self.num_learning else 1.0
        return max(1e-9, (model.decode_s + model.running_s * self._running) * slower)

    def account(self) -> None:
        """Account for the work since the last call, and schedule the next end of a turn."""
        loop = asyncio.get_running_loop()
        passed, self._since = loop.time() - self._since, loop.time()
        paid = min(self._debt_s, passed)
        self._debt_s -= paid
        self._num_steps += (passed - paid) / self._step_s()
        while self._ends and self._ends[0][0] <= self._num_steps + 1e-6:
            ended = heapq.heappop(self._ends)[2]
            if not ended.done():
                ended.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._ends:
            left = self._ends[0][0] - self._num_steps
            self._timer = loop.call_later(self._debt_s + left * self._step_s(), self.account)

    @contextmanager
    def learning(self) -> Iterator[None]:
        self.account()
        self.num_learning += 1
        self.account()
        try:
            yield
        finally:
            self.account()
            self.num_learning -= 1
            self.account()

    async def sample(
        self,
        num_computed: int,
        chunks: Sequence[int],
        on_chunk: Callable[[int], None],
        order: tuple[int, int] = (0, 0),
    ) -> None:
        """Wait for the time of a turn that has to compute this many prompt tokens, and report its
        chunks of tokens. The waiting turn with the smallest `order` gets the next slot."""
        self.account()
        if self._running >= self.slots:
            with waiting("a slot"):
                await self._slot(order)
        else:
            self._running += 1
        try:
            self._debt_s += self.model.prefill_s * num_computed
            for size in chunks:
                ended = asyncio.get_running_loop().create_future()
                goal = self._num_steps + size
                heapq.heappush(self._ends, (goal, next(self._number), ended))
                self.account()
                await ended
                on_chunk(size)
        finally:
            self._leave()

    async def _slot(self, order: tuple[int, int]) -> None:
        given: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queue, (order, next(self._number), given))
        self.num_waiting += 1
        try:
            await given
        except asyncio.CancelledError:
            if given.done() and not given.cancelled():
                self._leave()
            raise
        finally:
            self.num_waiting -= 1

    def _leave(self) -> None:
        """Pass the slot to the next waiting turn."""
        self.account()
        while self._queue:
            given = heapq.heappop(self._queue)[2]
            if not given.done():
                given.set_result(None)
                return
        self._running -= 1
        self.account()


class Grown(Struct, kw_only=True):
    """An engine's state for a tree: the server of its turns, how often each node was used, and the
    last tokens of the texts that are cached for one policy version."""

    home: Machine
    uses: Counter[int] = field(default_factory=Counter)
    cached: set[int] = field(default_factory=set)
    version: int = -1

    def compute(self, parts: Sequence[Sequence[int]], version: int) -> int:
        """Return the number of uncached tokens in a prompt of these texts, and cache the texts."""
        if version != self.version:
            self.version = version
            self.cached.clear()
        num_tokens = 0
        for part in reversed(parts):
            if not len(part) or part[-1] in self.cached:
                break
            num_tokens += len(part)
            self.cached.add(part[-1])
        return max(1, num_tokens)


class SimulatedEngine(Engine):
    """An engine that samples turns of a `Work` on machines. A tree stays on the machine that had
    the least load. The last token of a prompt identifies the node that the turn follows; the last
    token of a turn identifies the turn's node."""

    policy_version = 0

    def __init__(
        self, work: Work, machines: Sequence[Machine], model: ServiceModel, num_loops: int
    ) -> None:
        self.work, self.machines, self.model, self.num_loops = work, machines, model, num_loops
        self._loop_free_at = 0.0
        self._trees: dict[str, Grown] = {}
        self._stats = {"requests": 0.0, "sampled_tokens": 0.0, "prompt_tokens": 0.0}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        session: str,
        on_tokens: Callable[[Chunk], None] | None = None,
        stream_interval: int = 1,
        order: tuple[int, int] = (0, 0),
    ) -> Completion:
        rng = Random(f"{sampling.seed}/{session}")
        tree = self._trees.get(session)
        if tree is None:
            home = min(self.machines, key=lambda one: one.load)
            tree = self._trees[session] = Grown(home=home)
        follows = self.work.ids[prompt_ids[-1:][0]]
        key = min(self.work.after[follows], key=lambda one: (tree.uses[one], rng.random()))
        tree.uses[key] += 1
        shape = self.work.shapes[key]
        size = max(1, min(shape.num_sampled, sampling.max_tokens))
        token_ids = [0] * (size - 1) + [self.work.token(key)]
        rest = shape.entropies[-1] if shape.entropies else 0.0
        entropies = (shape.entropies + [rest] * size)[:size]
        done = Completion(token_ids, [-0.5] * size, entropies, "stop", [])
        first = min(size, stream_interval) if on_tokens is not None else size
        at = 0

        def on_chunk(length: int) -> None:
            nonlocal at
            done.version_spans.append(VersionSpan(self.policy_version, at, at + length))
            self._stats["sampled_tokens"] += length
            if on_tokens is not None and at == 0 and length == stream_interval:
                on_tokens(Chunk(token_ids[:length], [-0.5] * length, entropies[:length]))
            at += length

        self._stats["requests"] += 1
        version = self.policy_version
        parts = prompt_ids.parts if isinstance(prompt_ids, Prefix) else (prompt_ids,)
        computed = tree.compute(parts, version)
        done.num_cached_tokens = len(prompt_ids) - computed
        chunks = [n for n in (first, size - first) if n]
        await tree.home.sample(computed, chunks, on_chunk, order)
        now_s = asyncio.get_running_loop().time()
        turn_s = self.model.turn_s / self.num_loops
        self._loop_free_at = max(self._loop_free_at, now_s) + turn_s
        await asyncio.sleep(max(self._loop_free_at - now_s, self.model.env_s))
        if self.policy_version == version:
            tree.cached.add(token_ids[-1])
        return done

    async def load_weights(self, source: Path, policy_version: int) -> None:
        self.policy_version = policy_version

    def stats(self) -> dict[str, float]:
        waiting = sum(machine.num_waiting for machine in self.machines)
        running = sum(machine.load for machine in self.machines) - waiting
        return {**self._stats, "running": float(running), "waiting": float(waiting)}


class SimulatedRenderer:
    """A renderer for token IDs in place of texts."""

    tokenizer: Any = None

    def prompt(self, messages: Sequence[Message], tools: Any) -> list[int]:
        return self._ids(messages)

    def observation(
        self, messages: Sequence[Message], tools: Any, max_tokens: int, turn_ids: Sequence[int] = ()
    ) -> list[int]:
        return self._ids(messages)

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        size, token = map(int, messages[-1].content.split())
        return [0] * (max(1, size) - 1) + [token]

    def stop(self, tools: Any) -> tuple[str, ...]:
        return ()

    def parse(self, completion: Completion, tools: Any, prefix_ids: Sequence[int] = ()) -> Message:
        token = completion.token_ids[-1]
        return Message("assistant", str(token), tool_calls=(ToolCall("tool", {}),))

    async def prepare(self, messages: Sequence[Message], tools: Any, max_tokens: int) -> None:
        pass


class Places:
    """The configured limits of a tool: concurrent calls, and calls per second."""

    def __init__(self, num_places: int, rate_per_s: float) -> None:
        self._free = asyncio.Semaphore(num_places)
        self._bucket = TokenBucket(rate_per_s, BURST)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        await self._bucket.take()
        async with admitted(self._free, "a place at a tool"):
            yield


class SimulatedEnv:
    """An environment that waits for the times of a turn's tools and returns the turn's reward."""

    fork_mode = "pure"

    def __init__(
        self, work: Work, task: Task, tool_factor: float, places: dict[str, Places]
    ) -> None:
        self._work, self._task, self._factor, self._places = work, task, tool_factor, places
        self._rng = Random(task.id)

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        token = int(self._task.question)
        size = self._work.shapes[self._work.ids[token]].num_observed
        return [Message("user", f"{size} {token}")], {}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        key = self._work.ids[int(action.content)]
        shape = self._work.shapes[key]
        calls = [await self._call(name) for name, *_ in shape.tools]
        info: Info = {"tool_calls": calls}
        if shape.end or not self._work.after[key]:
            return [], shape.reward, shape.end != "truncated", shape.end == "truncated", info
        text = f"{shape.num_observed} {self._work.token(key)}"
        return [Message("tool", text)], 0.0, False, False, info

    async def _call(self, name: str) -> Info:
        now = asyncio.get_running_loop().time
        began_s, places = now(), self._places.get(name)
        async with nullcontext() if places is None else places.place():
            waited_s = now() - began_s
            await asyncio.sleep(self._work.tools[name].draw(self._rng) * self._factor)
        return {"name": name, "duration_s": now() - began_s, "waited_s": waited_s}

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        return 0.0, {}

    async def fork(self) -> SimulatedEnv:
        other = SimulatedEnv(self._work, self._task, self._factor, self._places)
        other._rng = Random(self._rng.random())
        return other

    def close_now(self) -> bool:
        return True

    async def close(self) -> None:
        pass


class SimulatedLearner:
    """A learner that takes the recorded learner's time."""

    def __init__(
        self, model: ServiceModel, config: LearnerConfig, machines: Sequence[Machine]
    ) -> None:
        self.model, self.config, self.machines = model, config, machines
        self.policy_version = 0
        self.turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

    async def update(
        self,
        groups: Sequence[CreditedTree],
        lr_scale: float = 1.0,
        agreement: str = "exact",
        num_minibatches: int | None = None,
    ) -> Metrics:
        num_tokens = num_proximal = 0
        learned = [group for group in groups if group[1].has_signal]
        for tree, credit in learned:
            size = sum(len(node.action_ids) for node in encoded_nodes(tree, credit))
            versions = (span.version for node in tree.nodes for span in node.version_spans)
            is_stale = min(versions, default=self.policy_version) < self.policy_version
            num_tokens += size
            num_proximal += size * (is_stale or self.config.proximal == "always")
        epochs = self.config.num_epochs_per_batch
        fewest = -(-len(groups) // self.config.groups_per_minibatch)
        num_steps = epochs * min(num_minibatches or fewest, len(groups))
        passes = epochs * num_tokens + PROXIMAL * num_proximal
        with ExitStack() as stack:
            for machine in self.machines:
                stack.enter_context(machine.learning())
            await self.work(self.model.update_s * num_steps + self.model.token_s * passes)
        counts = {
            "steps": num_steps,
            "tokens": num_tokens,
            "proximal_tokens": num_proximal,
            "trained": len(groups),
            "equal_groups": len(groups) - len(learned),
        }
        return {f"num_{name}": float(value) for name, value in counts.items()}

    async def work(self, seconds: float) -> None:
        """Wait for work that takes `seconds` without other load."""
        left_s = seconds
        while left_s > 1e-9:
            is_shared = any(machine.is_busy for machine in self.machines)
            slower = self.model.shared if is_shared else 1.0
            part_s = min(left_s, seconds / NUM_CHECKS) if self.model.shared > 1 else left_s
            await asyncio.sleep(part_s * slower)
            left_s -= part_s

    async def score(self, sequences: Sequence[EncodedTree]) -> list[Score]:
        await self.work(self.model.score_s)
        counts = [one.num_action_tokens for one in sequences]
        return [Score([-0.5] * n, [0.5] * n, [False] * n) for n in counts]

    async def publish(self, directory: Path, *, adapter_only: bool = False) -> Path:
        await asyncio.sleep(self.model.publish_s)
        self.policy_version += 1
        return directory

    async def export(self, directory: Path) -> Path:
        return directory

    async def save(self, directory: Path) -> None:
        pass

    async def close(self) -> None:
        pass


class Variant(Struct, frozen=True, kw_only=True):
    """Differences from the configuration. `max_branches` limits growing branches, counted by leaf;
    the queue's slots limit trees."""

    name: str
    max_staleness: int | None = None
    num_engines: int = 1
    tool_factor: float = 1.0
    places: dict[str, float] = {}  # factor of the configured places, by tool
    max_branches: int = 0


class Figures(Struct, frozen=True, kw_only=True):
    """Figures of a run while its queue is full; see `figures`."""

    step_s: float  # from one step's end to the next
    idle_share: float  # share of the time in which the learner is idle
    staleness: float  # mean over trees
    tokens_per_s: float  # sampled
    branches: float  # growing: mean at the ends of steps
    tools_wait_s: float  # for a place: mean over tool calls


class SimulatedFeeder(Feeder):
    """Starts trees only while fewer than `max_branches` branches grow; 0: no limit."""

    max_branches = 0
    commit_s = 0.0  # time to commit a tree to the journal, which is not written

    async def _roll_out(self, one: InflightRollout, position: int) -> TrajectoryTree:
        tree = await super()._roll_out(one, position)
        await asyncio.sleep(self.commit_s)
        return tree

    async def _until_room(self) -> None:
        envs, size = self.parts.actor.envs, self.config.algorithm.group_size
        if self.max_branches:
            await asyncio.sleep(1e-6)  # lets the previous tree start
        most = self.max_branches
        while most and envs.count and envs.count + size > most:  # noqa: ASYNC110 (of any tree)
            await asyncio.sleep(CHECK_S)


class SimulatedReport(StepReport):
    """Keeps the data of each step for `figures`."""

    tree_s = 0.0  # of the loop, for each tree of a step
    timings: Timings | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.rows: list[dict[str, float]] = []
        self._row_s = 0.0

    async def record(self, batch: StepBatch, num_known: dict[int, int]) -> None:
        trees, metrics = batch.delivered, batch.metrics
        await asyncio.sleep(self.tree_s * len(trees))
        now_s = asyncio.get_running_loop().time()
        nodes = (node for tree in trees for node in tree.nodes)
        waits = [call["waited_s"] for node in nodes for call in node.info.get("tool_calls", ())]
        taken = self.watch.take()
        if self.timings is not None:
            self.timings.write(self.timings.row(trees, metrics | taken))
        self.rows.append(
            {
                "step_s": now_s - self._row_s,
                "wait_s": taken.get("time/wait_s", 0.0),
                "staleness": metrics["staleness/mean"],
                "sampled": metrics["rollout/sampled_tokens"],
                "branches": float(self.parts.actor.envs.count),
                "calls": float(len(waits)),
                "waits_s": sum(waits),
            }
        )
        self._row_s = now_s


async def _simulate(
    training: Training, max_branches: int, tree_s: float, commit_s: float, *, is_timed: bool
) -> SimulatedReport:
    """Run only the phase of RL, and return the data of its steps."""
    async with AsyncExitStack() as stack:
        loop = await training.set_up(stack)
        stack.push_async_callback(loop.parts.probe.close)
        training.run.begin(training.config)
        report, feeder = loop.report, loop.feeder
        assert isinstance(report, SimulatedReport)
        assert isinstance(feeder, SimulatedFeeder)
        feeder.max_branches, feeder.commit_s = max_branches, commit_s
        report.tree_s = tree_s
        report.timings = begin(loop, training.run.path / FILE) if is_timed else None
        await training.run_rl()
        return report


def simulate(
    config: TrainConfig,
    trace: Trace,
    variant: Variant,
    num_steps: int,
    model: ServiceModel | None = None,
    timings: Path | None = None,
) -> Figures:
    """Simulate a number of steps with a full queue and return the figures. `trace` provides the
    work, `model` its times (default: fitted to the trace). The simulated run writes its own times
    to `timings`. Raises ConfigError for settings that cannot be simulated."""
    if config.resources.colocated:
        raise ConfigError("resources.colocated: engines that sleep are not simulated")
    queue = config.queue
    if variant.max_staleness is not None:
        queue = replace(queue, max_staleness=variant.max_staleness)
    bound, commit_s = queue.max_staleness, COMMIT_S * config.journal.enabled
    config = replace(
        config,
        queue=queue,
        sft=None,
        self_critic=None,
        eval=EvalConfig(),
        journal=JournalConfig(enabled=False),
        log=LogConfig(trajectories=False),
        train=replace(config.train, num_steps=_warm(bound) + num_steps + bound, num_epochs=None),
        checkpoint=replace(config.checkpoint, every=0, minutes=0.0, best_metric=""),
    )
    work = Work(trace)
    model = model or fitted(trace)
    slots = getattr(config.engine, "max_num_seqs", DEFAULT_SLOTS)

    async def build(
        config: TrainConfig, run: RunDirectory, checkpoint: Any, stack: AsyncExitStack, report: Any
    ) -> Parts:
        machines = [Machine(model, slots) for _ in range(variant.num_engines)]
        engine = SimulatedEngine(work, machines, model, num_workers(config))
        learner = SimulatedLearner(model, config.learner, machines)
        return _parts(config, run.path, trace, engine, learner, work, variant)

    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as nowhere:
        run = RunDirectory(Path(folder) / "run", resume=False)
        view = View()
        view.console = view._errors = Console(file=nowhere)
        training = make_training(
            config, run, view, build=build, make_feeder=SimulatedFeeder, make_report=SimulatedReport
        )
        is_timed, branches = timings is not None, variant.max_branches
        report = run_virtual(
            _simulate(training, branches, model.tree_s, commit_s, is_timed=is_timed)
        )
        run.close()
        if timings is not None:
            shutil.copyfile(run.path / FILE, timings)
    return figures(report.rows, bound)


def _parts(
    config: TrainConfig,
    folder: Path,
    trace: Trace,
    engine: Any,
    learner: Any,
    work: Work,
    variant: Variant,
) -> Parts:
    """Build the parts of a simulated run from the configuration and the trace's work."""
    prompts = [(root, work.token(root)) for root in work.roots]
    Random(config.run.seed).shuffle(prompts)
    tasks = [Task(f"{root}", "simulated", f"{token}", ("",)) for root, token in prompts]
    renderer: Any = SimulatedRenderer()
    places = {
        name: Places(max(1, int(most * factor)), rate_per_s * factor)
        for name, (most, rate_per_s) in tool_bounds(config).items()
        for factor in [variant.places.get(name, 1.0)]
    }
    make: Any = lambda task: SimulatedEnv(work, task, variant.tool_factor, places)  # noqa: E731
    actor = Actor(
        engine, renderer, make, config.limits, SamplingParams(max_tokens=1), f"{config.run.seed}"
    )
    probed = [
        renderer.prompt([Message("user", f"{work.shapes[root].num_observed} {token}")], ())
        for root, token in prompts[:NUM_PROBE_PROMPTS]
    ]
    return Parts(
        tokenizer=None,
        tasks=tasks,
        eval_tasks={},
        num_steps=config.train.count_steps(len(tasks), config.queue.groups_per_step),
        plan=config.algorithm.plan(trace.vocab_size),
        engine=engine,
        learner=learner,
        actor=actor,
        eval_actor=actor,
        probe=ParityProbe(engine, learner, probed),
        publisher=DirectoryPublisher(engine, learner, folder / "weights"),
        demonstrations=None,
        vocab_size=trace.vocab_size,
    )


def tool_bounds(config: TrainConfig) -> dict[str, tuple[int, float]]:
    """Return the limits of concurrent calls and of calls per second (0: no limit), by tool, if
    configured. An idle sandbox session makes room for others, so the limit on sessions counts as a
    limit on calls."""
    found: dict[str, tuple[int, float]] = {}
    kwargs = config.env.kwargs
    search = config.search or search_config(kwargs.get("search"))
    if (traffic := getattr(search.backend, "traffic", None)) is not None:
        found["search"] = traffic.max_concurrency, traffic.rate_per_s
    python = config.python or python_config(kwargs.get("python"))
    found["python"] = python.limits.max_sessions, 0.0
    for tool in config.env.tools:
        name = tool.name.rpartition(":")[2]
        if tool.max_concurrency is not None:
            most, rate_per_s = found.get(name, (tool.max_concurrency, 0.0))
            found[name] = min(most, tool.max_concurrency), rate_per_s
    num = num_workers(config)
    return {name: (most * num, rate_per_s * num) for name, (most, rate_per_s) in found.items()}


def num_workers(config: TrainConfig) -> int:
    """Return the number of processes that run rollouts."""
    return config.cluster.workers if isinstance(config.cluster, SpreadCluster) else 1


def recorded(trace: Trace) -> Figures:
    """Return the figures of the recorded run, without its evaluations and checkpoints."""
    rows = []
    for step in trace.steps:
        shapes = [shape for tree in step.trees for shape in tree]
        waits = [waited_s for shape in shapes for *_, waited_s in shape.tools]
        rows.append(
            {
                "step_s": step.seconds,
                "wait_s": step.wait_s,
                "staleness": step.staleness,
                "sampled": float(sum(shape.num_sampled for shape in shapes)),
                "branches": 0.0,
                "calls": float(len(waits)),
                "waits_s": sum(waits),
            }
        )
    return figures(rows, trace.max_staleness)


def _warm(max_staleness: int) -> int:
    """Return the number of first steps of a run, during which the queue fills."""
    return max(2, max_staleness + 1)


def figures(rows: Sequence[dict[str, float]], max_staleness: int) -> Figures:
    """Return the figures of the steps with a full queue. At the end of a run no tree starts."""
    steps = rows[_warm(max_staleness) : len(rows) - max_staleness] or rows[1:]
    sums = {name: sum(row[name] for row in steps) for name in steps[0]}
    seconds, num = sums["step_s"], len(steps)
    return Figures(
        step_s=seconds / num,
        idle_share=sums["wait_s"] / seconds,
        staleness=sums["staleness"] / num,
        tokens_per_s=sums["sampled"] / seconds,
        branches=sums["branches"] / num,
        tools_wait_s=sums["waits_s"] / max(1.0, sums["calls"]),
    )


def variants(config: TrainConfig, trace: Trace) -> list[Variant]:
    """Return the variants to compare: the configuration, staleness, engines, tools and their
    places, and a limit on branches in place of trees."""
    size = config.algorithm.group_size
    bound = config.queue.max_staleness
    num = config.queue.groups_per_step * (bound + 1) * size
    found = [Variant(name="as configured")]
    found += [
        Variant(name=f"max_staleness {other}", max_staleness=other)
        for other in (0, 1, 2, 4)
        if other != bound
    ]
    found += [Variant(name=f"{number} x the engines", num_engines=number) for number in (2, 4)]
    found += [Variant(name="tools twice as fast", tool_factor=0.5)]
    shapes = (shape for step in trace.steps for tree in step.trees for shape in tree)
    called = {name for shape in shapes for name, *_ in shape.tools}
    found += [
        Variant(name=f"2 x places of {name}", places={name: 2.0})
        for name in tool_bounds(config)
        if name in called
    ]
    found += [
        Variant(name=f"{most} branches in all", max_branches=most)
        for most in sorted({max(size, int(num * share)) for share in (0.25, 0.5, 0.75)})
    ]
    return found


def advice(config: TrainConfig, found: dict[str, Figures]) -> str:
    """Return a line with the concurrency limit that gives the fastest steps, all else equal."""
    bounds = ("as configured", "max_staleness", "branches")
    names = [name for name in found if any(word in name for word in bounds)]
    best = min(names, key=lambda name: found[name].step_s)
    gain = 1 - found[best].step_s / found["as configured"].step_s
    if gain < SMALL_GAIN:
        return "no other concurrency is worth it: steps would be less than 3 % faster"
    return f"best concurrency: {best}, with steps {gain:.0%} faster"
