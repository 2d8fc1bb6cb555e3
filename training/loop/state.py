"""The state of a run besides the learner's, including evaluation results, and its checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from agentenv.assembly.run.checkpoints import Saver, load_state
from agentenv.base.deadline import within
from agentenv.base.errors import AgentEnvError, ConfigError
from agentenv.base.offload import in_thread
from agentenv.data.curriculum import Outcomes
from agentenv.rollout.archive import Archive
from agentenv.rollout.journal import Journal
from agentenv.rollout.metrics import EntropyProfile, MeanCurve, Metrics, TreeCounters
from agentenv.training.loop.brief_reports import BriefReport
from agentenv.training.loop.parity import ParityGap

logger = logging.getLogger(__name__)


class Totals(Struct):
    """Sums over all trees delivered to the learner."""

    tool_calls: int = 0
    forks: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    sft_tokens: int = 0
    staleness_max: int = 0
    staleness_sum: int = 0
    num_trees: int = 0
    num_trajectories: int = 0  # without failed ones
    num_failed: int = 0
    num_refused: int = 0  # trajectories that ended, some of whose calls were refused

    def add(self, step: Metrics) -> None:
        """Add the metrics of a step's trees, see `agentenv.rollout.metrics.rollout_metrics`."""
        num_trees = int(step["rollout/trees"])
        self.tool_calls += int(step["rollout/tool_calls"])
        self.forks += int(step["rollout/forks"])
        self.sampled_tokens += int(step["rollout/sampled_tokens"])
        self.staleness_max = max(self.staleness_max, int(step["staleness/max"]))
        self.staleness_sum += round(step["staleness/mean"] * num_trees)
        self.num_trees += num_trees
        self.num_trajectories += int(step["rollout/trajectories"])
        self.num_failed += int(step["failed/trajectories"])
        self.num_refused += int(step.get("rollout/refused", 0))

    @property
    def failed_share(self) -> float:
        """Share of failed trajectories."""
        return self.num_failed / max(1, self.num_failed + self.num_trajectories)


class Evaluating(Struct, frozen=True):
    """A pending evaluation of `sets`, of the weights of `step` from the process `incarnation`."""

    step: int
    policy_version: int
    sets: list[str]
    incarnation: int = 0
    when: str = ""  # around a phase; empty: after the step

    @property
    def phase(self) -> str:
        """The name of its folder and of its row of metrics."""
        return self.when or f"step-{self.step:06d}"


class Imitating(Struct):
    """The progress of a cold start: optimizer steps, and the measurements (exact match by kind).
    Both determine the order of demonstrations, which a resumed run draws again."""

    step: int = 0
    measured: list[dict[str, float]] = []


class RunState(Struct):
    """The state of a run.

    `step`: number of finished updates. `position`: number of delivered trees, in start order.
    `incarnation`: number of this process among all processes of the run; `line`: that of the
    process which trained the weights (0: the initial weights). `reports`: by phase (before_sft,
    after_sft, after_rl) and set. `entropy`, `surprise`: over all delivered trees. `evaluating`: a
    pending evaluation; `imitating`: a pending cold start. `working_tools`: tools of which most
    calls of a step succeeded."""

    step: int = 0
    position: int = 0
    incarnation: int = 0
    line: int = 0
    counters: TreeCounters = field(default_factory=TreeCounters)
    totals: Totals = field(default_factory=Totals)
    outcomes: Outcomes = field(default_factory=Outcomes)  # for the curriculum
    parity: ParityGap = field(default_factory=ParityGap)
    entropy: EntropyProfile = {}
    surprise: MeanCurve = field(default_factory=MeanCurve)
    plan: dict[str, Any] = {}  # what the algorithm's plan has learned
    reports: dict[str, dict[str, BriefReport]] = {}
    best: float | None = None
    evaluating: Evaluating | None = None
    imitating: Imitating | None = None
    working_tools: list[str] = []
    wall_s: dict[str, float] = {}
    cpu_s: dict[str, float] = {}

    def sampling_rate(self, more_s: float = 0.0) -> float:
        """Sampled tokens per second over the whole RL phase; a last step alone samples fewer.
        `more_s`: seconds of the phase that its clock has not counted yet."""
        seconds = self.wall_s.get("rl", 0.0) + more_s
        return self.totals.sampled_tokens / seconds if seconds else 0.0

    def resumable(self) -> RunState:
        """The state for a checkpoint, without in-flight trees: a resumed run starts them again."""
        counters = self.counters
        return replace(self, counters=replace(counters, offered=counters.num_delivered))


@dataclass(eq=False, kw_only=True)
class RunSaver(Saver):
    """The checkpoints of a training run."""

    state: RunState
    journal: Journal | None
    archive: Archive

    @asynccontextmanager
    async def moving(self) -> AsyncIterator[None]:
        async with super().moving():
            yield
            self.state.line = self.state.incarnation

    async def _before(self) -> None:
        """Complete archive and journal first: after the checkpoint, the trees of its step could not
        be written again."""
        if self.journal is not None and not self.journal.is_broken:
            with suppress(ConfigError):  # raised by `_release`, after the weights are safe
                await self.journal.commit()
        await asyncio.shield(self.archive.written())  # whose disk may hang

    async def save(self, *, at_end: bool = False) -> None:
        """As Saver.save; also removes the part of the journal that no checkpoint needs."""
        if not at_end:
            await super().save()
            return await self._release()
        # Weights and state come first; the rest may fail.
        writing = asyncio.create_task(self.archive.written())
        try:
            await super().save(at_end=True)
        finally:
            await self._try_finish("the trees of the last step", writing)
        await self._try_finish("the journal", self._release())

    async def _release(self) -> None:
        """Remove the part of the journal that no checkpoint needs."""
        if self.journal is not None and not self.journal.is_broken:
            await self.journal.rotate(await in_thread(self._oldest))

    def _oldest(self) -> int:
        """The position of the first tree that a remaining checkpoint may need."""
        newest = self.checkpoints.finished()[-self.config.keep_last :]
        return min((load_state(path, RunState).position for path in newest), default=0)

    async def _try_finish(self, what: str, writing: Awaitable[None]) -> None:
        """Wait at most `finish_s`, and only log a failure."""
        try:
            shielded = asyncio.shield(writing)  # a disk that hangs blocks its cancellation
            await within(self.config.finish_s, f"writing {what}", shielded)
        except Exception as error:
            is_ours = isinstance(error, AgentEnvError | OSError)
            trace = None if is_ours else error
            logger.warning("%s could not be written: %s", what, error, exc_info=trace)
