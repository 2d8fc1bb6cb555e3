"""Warnings about a training run that goes wrong without failing: each is given once, when its
condition begins to hold."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from agentenv.errors import SHOWN
from agentenv.learners.learner import Metrics
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.tree import TrajectoryTree
from agentenv.types import MALFORMED_CALL, UNKNOWN_TOOL, Limit

logger = logging.getLogger(__name__)

EQUAL = "with equal returns"  # why a tree teaches nothing
MANY_CALLS = 10  # of a tool in a step, of which one might succeed
MAX_TEXT = 500  # characters of a warning
FAR_KL = 0.5  # nats a token; updates that learn move by a hundredth of that
MAX_LATE = 0.01  # share of trajectories cut by seconds above which there is a warning


class Alarms:
    """The warnings of one run."""

    def __init__(self, config: TrainConfig) -> None:
        self.config = config
        self._active: set[str] = set()  # conditions that held when they were checked last

    def look_at_fates(self, delivered: list[TrajectoryTree], fates: Counter[str]) -> None:
        """Warn when most trees of a step are dropped, when none teaches anything, and when many
        are out of time. `fates` counts the trees without a signal by the reason."""
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
            "(prompt.template) tell the policy of its tools?"
        )
        if limits.total() > len(ends) / 2:
            limit, count = limits.most_common(1)[0]
            advice = f"{count} of {len(ends)} trajectories were cut by the limit of {limit}"
        self._warn(
            "unlearned",
            fates[EQUAL] == len(delivered) and not any(one.success for one in everything),
            "no tree of the step teaches anything: in each all returns are equal, and no answer "
            f"is right; read trajectories/: {advice}",
        )
        num_late = ends.count(Limit.SECONDS)
        self._warn(
            "late",
            num_late > len(ends) * MAX_LATE,
            f"{num_late} of {len(ends)} trajectories ended at limits.max_seconds or "
            "max_tree_seconds; the longest go first, so that what is left is no fair sample: raise "
            "them, or look for what is slow (tool/NAME/mean_s, engine/waiting)",
        )

    def look_at_hits(self, hits: Metrics) -> None:
        """Warn when a server with a prefix cache finds nothing in it."""
        for name, share in hits.items():
            self._warn(
                name,
                share == 0 and not self.config.engine.is_exact,
                f"{name} is 0: the engine computes every prefix again; is its prefix cache off, or "
                "too small for the trajectories in flight?",
            )

    def look_at_tools(self, metrics: Metrics, trees: Sequence[TrajectoryTree] = ()) -> None:
        """Warn when each call of a tool fails, with the first error in the trees."""
        for name in [key for key in metrics if key.startswith("tool/") and key.endswith("/calls")]:
            tool = name[5:-6]
            if tool in (UNKNOWN_TOOL, MALFORMED_CALL):  # by the policy, no tool
                continue
            calls, errors = metrics[name], metrics.get(f"{name[:-6]}/errors", 0.0)
            if calls < MANY_CALLS or errors != calls:
                self._active.discard(name)
                continue
            records = (
                record
                for tree in trees
                for node in tree.nodes
                for record in node.info.get("tool_calls", ())
            )
            errors_of_tool = (one["error"] for one in records if one["name"] == tool)
            error = next(errors_of_tool, "the errors stand in trajectories/")
            text = f"all {calls:.0f} calls of the tool {tool!r} in this step failed: {error}"
            self._warn(name, True, text[:MAX_TEXT])

    def look_at_update(self, metrics: Metrics) -> None:
        """Warn when an update has moved the policy further than any that learns."""
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
