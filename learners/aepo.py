"""AEPO: ARPO with a balanced budget, a penalty on runs of forks, and an entropy-aware update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from agentenv.plan import AEPOPlan, RolloutPlan
from learners.arpo import Forking

if TYPE_CHECKING:
    from torch import Tensor

    from learners.losses import LossBatch


class AEPO(Forking, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="aepo"):
    """Agentic entropy-balanced policy optimisation (Dong 2025, arXiv 2510.14545).

    Rollout: m = k sigmoid(budget_beta (H_root - H_tool)) of k trajectories start from scratch;
    P = (alpha + beta dH) (1 - branch_penalty * l), l = forks in a row on this path.
    Update: clipping that keeps the gradient of clipped exploration, -A (1 + clip_high) where
    r > 1 + clip_high and A > 0; and A' = A (1 + a z(H)), z over all tokens of the mini-batch.
    Deviations from the released code: statistics over the mini-batch in place of the
    micro-batch, entropies of the old policy, multiplier clamped to [0, 2], missing entropies are
    an error.
    """

    budget_beta: Annotated[
        float, Meta(ge=0, description="sharpness of the split between roots and forks (beta)")
    ] = 10.0
    branch_penalty: Annotated[
        float, Meta(ge=0, le=1, description="fork probability lost per fork in a row on a path")
    ] = 0.1
    entropy_balanced_clipping: Annotated[
        bool, Meta(description="keep the gradient of tokens clipped from above")
    ] = True
    entropy_advantage: Annotated[
        float, Meta(ge=0, description="weight of a token's entropy in its advantage (a); 0 is off")
    ] = 0.2

    @property
    def needs_entropies(self) -> bool:
        return self.entropy_advantage > 0

    def plan(self, vocab_size: int) -> RolloutPlan:
        return AEPOPlan(
            group_size=self.group_size,
            initial_rollouts=self.num_initial,
            beam_size=self.beam_size,
            base_probability=self.base_probability,
            entropy_weight=self.entropy_weight,
            mode=self.fork_mode,
            threshold=self.fork_threshold,
            fork_window=self.entropy_window,
            vocab_size=vocab_size,
            budget_beta=self.budget_beta,
            branch_penalty=self.branch_penalty,
        )

    def token_loss(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        from learners.losses import entropy_balanced_loss

        if not self.entropy_balanced_clipping:
            return super().token_loss(ratio, advantages)
        return entropy_balanced_loss(
            ratio, advantages, self.clip_low, self.clip_high, self.dual_clip
        )

    def advantage_scale(self, batch: LossBatch) -> Tensor | float:
        from learners.losses import entropy_multiplier

        if self.entropy_advantage == 0:
            return 1.0
        return entropy_multiplier(
            batch.entropies, batch.entropy_mean, batch.entropy_std, self.entropy_advantage
        )
