"""The batch of an update: selection of trees, their credit, their fate (trained, filtered for equal
returns, or failed), and warnings about steps that go wrong without an error.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, variance
from typing import NamedTuple

import numpy as np

from agentenv.archive import Fate
from agentenv.errors import SHOWN, AgentEnvError, ConfigError, EnvError, place_of
from agentenv.failures import faults_of
from agentenv.learners.algorithm import Algorithm
from agentenv.learners.credit import CreditedTree, TreeCredit
from agentenv.learners.learner import Metrics
from agentenv.metrics import failure_kind
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.rl.state import RunState
from agentenv.tree import TrajectoryTree
from agentenv.types import MALFORMED_CALL, UNKNOWN_TOOL, Info, Limit

logger = logging.getLogger(__name__)

EQUAL = "with equal returns"  # reason of a tree without a signal
MANY_CALLS = 10  # of a tool in a step; with so many, one should succeed
MAX_TEXT = 500  # characters of a warning
FAR_KL = 0.5  # nats per token; normal updates move the policy by a hundredth of that
MAX_LATE = 0.01  # share of trajectories cut by seconds above which there is a warning
FEW_STEPS, FEW_TREES = 3, 24  # window of the check for signals: steps, and least trees in them
MAX_EQUAL = 0.7  # share of trees with equal returns above which there is a warning
FIRST_STEPS = 10  # in these, a high success means that the questions are too easy
MIN_COURSE = 40  # least number of losses of a cold start to judge their trend
FALLEN = 0.93  # a loss above this share of the loss half a stage ago has stopped falling
RISEN = 1.1  # a loss above this multiple of the lowest loss has risen
LEARNT = 0.5  # exact match on the gate from which the loss need not fall
LOW_LOSS = 0.1  # nats per token, below which the loss need not fall


class Alarms:
    """The warnings of a run."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._active: set[str] = set()  # conditions that held at their last check
        self._num_steps = 0
        self._num_missed: Counter[str] = Counter()  # steps in a row without a prefix hit, by kind
        self._last_steps: deque[tuple[int, int, float]] = deque(maxlen=FEW_STEPS)

    def check_fates(self, delivered: list[TrajectoryTree], fates: Counter[str]) -> None:
        """Warn when most trees of a step are dropped, when none has a signal, and when many run out
        of time. `fates` counts the trees without a signal by reason."""
        reasons = ", ".join(f"{count} {fate}" for fate, count in fates.most_common())
        num_lost = fates.total() - fates[EQUAL]
        self._warn(
            "lost",
            num_lost > len(delivered) / 2,
            f"{num_lost} of {len(delivered)} trees of the step were dropped: {reasons}",
        )
        everything = [one for tree in delivered for one in tree.trajectories()]
        ends = [one.leaf.limit for one in everything]
        limits = Counter(filter(None, ends))
        advice = (
            "is the answer in the form that the grader reads, and does the prompt "
            "(prompt.template) describe the tools?"
        )
        if limits.total() > len(ends) / 2:
            limit, count = limits.most_common(1)[0]
            advice = f"{count} of {len(ends)} trajectories were truncated by the limit {limit}"
        broken = [
            one.named(tool)
            for tool, one in faults_of(_calls(delivered)).items()
            if one.is_total and one.num_calls >= MANY_CALLS
        ]
        if broken:
            advice = "; ".join(broken)[:MAX_TEXT]
        self._warn(
            "unlearned",
            fates[EQUAL] == len(delivered) and not any(one.success for one in everything),
            "no tree of the step has a signal: in each all returns are equal, and no answer is "
            f"correct; read trajectories/: {advice}",
        )
        right = [one.success for tree in delivered for one in tree.trajectories()]
        success = sum(right) / max(1, len(right))
        if not broken:  # neither a cold start nor easier questions fix a tool
            self._check_signal(fates[EQUAL], len(delivered), success)
        num_late = ends.count(Limit.SECONDS)
        self._warn(
            "late",
            num_late > len(ends) * MAX_LATE,
            f"{num_late} of {len(ends)} trajectories ended at limits.max_seconds or "
            "max_tree_seconds; long trajectories are cut first, so that the rest is a biased "
            "sample: raise the limits, or find the slow part (tool/NAME/mean_s, engine/waiting)",
        )

    def _check_signal(self, num_equal: int, num_trees: int, success: float) -> None:
        """Warn when few trees of the last steps have a signal. If that is because the policy
        answers everything correctly, warn only in the first steps."""
        self._num_steps += 1
        self._last_steps.append((num_equal, num_trees, success))
        equal, trees = (sum(one[i] for one in self._last_steps) for i in (0, 1))
        success = fmean(one[2] for one in self._last_steps)
        is_right = success > 0.5
        size = self.config.algorithm.group_size
        refill = "" if self.config.refills else "; queue.refill = true replaces such groups"
        advice = "harder questions"
        if not is_right:
            advice = (
                "a longer cold start, or one with a higher learning rate ([sft]), easier "
                f"questions, or more trajectories per question (algorithm.group_size, now {size})"
            )
        self._warn(
            "equal",
            len(self._last_steps) == FEW_STEPS
            and trees >= FEW_TREES
            and equal > MAX_EQUAL * trees
            and (not is_right or self._num_steps <= FIRST_STEPS),
            f"{equal} of {trees} groups of the last {FEW_STEPS} steps have no signal, since all "
            f"their returns are equal; {success:.0%} of the answers are correct: use "
            f"{advice}{refill}",
        )

    def check_imitation(
        self, losses: Sequence[float], exact: Mapping[str, float], *, is_last: bool
    ) -> None:
        """Warn when the losses (nats per token) of a stage of the cold start rise or stagnate.
        `exact`: match on the gate by kind; `is_last`: the stage has ended without passing it."""
        if len(losses) < MIN_COURSE or self.config.sft is None:
            return
        rate = f"sft.optimizer.learning_rate, {self.config.sft.optimizer.learning_rate:g}"
        is_finite = all(map(math.isfinite, losses))
        text = f"the loss of the cold start is not finite: its learning rate is too high ({rate})"
        self._warn("imitation breaks", not is_finite, text)
        if not is_finite:
            return
        size = len(losses) // 4
        quarters = [losses[-size * number :][:size] for number in (4, 3, 2, 1)]
        means = [fmean(one) for one in quarters]
        lowest = min(range(3), key=means.__getitem__)
        noise = sum(variance(quarters[i]) / size for i in (lowest, 3)) ** 0.5
        has_risen = means[3] > RISEN * means[lowest] and means[3] - means[lowest] > 3 * noise
        self._warn(
            "imitation rises",
            has_risen,
            f"the loss of the cold start rose from {means[lowest]:.2f} to {means[3]:.2f} nats a "
            f"token: its learning rate is too high ({rate})",
        )
        least = min(exact.values(), default=0.0)
        self._warn(
            "imitation stays",
            is_last
            and not has_risen
            and means[3] > max(LOW_LOSS, FALLEN * means[1])
            and least < LEARNT,
            f"the loss of the cold start stays at {means[3]:.2f} nats a token ({means[1]:.2f} half "
            f"of the stage before), and exact match on the gate is {least:.2f}: its learning rate "
            f"is too low ({rate}; try three times that), or the demonstrations are that ambiguous",
        )

    def check_hits(self, hits: Metrics) -> None:
        """Warn when a server with a prefix cache has no hits for FEW_STEPS steps. A single step may
        have none: sleeping engines drop their cache."""
        for name, share in hits.items():
            self._num_missed[name] = 0 if share else self._num_missed[name] + 1
            self._warn(
                name,
                self._num_missed[name] >= FEW_STEPS and not self.config.engine.is_exact,
                f"{name} is 0 in {FEW_STEPS} steps: the engine recomputes every prefix; is its "
                "prefix cache off, or too small for the trajectories in flight?",
            )

    def check_tools(self, metrics: Metrics, trees: Sequence[TrajectoryTree] = ()) -> None:
        """Warn when every call of a tool fails, with the first error in the trees."""
        for name in [key for key in metrics if key.startswith("tool/") and key.endswith("/calls")]:
            tool = name[5:-6]
            if tool in (UNKNOWN_TOOL, MALFORMED_CALL):  # errors of the policy, not of a tool
                continue
            calls, errors = metrics[name], metrics.get(f"{name[:-6]}/errors", 0.0)
            if calls < MANY_CALLS or errors != calls:
                self._active.discard(name)
                continue
            errors_of_tool = (one["error"] for one in _calls(trees) if one["name"] == tool)
            error = next(errors_of_tool, "the errors are in trajectories/")
            text = f"all {calls:.0f} calls of the tool {tool!r} in this step failed: {error}"
            self._warn(name, True, text[:MAX_TEXT])

    def check_update(self, metrics: Metrics) -> None:
        """Warn when an update has moved the policy too far to learn."""
        moved = metrics.get("learner/kl_to_proximal", 0.0)
        self._warn(
            "moved",
            moved > FAR_KL,
            f"the update moved the policy by {moved:.2g} nats a token (learner/kl_to_proximal), "
            f"above {FAR_KL:g}: learner.learning_rate is too high, or engine and learner disagree",
        )

    def _warn(self, condition: str, holds: bool, text: str) -> None:
        if holds and condition not in self._active:
            logger.warning("%s", text, extra=SHOWN)
        (self._active.add if holds else self._active.discard)(condition)


