"""What GRPO, ARPO and AEPO have in common: one Struct is the configuration and the methods.

    plan(vocab_size)   which roots and forks a rollout grows
    credit(tree)       returns of the leaves -> credit on shared tokens
    loss(batch, ...)   credit and log-probs -> a scalar

Loading this module loads neither torch nor deepspeed; only `loss` needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta, Struct, field

from agentenv.plan import RolloutPlan
from agentenv.tree import TrajectoryTree
from agentenv.types import Limit
from learners.credit import TreeCredit, Truncated, tree_credit

if TYPE_CHECKING:
    from torch import Tensor

    from learners.losses import LossBatch

TRUNCATED: dict[Limit, Truncated] = {
    limit: "mask" if limit is Limit.SECONDS else "score" for limit in Limit
}


class Algorithm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of the algorithms; each subclass has its own tag.

    Objective, per token with advantage A (decoupled PPO, Hilton 2022, eq. 3; importance weight
    truncated as in IMPALA, Espeholt 2018):

        min(rho, cap) * l(r, A),   r = current / proximal,   rho = proximal / behaviour

    rho is detached. The tree form is l(r, adv_pos) + l(r, adv_neg); the mean is the sum over the
    tokens of the mini-batch divided by the sum of their weights, which equals the token-mean over
    the flat trajectories.
    """

    group_size: Annotated[
        int, Meta(ge=2, description="trajectories per question, the group of the advantage")
    ] = 8
    clip_low: Annotated[
        float, Meta(gt=0, lt=1, description="ratios below 1 - clip_low are clipped")
    ] = 0.2
    clip_high: Annotated[
        float, Meta(gt=0, description="ratios above 1 + clip_high are clipped (DAPO: clip-higher)")
    ] = 0.28
    dual_clip: Annotated[
        float,
        Meta(gt=1, description="bound on the loss of negative advantages, in units of |A|; or inf"),
    ] = 3.0
    normalize_by_std: Annotated[
        bool, Meta(description="divide advantages by the group's deviation; false is Dr. GRPO")
    ] = True
    min_group_fraction: Annotated[
        float,
        Meta(ge=0, le=1, description="drop a group with fewer leaves than this part of group_size"),
    ] = 0.75
    truncated: Annotated[
        dict[Limit, Truncated],
        Meta(
            description="by limit: score a truncated trajectory, count its return as zero, or mask "
            "it (in no group, not trained); limits left out keep the default"
        ),
    ] = field(default_factory=TRUNCATED.copy)
    importance_cap: Annotated[
        float, Meta(gt=0, description="upper bound of the proximal / behaviour weight of a token")
    ] = 2.0

    @property
    def needs_entropies(self) -> bool:
        """Whether `loss` reads the entropies of the old policy."""
        return False

    def plan(self, vocab_size: int) -> RolloutPlan:
        """How a rollout of one question grows; vocab_size normalises entropies."""
        raise NotImplementedError

    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        """Credit per node; None when too few leaves count for a group."""
        return tree_credit(
            tree,
            group_size=self.group_size,
            min_group_fraction=self.min_group_fraction,
            norm_by_std=self.normalize_by_std,
            truncated={**TRUNCATED, **self.truncated},
        )

    def loss(
        self, batch: LossBatch, logprobs: Tensor, entropies: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of one micro-batch: its share of the mini-batch's mean.

        logprobs: [tokens] of the current weights, with gradient; entropies: [tokens], detached.
        Metrics of the micro-batches add up, except those ending in _max, which take the maximum.
        """
        import torch

        from learners import losses

        ratio = losses.ratio_of(logprobs, batch.proximal)
        behaviour = losses.ratio_of(batch.proximal, batch.behaviour)
        scale = self.advantage_scale(batch)
        adv_pos, adv_neg = batch.adv_pos * scale, batch.adv_neg * scale
        importance = behaviour.clamp(max=self.importance_cap)
        per_token = self.token_loss(ratio, adv_pos) + self.token_loss(ratio, adv_neg)
        loss = (importance * per_token).sum() / batch.total_weight
        with torch.no_grad():
            part = batch.weight / batch.total_weight
            high = (adv_pos > 0) & (ratio > 1 + self.clip_high)
            low = (adv_neg < 0) & (ratio < 1 - self.clip_low)
            dual = (adv_neg < 0) & (ratio > self.dual_clip)
            metrics = {
                "loss": loss.detach(),
                "entropy": (part * entropies).sum(),
                "ratio_mean": (part * ratio).sum(),
                "ratio_max": ratio.max(),
                "clipped_high": (part * high).sum(),
                "clipped_low": (part * low).sum(),
                "clipped_dual": (part * dual).sum(),
                "importance_capped": (part * (behaviour > self.importance_cap)).sum(),
                "kl_to_proximal": (part * (batch.proximal - logprobs)).sum(),
            }
        return loss, metrics

    def token_loss(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Loss per token, before weights; PPO's clip with dual clip."""
        from learners.losses import ppo_loss

        return ppo_loss(ratio, advantages, self.clip_low, self.clip_high, self.dual_clip)

    def advantage_scale(self, batch: LossBatch) -> Tensor | float:
        """A factor per token on the advantages; not negative."""
        return 1.0
