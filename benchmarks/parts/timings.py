"""Train as `agentenv train` does and write the times of all parts to RUN/timings.jsonl, to which
the simulation is fitted: `python -m benchmarks.parts.timings CONFIG [key.sub=value ...]`.

    first row   {"vocab_size": V, "max_staleness": the bound of the queue}
    each step   {"wait_s", "update_s", "publish_s", "parity_s",
                 "rest_s": other time of the loop since the last row, without evaluations and
                     checkpoints,
                 "loop_s": CPU seconds of the event loop since the last row,
                 "branch_s": seconds of branches outside turns, in or between environments,
                 "busy": share of the update during which an engine sampled,
                 "num_steps": optimizer steps, "num_tokens": trained tokens,
                 "num_proximal_tokens": tokens whose proximal log-probs an extra pass computed,
                 "staleness": mean over the trees,
                 "turns": [Turn, ...] since the last row, "trees": [[Shape, ...], ...]}

A tree is written without its tokens: it has the token counts of turns, the tools' running and
waiting times, and the first entropies, by which algorithms fork.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.disk import append_whole, write_whole
from agentenv.base.errors import DataError, ForeignError
from agentenv.base.offload import in_thread
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Chunk, Completion, Info, SamplingParams
from agentenv.base.untrusted import decode
from agentenv.contract.engine import Engine
from agentenv.launchers.command import make_parser, parse, run_command
from agentenv.learners.keys import Metrics
from agentenv.training.loop.batching import StepBatch
from agentenv.training.loop.loop import Loop
from agentenv.training.loop.step_report import StepReport
from agentenv.training.loop.training import Training
from agentenv.training.start import ADDED

FILE = "timings.jsonl"
NUM_ENTROPIES = 32  # of a turn
CACHED = " (cached)"  # suffix of a tool's name for a cache hit, which takes no place
PARTS = ("wait_s", "update_s", "publish_s", "parity_s")


class Turn(Struct, array_like=True, frozen=True):
    """A turn that an engine sampled in `seconds`. During that time, the engine had `running` turns
    on average, computed `computed` prompt tokens that its cache did not hold, and a learner worked
    on the same machine for the share `beside` of the time."""

    num_sampled: int
    seconds: float
    running: float
    computed: int
    beside: float


class Shape(Struct, array_like=True, frozen=True):
    """A node of a tree. `parent` is an index, -1 for the root. `tools` has names, running seconds,
    and seconds waiting for a place. `end` is as in agentenv.base.tree, and empty for an inner
    node."""

    parent: int
    num_sampled: int
    num_observed: int
    entropies: list[float]
    tools: list[tuple[str, float, float]]
    reward: float
    end: str


class StepTimes(Struct, frozen=True, kw_only=True):
    """A row of a step; see the module docstring."""

    wait_s: float
    update_s: float
    publish_s: float
    parity_s: float
    rest_s: float
    loop_s: float
    branch_s: float
    busy: float
    num_steps: float
    num_tokens: float
    num_proximal_tokens: float
    staleness: float
    turns: list[Turn]
    trees: list[list[Shape]]

    @property
    def seconds(self) -> float:
        """Seconds of the step."""
        return self.wait_s + self.update_s + self.publish_s + self.parity_s + self.rest_s


class Trace(Struct, frozen=True):
    """The contents of a timings file."""

    vocab_size: int
    max_staleness: int
    steps: list[StepTimes]


class _Head(Struct, frozen=True):
    vocab_size: int
    max_staleness: int


def read_trace(run: Path) -> Trace:
    """Read the timings of a run. Raises DataError if it has fewer than two steps."""
    path = run / FILE
    try:
        head, *rows = path.read_bytes().splitlines()
        if rows and not rows[-1].endswith(b"}"):
            rows.pop()  # partial line of a killed run
        steps = [decode(row, StepTimes) for row in rows]
        first = decode(head, _Head)
    except (OSError, ValueError, ForeignError) as error:
        raise DataError(
            f"{path} cannot be read: {error}; `python -m benchmarks.parts.timings CONFIG` writes it"
        ) from error
    if len(steps) < 2:
        raise DataError(f"{path} has {len(steps)} steps; at least two are needed")
    return Trace(first.vocab_size, first.max_staleness, steps)


def shapes_of(tree: TrajectoryTree) -> list[Shape]:
    """Return the nodes of a tree in the form of a trace."""
    return [
        Shape(
            -1 if node.parent is None else node.parent,
            len(node.action_ids),
            len(node.observation_ids),
            [round(one, 4) for one in node.entropies[:NUM_ENTROPIES] if one == one],  # not NaN
            [_call(call) for call in node.info.get("tool_calls", ())],
            node.reward,
            node.end or "",
        )
        for node in tree.nodes
    ]


def _call(record: Info) -> tuple[str, float, float]:
    name = str(record["name"]) + CACHED * bool(record.get("info", {}).get("cached"))
    waited_s = float(record.get("waited_s", 0.0))
    worked_s = float(record.get("duration_s", 0.0)) - waited_s
    return name, round(worked_s, 6), round(waited_s, 6)


class Timings:
    """Measures a run and writes its rows. The time integrals that give the load during a turn are
    updated whenever a turn starts or ends."""

    def __init__(
        self, path: Path, vocab_size: int, max_staleness: int, branches: Callable[[], float]
    ) -> None:
        """`branches` returns the number of growing branches."""
        self._path = path
        self._branches, self._between_s = branches, 0.0
        self._turns: list[Turn] = []
        self._running = self._num_training = self._num_computed = self._learning = 0
        self._sums = (0.0, 0.0)  # running turns times seconds; seconds with a learner at work
        self._learned_s = self._shared_s = 0.0  # since the last row; shared: with turns
        self._since = asyncio.get_running_loop().time()
        self._row_s: float | None = None  # time of the last row
        self._loop_s = time.thread_time()
        if not path.exists():
            write_whole(path, msgspec.json.encode(_Head(vocab_size, max_staleness)) + b"\n")

    def _now(self) -> float:
        now = asyncio.get_running_loop().time()
        passed, self._since = now - self._since, now
        self._between_s += passed * max(0.0, self._branches() - self._num_training)
        running, beside = self._sums
        self._sums = running + passed * self._running, beside + passed * bool(self._learning)
        if self._learning:
            self._learned_s += passed
            self._shared_s += passed * bool(self._running)
        return now

    @contextmanager
    def learning(self) -> Iterator[None]:
        """Context manager for the time during which the learner works."""
        self._now()
        self._learning += 1
        try:
            yield
        finally:
            self._now()
            self._learning -= 1

    async def turn(
        self, sampling: Callable[[], Any], num_prompt: int, trains: bool = True
    ) -> Completion:
        """Measure and return the result of `sampling`. `trains`: its branch counts as growing."""
        began_s = self._now()
        (running, beside), computed = self._sums, self._num_computed
        self._running += 1
        self._num_training += trains
        try:
            done: Completion = await sampling()
        finally:
            now = self._now()
            self._running -= 1
            self._num_training -= trains
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
        """Return the row of a step with these metrics."""
        at_s = self._now()
        turns, self._turns = self._turns, []
        loop_s = time.thread_time()
        parts = {name: metrics.get(f"time/{name}", 0.0) for name in PARTS}
        counted = ("num_steps", "num_tokens", "num_proximal_tokens")
        counts = {name: metrics.get(f"learner/{name}", 0.0) for name in counted}
        known_s = sum(parts.values()) + metrics.get("time/evaluate_and_save_s", 0.0)
        row = StepTimes(
            **parts,
            rest_s=0.0 if self._row_s is None else max(0.0, at_s - self._row_s - known_s),
            loop_s=loop_s - self._loop_s,
            branch_s=self._between_s,
            busy=self._shared_s / self._learned_s if self._learned_s else 0.0,
            **counts,
            staleness=metrics.get("staleness/mean", 0.0),
            turns=turns,
            trees=[shapes_of(tree) for tree in trees],
        )
        self._row_s, self._loop_s = at_s, loop_s
        self._learned_s = self._shared_s = self._between_s = 0.0
        return msgspec.json.encode(row) + b"\n"

    def write(self, row: bytes) -> None:
        """Append a row to the file. Blocks."""
        append_whole(self._path, row)


class TimedEngine(Engine):
    """An engine that measures its turns."""

    def __init__(self, engine: Engine, timings: Timings, trains: bool) -> None:
        self._engine, self._timings, self._trains = engine, timings, trains

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
        """Generate with the wrapped engine."""
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
            self._trains,
        )

    async def load_weights(self, source: Path, policy_version: int) -> None:
        await self._engine.load_weights(source, policy_version)

    def stats(self) -> dict[str, float]:
        return self._engine.stats()

    async def close(self) -> None:
        await self._engine.close()


class TimedReport(StepReport):
    """A report that also writes the times of each step."""

    timings: Timings

    async def record(self, batch: StepBatch, num_known: dict[int, int]) -> None:
        await super().record(batch, num_known)
        await in_thread(self.timings.write, self.timings.row(batch.delivered, self.row))


class TimedTraining(Training):
    """A training that measures its turns and updates."""

    def __init__(self, *arguments: Any, **keys: Any) -> None:
        super().__init__(*arguments, make_report=TimedReport, **keys)

    async def set_up(self, stack: AsyncExitStack) -> Loop:
        loop = await super().set_up(stack)
        assert isinstance(loop.report, TimedReport)
        loop.report.timings = begin(loop, self.run.path / FILE)
        return loop


def begin(loop: Loop, path: Path) -> Timings:
    """Start measuring the engine and the learner of a run after its setup."""
    parts, bound = loop.parts, loop.queue.max_staleness
    timings = Timings(path, parts.vocab_size, bound, loop.feeder.num_open_envs)
    for actor in (parts.actor, parts.eval_actor):
        actor.engine = TimedEngine(actor.engine, timings, actor is parts.actor)
    update = parts.learner.update

    async def measured(*arguments: Any) -> Metrics:
        with timings.learning():
            return await update(*arguments)

    parts.learner.update = measured  # type: ignore[method-assign, assignment]
    return timings


def main(argv: Sequence[str]) -> int:
    """Train and return the exit code of `agentenv train`."""
    parser = make_parser(__name__, "Train, and write timings.jsonl.", TrainConfig)

    def work(
        config: TrainConfig, run: RunDirectory, view: View, resume: str
    ) -> Coroutine[Any, Any, None]:
        return TimedTraining(config, run, view, resume=resume, **ADDED).run_all()

    return run_command(parse(parser, argv), TrainConfig, work)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
