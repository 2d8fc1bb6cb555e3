"""The state of a run besides the learner's, including evaluation results, and its checkpoints."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from statistics import fmean

from msgspec import Struct, field
from msgspec.structs import replace

from agentenv.assembly.run.checkpoints import CheckpointConfig, Checkpoints, Saver, load_state
from agentenv.assembly.run.kept import best_checkpoint, keep_best
from agentenv.assembly.run.records import EvalRow
from agentenv.assembly.run.terminal import View
from agentenv.base.deadline import uncancelled, within
from agentenv.base.errors import AgentEnvError, ConfigError
from agentenv.base.offload import in_thread
from agentenv.data.curriculum import Outcomes
from agentenv.evaluation import statistics
from agentenv.learners.ranks.deepspeed_learner import DeepSpeedLearner
from agentenv.rollout.archive import Archive
from agentenv.rollout.journal import Journal
from agentenv.rollout.metrics import EntropyProfile, Metrics, TreeCounters
from agentenv.training.loop.publishing import ParityGap

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

    @property
    def failed_share(self) -> float:
        """Share of failed trajectories."""
        return self.num_failed / max(1, self.num_failed + self.num_trajectories)


class Evaluating(Struct, frozen=True):
    """A pending evaluation of `sets`, of the weights of `step` from the process `incarnation`. The
    run's folder keeps the weights of an overlapping evaluation until it is done."""

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
    measured: list[dict[str, float]] = field(default_factory=list)


# Brief figures of evaluations; the report of a stored evaluation has all of them.


class BriefFigures(Struct, frozen=True):
    """Figures of one group of questions. `success`: the share of trajectories with a correct
    answer, with its 95 % interval over questions. Failed trajectories are counted separately, never
    as wrong; if all failed, the means are None."""

    num_trajectories: int
    num_failed: int
    success: float | None
    interval: tuple[float, float]
    reward: float | None
    tool_calls: float | None
    action_tokens: float | None

    @property
    def failed_share(self) -> float:
        """Share of failed trajectories."""
        return self.num_failed / max(1, self.num_failed + self.num_trajectories)

    @property
    def success_if_failed_wrong(self) -> float:
        """The success if failed trajectories counted as wrong."""
        return (self.success or 0.0) * (1 - self.failed_share)


class BriefReport(Struct, frozen=True):
    """The result of one evaluation: over all questions and by their kind. `policy_versions`: the
    oldest and newest that sampled."""

    name: str
    policy_versions: tuple[int, int]
    overall: BriefFigures
    by_kind: dict[str, BriefFigures]


def brief_report(name: str, rows: Sequence[EvalRow]) -> BriefReport:
    """The figures of the rows of one set."""
    kinds = sorted({row.kind for row in rows})
    versions = [version for row in rows for version in row.policy_versions]
    return BriefReport(
        name=name,
        policy_versions=(min(versions, default=0), max(versions, default=0)),
        overall=_figures(rows),
        by_kind={kind: _figures([row for row in rows if row.kind == kind]) for kind in kinds},
    )


def _interval(done: Sequence[EvalRow]) -> tuple[float, float]:
    """95 % interval of the share of correct trajectories, clustered by question."""
    by_question: dict[str, list[bool]] = {}
    for row in done:
        by_question.setdefault(row.task, []).append(row.success)
    counts = [len(successes) for successes in by_question.values()]
    low, high = statistics.share(list(map(fmean, by_question.values())), counts, counts)
    return float(low), float(high)


def _figures(rows: Sequence[EvalRow]) -> BriefFigures:
    done = [row for row in rows if row.end != "failed"]
    num_right = sum(row.success for row in done)
    return BriefFigures(
        num_trajectories=len(done),
        num_failed=len(rows) - len(done),
        success=num_right / len(done) if done else None,
        interval=_interval(done),
        reward=fmean(row.reward for row in done) if done else None,
        tool_calls=fmean(len(row.tool_calls) for row in done) if done else None,
        action_tokens=fmean(row.action_tokens for row in done) if done else None,
    )