class Settled(NamedTuple):
    """The fate of a tree of a step, and the reason if it has no signal."""

    tree: TrajectoryTree
    credit: TreeCredit | None
    fate: Fate
    why: str = ""


@dataclass
class Batch:
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

    def __init__(self, config: TrainConfig, state: RunState, alarms: Alarms | None = None) -> None:
        self.config = config
        self.state = state
        self.alarms = alarms or Alarms(config)
        self.counts_equal = config.counts_equal_groups
        self._credits: dict[int, TreeCredit | None] = {}  # by tree index, until it is settled
        self._num_untrained = 0  # consecutive steps without a signal
        self._replaced: list[TrajectoryTree] = []  # during the current batch
        self._row: list[TrajectoryTree] = []  # replaced consecutively, fewer than a step has

    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        """The tree's credit, computed once; None if too few leaves count for a group."""
        if tree.index not in self._credits:
            self._credits[tree.index] = _credit(self.config.algorithm, tree)
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
            self._stop_if_broken(row)
            self._check_signals(row, Counter(self._why(one, self.credit(one)) for one in row))
        return False

    def begin(self, taken: list[TrajectoryTree]) -> Batch:
        """The batch of these trees and the trees that they replaced."""
        replaced, self._replaced = self._replaced, []
        return Batch(len(taken), taken + replaced)

    @staticmethod
    def _why(tree: TrajectoryTree, credit: TreeCredit | None) -> str:
        """The reason why a tree has no signal."""
        return failure_kind(tree) if credit is None else EQUAL

    def settle(self, batch: Batch) -> None:
        """Decide the fate of each tree of the batch, and choose the trees to train.

        Raises RefusedStepError if every trajectory failed, or a tool has stopped working, and
        EnvError after `train.max_untrained_steps` steps without a signal; then no fate is counted.
        """
        delivered = batch.delivered
        self._stop_if_broken(delivered)
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
        self._check_signals(delivered, fates)
        working = {
            tool
            for tool, one in faults_of(_calls(delivered)).items()
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


def credits_of_update(
    algorithm: Algorithm,
    trees: Sequence[TrajectoryTree],
    own: Sequence[TreeCredit | None],
    is_taken: Sequence[bool],
) -> list[TreeCredit | None]:
    """Credit of the trees of a step. Of the trees in `is_taken`, the algorithm may normalize the
    credit over the update; the other trees keep `own`, their individual credit."""
    taken = [one if is_one else None for one, is_one in zip(own, is_taken, strict=True)]
    found = zip(algorithm.over_update(trees, taken), own, is_taken, strict=True)
    return [after if is_one else before for after, before, is_one in found]


class RefusedStepError(EnvError):
    """The run ends instead of training on these trees (by index). A resumed run rolls them out
    again, and the in-flight trees too, which the same cause may affect."""

    def __init__(self, text: str, trees: Sequence[TrajectoryTree]) -> None:
        super().__init__(text)
        self.trees = [tree.index for tree in trees]


def _calls(trees: Sequence[TrajectoryTree]) -> Iterator[Info]:
    for tree in trees:
        for node in tree.nodes:
            yield from node.info.get("tool_calls", ())


def refuse_broken_tool(trees: list[TrajectoryTree], working: Sequence[str]) -> None:
    """Raises RefusedStepError if every call of a tool that worked in an earlier step fails with the
    same text: most likely its service is down, and the policy would unlearn to use it."""
    for tool, found in faults_of(_calls(trees)).items():
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


def _credit(algorithm: Algorithm, tree: TrajectoryTree) -> TreeCredit | None:
    """The tree's credit. Raises ConfigError if a custom algorithm raises or its credit is not
    finite."""
    kind = type(algorithm)
    name = f"{kind.__module__}:{kind.__qualname__}.credit"
    try:
        found = algorithm.credit(tree)
    except AgentEnvError:
        raise
    except Exception as error:
        if not (place := place_of(error)):
            raise  # a bug of agentenv, with its traceback
        raise ConfigError(f"{name} raised {type(error).__name__}: {error}{place}") from error
    for key in ("adv_pos", "adv_neg", "weight") if found is not None else ():
        if not np.isfinite(getattr(found, key)).all():
            raise ConfigError(f"{name} returned {key} that is not finite, for tree {tree.index}")
    return found
