"""Warnings about steps that go wrong without an error."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from statistics import fmean

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.errors import SHOWN
from agentenv.base.tree import GUIDED, TrajectoryTree
from agentenv.base.types import Info, Limit
from agentenv.learners.keys import Metrics
from agentenv.rollout.failures import faults_of
from agentenv.rollout.metrics import PADDED, changed_share

logger = logging.getLogger(__name__)

EQUAL = "with equal returns"  # reason of a tree without a signal
MANY_CALLS = 10  # of a tool in a step; with so many, one should succeed
MAX_TEXT = 500  # characters of a warning
FAR_KL = 0.5  # nats per token; normal updates move the policy by a hundredth of that
MAX_LATE = 0.01  # share of trajectories cut by seconds above which there is a warning
FEW_STEPS, FEW_TREES = 3, 24  # window of the check for signals: steps, and least trees in them
MAX_CHANGED = 0.5  # share of the tokens under a grammar that it changed
MAX_EMPTY = 0.05  # share of trajectories with an empty turn above which there is a warning
MAX_EQUAL = 0.7  # share of trees with equal returns above which there is a warning
NUM_WORDS = 2  # of any vocabulary: the plan is only asked whether it forks
FEW_TRAJECTORIES = 32  # of several turns; after so many without a fork point there is a warning
FIRST_STEPS = 10  # in these, a high success means that the questions are too easy


class Alarms:
    """The warnings of a run. A condition that lasts is reported once."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._active: set[str] = set()  # conditions that held at their last check
        self._num_steps = 0
        self._num_without_forks: int | None = 0  # trajectories, until there is a fork point
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
        limits = Counter(one.leaf.limit for one in everything if one.leaf.limit)
        broken = [
            one.named(tool)
            for tool, one in faults_of(calls_of(delivered)).items()
            if one.is_total and one.num_calls >= MANY_CALLS
        ]
        advice = (
            "is the answer in the form that the grader reads, and does the prompt "
            "(prompt.template) describe the tools?"
        )
        if broken:
            advice = "; ".join(broken)[:MAX_TEXT]
        elif limits.total() > len(everything) / 2:
            limit, count = limits.most_common(1)[0]
            advice = (
                f"{count} of {len(everything)} trajectories were truncated by the limit {limit}"
            )
        self._warn(
            "unlearned",
            fates[EQUAL] == len(delivered) and not any(one.success for one in everything),
            "no tree of the step has a signal: in each all returns are equal, and no answer is "
            f"correct; read trajectories/: {advice}",
        )
        if not broken:  # neither a cold start nor easier questions fix a tool
            num_right = sum(one.success for one in everything)
            self._check_signal(fates[EQUAL], len(delivered), num_right / max(1, len(everything)))
        self._check_forks(delivered)
        guided = [node for tree in delivered for node in tree.nodes if node.info.get(GUIDED)]
        share = changed_share(guided) if guided else 0.0
        self._warn(
            "guided",
            share > MAX_CHANGED,
            f"{share:.0%} of the tokens under a grammar are not trained, since it changed their "
            'log-probs: use tool_choice = "auto", or sampling.train.structured_output = "prompt"',
        )
        num_late = limits[Limit.SECONDS]
        self._warn(
            "late",
            num_late > len(everything) * MAX_LATE,
            f"{num_late} of {len(everything)} trajectories ended at limits.max_seconds or "
            "max_tree_seconds; long trajectories are cut first, so that the rest is a biased "
            "sample: raise the limits, or find the slow part (tool/NAME/mean_s, engine/waiting)",
        )

    def _check_forks(self, delivered: Sequence[TrajectoryTree]) -> None:
        """Warn when an algorithm that forks finds no place for one in the first trajectories."""
        plan = self.config.algorithm.plan(NUM_WORDS)
        if not self.config.algorithm.may_fork or self._num_without_forks is None:
            return
        for tree in delivered:
            if any(node.num_forks is not None for node in tree.nodes):
                self._num_without_forks = None
                return
            if plan.on_start(tree) < plan.group_size:
                turns = [len(one.turns) for one in tree.trajectories()]
                self._num_without_forks += sum(number > 1 for number in turns)
        self._warn(
            "forkless",
            self._num_without_forks >= FEW_TRAJECTORIES,
            f"the first {self._num_without_forks} trajectories have no fork point, so that the "
            "algorithm has roots alone: forks begin after a tool result or a message of the "
            "environment; of a program, at a later call with an answer of the policy among its "
            "messages, or that grew in one of the user (env/endpoint/edited/user)",
        )

    def _check_signal(self, num_equal: int, num_trees: int, success: float) -> None:
        """Warn when few trees of the last steps have a signal. If that is because the policy
        answers everything correctly, warn only in the first steps."""
        self._num_steps += 1
        self._last_steps.append((num_equal, num_trees, success))
        equal, trees = (sum(one[i] for one in self._last_steps) for i in (0, 1))
        success = fmean(one[2] for one in self._last_steps)
        is_right = success > 0.5
        advice = "harder questions"
        if not is_right:
            advice = (
                "a longer cold start, or one with a higher learning rate ([sft]), easier "
                "questions, or more trajectories per question (algorithm.group_size, now "
                f"{self.config.algorithm.group_size})"
            )
        refill = "" if self.config.refills else "; queue.refill = true replaces such groups"
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

    def check_step(self, trees: Sequence[TrajectoryTree], metrics: Metrics, hits: Metrics) -> None:
        """Warn when a server with a prefix cache has no hits for FEW_STEPS steps (a single step may
        have none: sleeping engines drop their cache), every call of a tool fails, an update has
        moved the policy too far to learn, ids are sampled that the tokenizer does not have, or
        turns are empty."""
        for name, share in hits.items():
            self._num_missed[name] = 0 if share else self._num_missed[name] + 1
            self._warn(
                name,
                self._num_missed[name] >= FEW_STEPS
                and not self.config.engine.capabilities.is_exact,
                f"{name} is 0 in {FEW_STEPS} steps: the engine recomputes every prefix; is its "
                "prefix cache off, or too small for the trajectories in flight?",
            )
        for tool, found in faults_of(calls_of(trees)).items():
            count = found.num_calls
            text = f"all {count} calls of the tool {tool!r} in this step failed: {found}"
            self._warn(tool, count >= MANY_CALLS and found.num_failed == count, text)
        moved = metrics.get("learner/kl_to_proximal", 0.0)
        self._warn(
            "moved",
            moved > FAR_KL,
            f"the update moved the policy by {moved:.2g} nats a token (learner/kl_to_proximal), "
            f"above {FAR_KL:g}: learner.learning_rate is too high, or engine and learner disagree",
        )
        number = metrics.get("rollout/padded_tokens", 0.0)
        self._warn("padded", number > 0, f"rollout/padded_tokens: {number:.0f} {PADDED}")

        share = metrics.get("rollout/empty", 0.0)
        self._warn(
            "empty",
            share > MAX_EMPTY,
            f"{share:.0%} of the trajectories have an empty turn (rollout/empty), which is graded "
            "as it is: does the prompt end as the policy expects (prompt.chat_template_kwargs)?",
        )

    def _warn(self, condition: str, holds: bool, text: str) -> None:
        if holds and condition not in self._active:
            logger.warning("%s", text, extra=SHOWN)
        (self._active.add if holds else self._active.discard)(condition)


def calls_of(trees: Sequence[TrajectoryTree]) -> Iterator[Info]:
    """The records of all tool calls in these trees."""
    for tree in trees:
        for node in tree.nodes:
            yield from node.info.get("tool_calls", ())
