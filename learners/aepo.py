"""AEPO: ARPO with a balanced budget, a penalty on runs of forks, and an entropy-aware update."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from agentenv.aepo_plan import AEPOPlan
from agentenv.plan import RolloutPlan
from agentenv.reference_plan import ReferencePlan
from learners.arpo import Forking

if TYPE_CHECKING:
    from torch import Tensor

    from learners.losses import LossBatch


class AEPO(Forking, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="aepo"):
    """Agentic entropy-balanced policy optimisation (Dong 2025, arXiv 2510.14545).

    Four parts, each with a switch of its own; without all four this is ARPO:

        budget_split               m = k sigmoid(budget_beta (H_root - H_tool)) of k trajectories
                                   start from scratch
        branch_penalty             P = (alpha + beta dH) max(0, 1 - branch_penalty l), l = forks
                                   in a row on this path
        entropy_balanced_clipping  gradient -A (1 + clip_high) in place of 0 where
                                   r > 1 + clip_high and A > 0
        entropy_advantage          A' = A (1 + a z(H))

    On the quick start the four together change nothing measurable over ARPO: the split stays at
    half of the group and hardly a token is clipped from above (docs/experiments.md).

    They are `num_roots_of` and `penalty_factor` in `agentenv.aepo_plan`, `entropy_balanced_loss`
    and `entropy_multiplier` in `learners.losses`.

    Differs from the paper: dual clip (inf switches it off); z over all tokens of the mini-batch,
    from entropies of the old policy, so that it depends neither on micro-batches nor on the step;
    the multiplier is clamped to [0, 2], so that no advantage changes its sign; missing entropies
    are an error. compat = "reference" is the released code: z over the micro-batch, from current
    entropies, not clamped; its forks and split as in `agentenv.reference_plan`, with budget_beta
    0.5 and branch_penalty 0.05 unless set (its scripts have budget_split = false).
    """

    budget_split: Annotated[
        bool, Meta(description="let a probe's entropies split the budget between roots and forks")
    ] = True
    budget_beta: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        Meta(description="sharpness of that split (beta); default 10, in compat 0.5"),
    ] = None
    branch_penalty: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        Meta(
            description="fork probability lost per fork in a row on a path; 0 is off, default 0.1, "
            "in compat 0.05"
        ),
    ] = None
    entropy_balanced_clipping: Annotated[
        bool, Meta(description="keep the gradient of tokens clipped from above")
    ] = True
    entropy_advantage: Annotated[
        float, Meta(ge=0, description="weight of a token's entropy in its advantage (a); 0 is off")
    ] = 0.2

    @property
    def needs_entropies(self) -> bool:
        return self.entropy_advantage > 0 and not self.is_compat

    @property
    def beta_of_split(self) -> float:
        """`budget_beta` or its default."""
        default = 0.5 if self.is_compat else 10.0
        return default if self.budget_beta is None else self.budget_beta

    @property
    def penalty_per_fork(self) -> float:
        """`branch_penalty` or its default."""
        default = 0.05 if self.is_compat else 0.1
        return default if self.branch_penalty is None else self.branch_penalty

    def plan(self, vocab_size: int) -> RolloutPlan:
        if self.is_compat:
            return ReferencePlan(
                group_size=self.group_size,
                initial_rollouts=self.num_initial,
                vocab_size=vocab_size,
                beam_size=self.beam_size,
                base_probability=self.base_probability,
                entropy_weight=self.entropy_weight,
                penalized=True,
                branch_penalty=self.penalty_per_fork,
                split=self.budget_split,
                budget_beta=self.beta_of_split,
            )
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
            criterion=self.fork_criterion,
            rise_scale=self.rise_scale,
            split=self.budget_split,
            budget_beta=self.beta_of_split,
            branch_penalty=self.penalty_per_fork,
        )

    def token_loss(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        from learners.losses import entropy_balanced_loss

        if not self.entropy_balanced_clipping:
            return super().token_loss(ratio, advantages)
        return entropy_balanced_loss(
            ratio, advantages, self.clip_low, self.clip_high, self.dual_clip
        )

    def advantage_scale(self, batch: LossBatch, entropies: Tensor) -> Tensor | float:
        from learners.losses import entropy_multiplier, entropy_statistics

        if self.entropy_advantage == 0:
            return 1.0
        if not self.is_compat:
            return entropy_multiplier(
                batch.entropies, batch.entropy_mean, batch.entropy_std, self.entropy_advantage
            )
        current = entropies.detach()
        if batch.weight.sum() < 2:  # the released code gives nan here
            return 1.0
        mean, std = entropy_statistics(current, batch.weight)
        return entropy_multiplier(current, mean, std, self.entropy_advantage, compat=True)
