"""ARPO: forks after tool results whose entropy rose, credit shared below a fork."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from agentenv.plan import ARPOPlan, RolloutPlan
from agentenv.tree import TrajectoryTree
from learners.algorithm import TRUNCATED, Algorithm
from learners.credit import Sharing, TreeCredit, tree_credit


class Forking(Algorithm, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ARPO and AEPO share: the fork criterion and the credit of shared tokens."""

    initial_rollouts: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        Meta(description="trajectories from scratch; default half of the group"),
    ] = None
    beam_size: Annotated[
        int, Meta(ge=1, description="a fork point starts at most beam_size - 1 siblings")
    ] = 2
    base_probability: Annotated[
        float, Meta(ge=0, le=1, description="fork probability without entropy rise (alpha)")
    ] = 0.5
    entropy_weight: Annotated[
        float, Meta(ge=0, description="weight of the entropy rise in it (beta)")
    ] = 0.2
    fork_mode: Annotated[
        Literal["sample", "threshold"],
        Meta(description="fork with that probability, or when it exceeds fork_threshold"),
    ] = "sample"
    fork_threshold: Annotated[
        float, Meta(ge=0, le=1, description="threshold of fork_mode threshold (tau)")
    ] = 0.5
    entropy_window: Annotated[
        int, Meta(ge=1, description="tokens after a tool result whose entropy decides")
    ] = 20
    sharing: Annotated[
        Sharing,
        Meta(description="shared tokens get each leaf's advantage (soft) or their mean (hard)"),
    ] = "soft"

    @property
    def num_initial(self) -> int:
        """Trajectories from scratch, at most the group."""
        return min(self.initial_rollouts or max(1, self.group_size // 2), self.group_size)

    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        return tree_credit(
            tree,
            group_size=self.group_size,
            min_group_fraction=self.min_group_fraction,
            norm_by_std=self.normalize_by_std,
            sharing=self.sharing,
            truncated={**TRUNCATED, **self.truncated},
        )


class ARPO(Forking, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="arpo"):
    """Agentic reinforced policy optimisation (Dong 2025, arXiv 2507.19849).

    Rollout, eq. 3 and section 3.1: after a tool result P = alpha + beta * dH, where dH is the
    rise over the root's entropy; forks and refills share a budget of group_size trajectories.
    Update, section 3.2: GRPO over all leaves; a token shared by d leaves counts d times, with
    their own advantages (soft) or d times with the mean (hard). Loss: see GRPO.
    """

    def plan(self, vocab_size: int) -> RolloutPlan:
        return ARPOPlan(
            group_size=self.group_size,
            initial_rollouts=self.num_initial,
            beam_size=self.beam_size,
            base_probability=self.base_probability,
            entropy_weight=self.entropy_weight,
            mode=self.fork_mode,
            threshold=self.fork_threshold,
            fork_window=self.entropy_window,
            vocab_size=vocab_size,
        )
