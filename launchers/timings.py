"""How long what takes in a run: RUN/timings.jsonl, from which a simulation is fitted.

    first row   {"vocab_size": V}
    each step   {"at_s": when it was done, by the loop's clock, "wait_s", "update_s", "publish_s",
                 "parity_s", "num_tokens": trained ones, "staleness": of its trees, the mean,
                 "turns": [Turn, ...] since the row before, "trees": [[Shape, ...], ...]}

`log.timings` has it written. A tree is written without its tokens: how many each turn had, how long
its tools took, and the first entropies, by which algorithms fork.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.engine import Engine
from agentenv.errors import DataError, ForeignError
from agentenv.foreign import decode
from agentenv.tree import TrajectoryTree
from agentenv.types import Chunk, Completion, SamplingParams

FILE = "timings.jsonl"
NUM_ENTROPIES = 32  # of a turn


class Turn(Struct, array_like=True, frozen=True):
    """A turn that an engine sampled within `seconds`. The engine had `running` turns meanwhile, on
    average, computed `computed` tokens of prompts that its cache did not hold, and shared the
    machine with a learner at work for `beside` of the time."""

    num_sampled: int
    seconds: float
    running: float
    computed: int
    beside: float


class Shape(Struct, array_like=True, frozen=True):
    """A node of a tree: `parent` is an index, -1 for the root; `tools` are names and seconds; `end`
    as in agentenv.tree, empty for a node that others follow."""

    parent: int
    num_sampled: int
    num_observed: int
    entropies: list[float]
    tools: list[tuple[str, float]]
    reward: float
    end: str


class StepTimes(Struct, frozen=True, kw_only=True):
    """A row; see above."""

    at_s: float
    wait_s: float
    update_s: float
    publish_s: float
    parity_s: float
    num_tokens: float
    staleness: float
    turns: list[Turn]
    trees: list[list[Shape]]


class Trace(Struct, frozen=True):
    """What a file says."""

    vocab_size: int
    steps: list[StepTimes]


class _Head(Struct, frozen=True):
    vocab_size: int


def read_trace(run: Path) -> Trace:
    """Raises DataError unless the run has written at least two steps of its times."""
    path = run / FILE
    try:
        head, *rows = path.read_bytes().splitlines()
        if rows and not rows[-1].endswith(b"}"):
            rows.pop()  # of a run that was killed
        steps = [decode(row, StepTimes) for row in rows]
        vocab_size = decode(head, _Head).vocab_size
    except (OSError, ValueError, ForeignError) as error:
        raise DataError(
            f"{path} cannot be read: {error}; a run writes it with log.timings=true"
        ) from error
    if len(steps) < 2:
        raise DataError(f"{path} has {len(steps)} steps, and two are needed")
    return Trace(vocab_size, steps)


def shapes_of(tree: TrajectoryTree) -> list[Shape]:
    """The tree as a trace has it."""
    return [
        Shape(
            -1 if node.parent is None else node.parent,
            len(node.action_ids),
            len(node.observation_ids),
            [round(one, 4) for one in node.entropies[:NUM_ENTROPIES] if one == one],  # not NaN
            [
                (str(call["name"]), round(float(call.get("duration_s", 0.0)), 6))
                for call in node.info.get("tool_calls", ())
            ],
            node.reward,
            node.end or "",
        )
        for node in tree.nodes
    ]


class Timings:
    """Measures a run and writes its rows. Integrals over time, by which a turn learns what went on
    beside it, move on whenever a turn begins or ends."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._path = path
        self._turns: list[Turn] = []
        self._running = self._num_computed = self._learning = 0
        self._sums = (0.0, 0.0)  # seconds times running turns, seconds beside a learner
        self._since = asyncio.get_running_loop().time()
        if not path.exists():
            path.write_bytes(msgspec.json.encode(_Head(vocab_size)) + b"\n")

    def _now(self) -> float:
        now = asyncio.get_running_loop().time()
        passed, self._since = now - self._since, now
        running, beside = self._sums
        self._sums = running + passed * self._running, beside + passed * bool(self._learning)
        return now

    @contextmanager
    def learning(self) -> Iterator[None]:
        """To be entered while the learner is at work."""
        self._now()
        self._learning += 1
        try:
            yield
        finally:
            self._now()
            self._learning -= 1

    async def turn(self, sampling: Callable[[], Any], num_prompt: int) -> Completion:
        """What `sampling` gives, measured."""
        began_s = self._now()
        (running, beside), computed = self._sums, self._num_computed
        self._running += 1
        try:
            done: Completion = await sampling()
        finally:
            now = self._now()
            self._running -= 1
        self._num_computed += num_prompt - done.num_cached_tokens
        seconds = max(now - began_s, 1e-9)
        self._turns.append(
            Turn(
                len(done.token_ids),
                seconds,
                (self._sums[0] - running) / seconds,
                self._num_computed - computed,
                (self._sums[1] - beside) / seconds,
            )
        )
        return done

    def row(self, trees: Sequence[TrajectoryTree], metrics: dict[str, Any]) -> bytes:
        """The row of a step, whose seconds are in its metrics."""
        turns, self._turns = self._turns, []
        row = StepTimes(
            at_s=self._now(),
            **{name: metrics.get(f"time/{name}", 0.0)
               for name in ("wait_s", "update_s", "publish_s", "parity_s")},
            num_tokens=metrics.get("learner/num_tokens", 0.0),
            staleness=metrics.get("staleness/mean", 0.0),
            turns=turns,
            trees=[shapes_of(tree) for tree in trees],
        )  # fmt: skip
        return msgspec.json.encode(row) + b"\n"

    def write(self, row: bytes) -> None:
        """Append a row; blocks."""
        with self._path.open("ab") as file:
            file.write(row)


class TimedEngine:
    """An engine whose turns are measured."""

    def __init__(self, engine: Engine, timings: Timings) -> None:
        self._engine, self._timings = engine, timings

    @property
    def policy_version(self) -> int:
        return self._engine.policy_version

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
        """As the engine's."""
        return await self._timings.turn(
            lambda: self._engine.generate(
                prompt_ids,
                sampling,
                session=session,
                on_tokens=on_tokens,
                stream_interval=stream_interval,
                order=order,
            ),
            len(prompt_ids),
        )

    async def load_weights(self, source: Path, policy_version: int) -> None:
        await self._engine.load_weights(source, policy_version)

    def stats(self) -> dict[str, float]:
        return self._engine.stats()

    async def close(self) -> None:
        await self._engine.close()
