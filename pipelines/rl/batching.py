"""From trees to the batch of an update: which trees fill it, the credit of each, and its fate:
trained, filtered (all returns equal and not counted), or failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from agentenv.archive import Fate
from agentenv.errors import EnvError
from agentenv.learners.algorithm import Algorithm
from agentenv.learners.credit import CreditedTree, TreeCredit
from agentenv.learners.learner import Metrics
from agentenv.metrics import failure_kind
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.rl.alarms import EQUAL, Alarms
from agentenv.pipelines.rl.state import RunState
from agentenv.tree import TrajectoryTree

FirstEntropies = dict[int, list[list[float]]]  # of each node, by the index of the tree


class Settled(NamedTuple):
    """The fate of a tree that a step took, and the reason if it was not trained."""

    tree: TrajectoryTree
    credit: TreeCredit | None
    fate: Fate
    why: str = ""


@dataclass
class Batch:
    """The trees of one step, and what the step finds out about them. `num_taken` trees fill the
    step; `delivered` are these and those that they replaced."""

    num_taken: int
    delivered: list[TrajectoryTree]
    policy_version: int = 0  # of the learner before the update
    settled: list[Settled] = field(default_factory=list)
    trained: list[CreditedTree] = field(default_factory=list)
    first_entropies: FirstEntropies = field(default_factory=dict)  # as plans saw them
    answers: list[TrajectoryTree] | None = None  # of the self-critic, if a round is due
    metrics: Metrics = field(default_factory=dict)
    problem: Exception | None = None  # met while measuring, raised once the trees are archived

    @property
    def learned(self) -> list[CreditedTree]:
        """The trained trees that have a signal."""
        return [(tree, credit) for tree, credit in self.trained if credit.has_signal]


class BatchBuilder:
    """Builds the batches of a run, and counts the fate of each tree in the run's state."""

    def __init__(self, config: TrainConfig, state: RunState, alarms: Alarms | None = None) -> None:
        self.config = config
        self.state = state
        self.alarms = alarms or Alarms(config)
        self.counts_equal = config.counts_equal_groups
        self._credits: dict[int, TreeCredit | None] = {}  # by the tree's index, until it settles
        self._num_untrained = 0  # steps in a row without a trained tree
        self._refused: list[TrajectoryTree] = []  # for the batch that is being filled
        self._row: list[TrajectoryTree] = []  # refused in a row, fewer than a step has

    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        """The tree's credit, computed once; None where too few leaves count for a group."""
        if tree.index not in self._credits:
            self._credits[tree.index] = self.config.algorithm.credit(tree)
        return self._credits[tree.index]

    def has_signal(self, tree: TrajectoryTree) -> bool:
        """Whether the tree will be trained on returns that are not all equal."""
        credit = self.credit(tree)
        return credit is not None and credit.has_signal

    def keep(self, tree: TrajectoryTree) -> bool:
        """Whether a tree fills a place of the batch where those without a signal are replaced.

        As many refused trees in a row as a step has count as a step without a signal, since the
        batch may never fill. Raises EnvError as `settle` does.
        """
        if self.has_signal(tree):
            self._row, self._num_untrained = [], 0
            return True
        self._refused.append(tree)
        self._row.append(tree)
        if len(self._row) == self.config.queue.groups_per_step:
            row, self._row = self._row, []
            refuse_total_failure(row)
            self._judge(row, Counter(self._why(one, self.credit(one)) for one in row))
        return False

    def begin(self, taken: list[TrajectoryTree]) -> Batch:
        """The batch of these trees, and of those that were refused meanwhile."""
        refused, self._refused = self._refused, []
        return Batch(len(taken), taken + refused)

    @staticmethod
    def _why(tree: TrajectoryTree, credit: TreeCredit | None) -> str:
        """Why a tree has no signal."""
        return failure_kind(tree) if credit is None else EQUAL

    def settle(self, batch: Batch) -> None:
        """Decide the fate of each tree of the batch, and choose those to train.

        Raises EnvError when not one trajectory succeeded, or when no tree had a signal for
        `train.max_untrained_steps` steps; then nothing is counted.
        """
        delivered = batch.delivered
        refuse_total_failure(delivered)
        fates: Counter[str] = Counter()
        own = [self.credit(tree) for tree in delivered]
        is_taken = [one is not None and (self.counts_equal or one.has_signal) for one in own]
        credits = credits_of_update(self.config.algorithm, delivered, own, is_taken)
        for tree, credit, taken in zip(delivered, credits, is_taken, strict=True):
            self._credits.pop(tree.index)
            has_signal = credit is not None and credit.has_signal
            why = "" if has_signal else self._why(tree, credit)
            fate: Fate = "failed" if credit is None else "filtered"
            if credit is not None and taken and (self.counts_equal or has_signal):
                fate = "trained"
                batch.trained.append((tree, credit))
            batch.settled.append(Settled(tree, credit, fate, why))
            fates.update([why] if why else [])
        self._judge(delivered, fates)
        num_equal = fates.pop(EQUAL, 0)
        equal, filtered = (num_equal, 0) if self.counts_equal else (0, num_equal)
        self.state.counters.add(len(batch.trained), filtered, fates, equal)

    def num_minibatches(self, num_taken: int) -> int | None:
        """Optimizer steps of an epoch over a step for which the queue gave so many trees: fixed,
        whatever their returns; None where it depends on how many have a signal."""
        if not (self.counts_equal or self.config.refills):
            return None
        return -(-num_taken // self.config.learner.groups_per_minibatch)

    def _judge(self, delivered: list[TrajectoryTree], fates: Counter[str]) -> None:
        """Warn when most of a step is lost; end a run without a signal. `fates` counts the trees
        that have none, by the reason."""
        self.alarms.look_at_fates(delivered, fates)
        self._num_untrained = self._num_untrained + 1 if fates.total() == len(delivered) else 0
        allowed = self.config.train.max_untrained_steps
        if allowed and self._num_untrained >= allowed:
            everything = [one for tree in delivered for one in tree.trajectories()]
            reasons = ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
            num_right = sum(one.success for one in everything)
            raise EnvError(
                f"no tree had a signal in {allowed} steps in a row (train.max_untrained_steps); of "
                f"the last {len(delivered)}: {reasons}; {num_right} of their {len(everything)} "
                "answers were right"
            )


def credits_of_update(
    algorithm: Algorithm,
    trees: Sequence[TrajectoryTree],
    own: Sequence[TreeCredit | None],
    is_taken: Sequence[bool],
) -> list[TreeCredit | None]:
    """Credit of the trees of a step, from that of each by itself: what an algorithm computes over
    an update is over those that are taken, the others keep their own."""
    taken = [one if is_one else None for one, is_one in zip(own, is_taken, strict=True)]
    found = zip(algorithm.over_update(trees, taken), own, is_taken, strict=True)
    return [after if is_one else before for after, before, is_one in found]


def refuse_total_failure(trees: list[TrajectoryTree]) -> None:
    """Stop when not one trajectory of a step succeeded: something is broken, not unlucky. Trees
    that a person cancelled do not count."""
    failures = [leaf for tree in trees if not tree.is_cancelled for leaf in tree.failures()]
    if failures and not any(True for tree in trees for _ in tree.trajectories()):
        raise EnvError(
            f"all {len(failures)} trajectories of a step failed; the first: {failures[0].error}"
        )
