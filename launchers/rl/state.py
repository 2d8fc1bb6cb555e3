"""What a run remembers beside the learner's own state, and how both are saved."""

from __future__ import annotations

import asyncio

from msgspec import Struct, field
from msgspec.structs import replace

from agentenv.metrics import EntropyProfile, Ledger, num_tool_calls
from agentenv.tree import TrajectoryTree
from launchers.config import CheckpointConfig
from launchers.evaluation.figures import Report
from launchers.rl.publishing import Colocation, Gap, learner_turn
from launchers.rundir import Checkpoints
from learners.learner import Learner


class Totals(Struct):
    """Sums over all trees that were delivered to the learner."""

    tool_calls: int = 0
    forks: int = 0
    sampled_tokens: int = 0
    trained_tokens: int = 0
    sft_tokens: int = 0
    staleness_max: int = 0
    staleness_sum: int = 0
    num_trees: int = 0

    def add(self, trees: list[TrajectoryTree], learner_version: int) -> None:
        for tree in trees:
            staleness = learner_version - tree.oldest_version()
            self.tool_calls += num_tool_calls(tree)
            self.forks += tree.num_forks
            self.sampled_tokens += tree.num_action_tokens
            self.staleness_max = max(self.staleness_max, staleness)
            self.staleness_sum += staleness
            self.num_trees += 1


class ParityGap(Struct):
    """|engine log-prob - learner log-prob| on the probe batch, nats, over all publishes."""

    num_tokens: int = 0
    sum: float = 0.0
    max: float = 0.0

    def add(self, gap: Gap) -> None:
        self.num_tokens += gap.num_tokens
        self.sum += gap.mean * gap.num_tokens
        self.max = max(self.max, gap.max)

    @property
    def mean(self) -> float:
        return self.sum / self.num_tokens if self.num_tokens else 0.0


class Evaluating(Struct, frozen=True):
    """An evaluation of these sets that overlaps the training; its weights, which the given start
    of the process made, are in the run's folder until it is done."""

    step: int
    policy_version: int
    sets: list[str]
    incarnation: int = 0


class RunState(Struct):
    """`step` updates are done; `position` trees were delivered, in start order; `incarnation`
    counts starts of the process. Reports are kept by phase (before_sft, after_sft, after_rl);
    `entropy` is of all delivered trees; `evaluating` is an evaluation beside the
    training that is not done."""

    step: int = 0
    position: int = 0
    incarnation: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    totals: Totals = field(default_factory=Totals)
    parity: ParityGap = field(default_factory=ParityGap)
    entropy: EntropyProfile = EntropyProfile()
    reports: dict[str, dict[str, Report]] = field(default_factory=dict)
    best: float | None = None
    evaluating: Evaluating | None = None
    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)

    def settled(self) -> RunState:
        """The state for a checkpoint: trees in flight are not offered yet, since a resumed run
        offers them again."""
        ledger = self.ledger
        delivered = ledger.trained + ledger.filtered + sum(ledger.failed.values())
        return replace(self, ledger=replace(ledger, offered=delivered))


class Saver:
    """Writes the checkpoints of a run: the model, the learner's state, and what the run remembers
    at that moment."""

    def __init__(
        self,
        config: CheckpointConfig,
        checkpoints: Checkpoints,
        state: RunState,
        learner: Learner,
        colocation: Colocation | None,
    ) -> None:
        self.config = config
        self.checkpoints = checkpoints
        self.state = state
        self.learner = learner
        self.colocation = colocation

    async def save(self) -> None:
        """The checkpoint of this step, if it is not there yet."""
        state = self.state
        needed = [] if state.evaluating is None else [state.evaluating.step]
        async with learner_turn(self.colocation):
            await self.checkpoints.save(
                state.step, self.learner, state.settled(), self.config.keep_last, needed
            )

    async def consider_best(self, step: int, report: Report) -> None:
        """Keep the checkpoint of the best value of checkpoint.best_metric."""
        name, _, figure = self.config.best_metric.partition("/")
        if report.name != name:
            return
        value: float = getattr(report.overall, figure)
        if self.state.best is None or value > self.state.best:
            self.state.best = value
            if step == self.state.step:
                await self.save()
            await asyncio.to_thread(self.checkpoints.keep_best, step)
