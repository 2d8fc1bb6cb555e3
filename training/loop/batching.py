"""The batch of an update: selection of trees, their credit, and their fate (trained, filtered for
equal returns, or failed).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.crashes import called
from agentenv.base.errors import EnvError
from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.credit import CreditedTree, TreeCredit, credit_of
from agentenv.learners.keys import Metrics
from agentenv.rollout.archive import Fate
from agentenv.rollout.failures import faults_of
from agentenv.rollout.metrics import failure_kind
from agentenv.training.loop.alarms import EQUAL, MANY_CALLS, Alarms, calls_of
from agentenv.training.loop.state import RunState

# Refusals to train on the trees of a step: failures that are not the policy's.


class RefusedStepError(EnvError):
    """The run ends instead of training on these trees (by index). A resumed run rolls them out
    again, and the in-flight trees too, which the same cause may affect."""

    def __init__(self, text: str, trees: Sequence[TrajectoryTree]) -> None:
        super().__init__(text)
        self.trees = [tree.index for tree in trees]


def refuse_broken_tool(trees: list[TrajectoryTree], working: Sequence[str]) -> None:
    """Raises RefusedStepError if every call of a tool that worked in an earlier step fails with the
    same text: most likely its service is down, and the policy would unlearn to use it."""
    for tool, found in faults_of(calls_of(trees)).items():
        if tool in working and found.is_total and found.num_calls >= MANY_CALLS:
            raise RefusedStepError(
                f"{found.named(tool)}; most of them succeeded in an earlier step, so this step is "
                "not trained: fix the tool (if its service fails, it should raise InfraError, "
                "which is retried, or ConfigError) and continue with --resume, or set "
                "limits.max_failed_share = 1 if these calls are the policy's fault",
                trees,
            )


def refuse_total_failure(trees: list[TrajectoryTree]) -> None:
    """Raises RefusedStepError if every trajectory of a step failed, which is no coincidence. Trees
    that a user cancelled do not count."""
    failures = [leaf for tree in trees if not tree.is_cancelled for leaf in tree.failures()]
    if failures and not any(True for tree in trees for _ in tree.trajectories()):
        raise RefusedStepError(
            f"all {len(failures)} trajectories of a step failed; the first: {failures[0].error}",
            [tree for tree in trees if not tree.is_cancelled],
        )


class Settled(NamedTuple):
    """The fate of a tree of a step, and the reason if it has no signal."""

    tree: TrajectoryTree
    credit: TreeCredit | None
    fate: Fate
    why: str = ""


@dataclass
class StepBatch:
    """The trees of a step, with their fates, credit and metrics. `num_taken` trees fill the step;
    `delivered` includes the trees that they replaced."""

    num_taken: int
    delivered: list[TrajectoryTree]
    policy_version: int = 0  # of the learner before the update
    settled: list[Settled] = field(default_factory=list)
    trained: list[CreditedTree] = field(default_factory=list)
    answers: list[TrajectoryTree] | None = None  # of the self-critic, if a round is due
    metrics: Metrics = field(default_factory=dict)
    problem: Exception | None = None  # error of measuring, raised after the trees are archived

    @property
    def learned(self) -> list[CreditedTree]:
        """The trained trees that have a signal."""
        return [(tree, credit) for tree, credit in self.trained if credit.has_signal]


class BatchBuilder:
    """Builds the batches of a run, and counts the fates of trees in the run's state."""

    def __init__(self, config: TrainConfig, state: RunState) -> None:
        self.config = config
        self.state = state
        self.alarms = Alarms(config)
        self.counts_equal = config.counts_equal_groups
        self._credits: dict[int, TreeCredit | None] = {}  # by tree index, until it is settled
        self._num_untrained = 0  # consecutive steps without a signal
        self._replaced: list[TrajectoryTree] = []  # during the current batch
        self._row: list[TrajectoryTree] = []  # replaced consecutively, fewer than a step has
        self._in_rows: set[int] = set()  # trees of the current batch that a whole row had

    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        """The tree's credit, computed once; None if too few leaves count for a group."""
        if tree.index not in self._credits:
            self._credits[tree.index] = credit_of(self.config.algorithm, tree)
        return self._credits[tree.index]

    def has_signal(self, tree: TrajectoryTree) -> bool:
        """Whether the tree's returns differ, so that it can be trained."""
        credit = self.credit(tree)
        return credit is not None and credit.has_signal

    def keep(self, tree: TrajectoryTree) -> bool:
        """Whether a tree counts for the batch, with `queue.refill`: it has a signal.

        Every groups_per_step consecutive trees without a signal count as a step without a signal,
        since the batch may never fill. Raises the errors of `settle`.
        """
        if self.has_signal(tree):
            self._row, self._num_untrained = [], 0
            return True
        self._replaced.append(tree)
        self._row.append(tree)
        if len(self._row) == self.config.queue.groups_per_step:
            row, self._row = self._row, []
            self._in_rows.update(one.index for one in row)
            self._stop_if_broken(row)
            self._check_signals(row, Counter(self._why(one, self.credit(one)) for one in row))
        return False

    def begin(self, taken: list[TrajectoryTree]) -> StepBatch:
        """The batch of these trees and the trees that they replaced."""
        replaced, self._replaced = self._replaced, []
        return StepBatch(len(taken), taken + replaced)

    @staticmethod
    def _why(tree: TrajectoryTree, credit: TreeCredit | None) -> str:
        """The reason why a tree has no signal."""
        return failure_kind(tree) if credit is None else EQUAL

    def settle(self, batch: StepBatch) -> None:
        """Decide the fate of each tree of the batch, and choose the trees to train, whose credit
        the algorithm may normalize over the update.

        Raises RefusedStepError if every trajectory failed, or a tool has stopped working, and
        EnvError after `train.max_untrained_steps` steps without a signal; then no fate is counted.
        """
        delivered = batch.delivered
        self._stop_if_broken(delivered)
        fates: Counter[str] = Counter()
        own = [self.credit(tree) for tree in delivered]
        taken = [one if one and (self.counts_equal or one.has_signal) else None for one in own]
        found = called(self.config.algorithm.over_update, delivered, taken)
        for tree, alone, given, of_update in zip(delivered, own, taken, found, strict=True):
            self._credits.pop(tree.index)
            credit = alone if given is None else of_update
            has_signal = credit is not None and credit.has_signal
            why = "" if has_signal else self._why(tree, credit)
            fate: Fate = "failed" if credit is None else "filtered"
            if given is not None and credit is not None and (self.counts_equal or has_signal):
                fate = "trained"
                batch.trained.append((tree, credit))
            batch.settled.append(Settled(tree, credit, fate, why))
            fates.update([why] if why else [])
        left = [one for one in batch.settled if one.tree.index not in self._in_rows]
        self._in_rows.clear()
        whys = Counter(one.why for one in left if one.why)
        self._check_signals([one.tree for one in left], whys)
        working = {
            tool
            for tool, one in faults_of(calls_of(delivered)).items()
            if one.num_calls >= MANY_CALLS and one.num_failed < one.num_calls / 2
        }
        self.state.working_tools = sorted(working.union(self.state.working_tools))
        num_equal = fates.pop(EQUAL, 0)
        equal, filtered = (num_equal, 0) if self.counts_equal else (0, num_equal)
        self.state.counters.add(len(batch.trained), filtered, fates, equal)

    def _stop_if_broken(self, trees: list[TrajectoryTree]) -> None:
        """Raises RefusedStepError before an update on trees whose failures are not the policy's."""
        refuse_total_failure(trees)
        if self.config.limits.max_failed_share < 1:
            refuse_broken_tool(trees, self.state.working_tools)

    def num_minibatches(self, num_taken: int) -> int | None:
        """Number of optimizer steps per epoch for a step of `num_taken` trees; None if it depends
        on the number of trees with a signal."""
        if not (self.counts_equal or self.config.refills):
            return None
        return -(-num_taken // self.config.learner.groups_per_minibatch)

    def _check_signals(self, delivered: list[TrajectoryTree], fates: Counter[str]) -> None:
        """Warn when most of a step is lost; raises EnvError to end a run without a signal. `fates`
        counts the trees without a signal by reason."""
        self.alarms.check_fates(delivered, fates)
        self._num_untrained = self._num_untrained + 1 if fates.total() == len(delivered) else 0
        allowed = self.config.train.max_untrained_steps
        if allowed and self._num_untrained >= allowed:
            everything = [one for tree in delivered for one in tree.trajectories()]
            reasons = ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
            num_right = sum(one.success for one in everything)
            raise EnvError(
                f"no tree had a signal in {allowed} steps in a row (train.max_untrained_steps); of "
                f"the last {len(delivered)}: {reasons}; {num_right} of their {len(everything)} "
                "answers were correct"
            )