class RunState(Struct):
    """The state of a run.

    `step`: number of finished updates. `position`: number of delivered trees, in start order.
    `incarnation`: number of this process among all processes of the run; `line`: that of the
    process which trained the weights (0: the initial weights). `reports`: by phase (before_sft,
    after_sft, after_rl) and set. `entropy`: over all delivered trees. `evaluating`: a pending
    evaluation; `imitating`: a pending cold start. `working_tools`: tools of which most calls of a
    step succeeded."""

    step: int = 0
    position: int = 0
    incarnation: int = 0
    line: int = 0
    counters: TreeCounters = field(default_factory=TreeCounters)
    totals: Totals = field(default_factory=Totals)
    outcomes: Outcomes = field(default_factory=Outcomes)  # for the curriculum
    parity: ParityGap = field(default_factory=ParityGap)
    entropy: EntropyProfile = EntropyProfile()
    reports: dict[str, dict[str, BriefReport]] = field(default_factory=dict)
    best: float | None = None
    evaluating: Evaluating | None = None
    imitating: Imitating | None = None
    working_tools: list[str] = []
    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def resumable(self) -> RunState:
        """The state for a checkpoint, without in-flight trees: a resumed run starts them again."""
        counters = self.counters
        return replace(self, counters=replace(counters, offered=counters.num_delivered))


class RunSaver(Saver):
    """The checkpoints of a training run, and the best of them by checkpoint.best_metric."""

    def __init__(
        self,
        config: CheckpointConfig,
        checkpoints: Checkpoints,
        state: RunState,
        learner: DeepSpeedLearner,
        view: View,
        kept: Collection[int] = (),
        journal: Journal | None = None,
        archive: Archive | None = None,
    ) -> None:
        """`kept`: steps whose checkpoints are never removed."""
        super().__init__(
            config,
            checkpoints,
            learner,
            view,
            step=lambda: state.step,
            snapshot=state.resumable,
            needed=lambda: {*kept, *([state.evaluating.step] if state.evaluating else [])},
            turn=learner.turn,
        )
        self.state = state
        self.best_metric = config.best_metric
        self.journal = journal
        self.archive = archive

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
        if self.archive is not None:
            await asyncio.shield(self.archive.written())  # whose disk may hang

    async def save(self, *, at_end: bool = False) -> None:
        """As Saver.save; also removes the part of the journal that no checkpoint needs."""
        if not at_end:
            await super().save()
            return await self._release()
        # Weights and state come first; the rest may fail.
        writing = None
        if self.archive is not None:
            writing = asyncio.create_task(self.archive.written())
        try:
            await super().save(at_end=True)
        finally:
            if writing is not None:
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

    async def consider_best(self, step: int, report: BriefReport) -> None:
        """Make the checkpoint of `step` the best one if `report` has the best value so far of
        checkpoint.best_metric."""
        name, _, figure = self.best_metric.partition("/")
        if report.name != name:
            return
        value: float | None = getattr(report.overall, figure)
        if value is None or (self.state.best is not None and value <= self.state.best):
            return
        cancelled = None
        if step == self.state.step and not await in_thread(self._has, step):
            try:
                await self.save()
            except asyncio.CancelledError as error:  # the checkpoint is saved nevertheless
                cancelled = error
        await uncancelled(self._keep_best(step, value))
        if cancelled is not None:
            raise cancelled

    def _best_step(self) -> int | None:
        """The step of the best checkpoint, which may be of an earlier process."""
        best = best_checkpoint(self.checkpoints)
        return None if best is None else load_state(best, RunState).step

    async def _keep_best(self, step: int, value: float) -> None:
        """Record a new best value, only with an existing checkpoint; see Evaluator.resume."""
        if await in_thread(self._has, step):
            await in_thread(keep_best, self.checkpoints, step)
        elif await in_thread(self._best_step) != step:
            return
        self.state.best = value
        await self.amend()
