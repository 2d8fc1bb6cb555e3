"""Base of all algorithms: one Struct is the configuration and the methods.

    plan(vocab_size)   which roots and forks a rollout grows
    credit(tree)       returns of the leaves -> credit on shared tokens
    loss(batch, ...)   credit and log-probs -> a scalar

Loading this module loads neither torch nor deepspeed; only `loss` needs torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from msgspec import Meta, Struct, field
from numpy.typing import NDArray

from agentenv.base.config import ESSENTIAL, about
from agentenv.base.errors import ConfigError
from agentenv.base.tree import Trajectory, TrajectoryTree
from agentenv.base.types import Limit
from agentenv.contract.plan import Independent, RolloutPlan
from agentenv.learners.algorithms.credit import (
    Floats,
    KLKind,
    Sharing,
    StepRewards,
    TreeCredit,
    Truncated,
    group_advantages,
    soft_length_penalty,
    tree_credit,
)

if TYPE_CHECKING:
    from torch import Tensor

    from agentenv.learners.algorithms.losses import LossBatch


Aggregation = Literal[
    "token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


class Band(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Ratios proximal / behavior that are trusted, bounds included."""

    low: Annotated[float, about("smallest trusted ratio", ge=0)] = 0.5
    high: Annotated[float, about("largest trusted ratio", gt=0)] = 5.0

    def __post_init__(self) -> None:
        if not self.low < 1.0 < self.high:
            raise ConfigError("algorithm: a band of ratios must contain 1: low < 1 < high")

    def holds(self, ratio: Floats) -> NDArray[np.bool_]:
        """Mask of the trusted ratios."""
        return (ratio >= self.low) & (ratio <= self.high)


# Shared keys of algorithms with different defaults, and their descriptions.

TRUNCATED: dict[Limit, Truncated] = {
    limit: "mask" if limit is Limit.SECONDS else "score" for limit in Limit
}

AggregationKey = Annotated[Aggregation, about("aggregation of token losses over a mini-batch")]
ClipLow = Annotated[float, about("ratios below 1 - clip_low are clipped; 1: none", gt=0, le=1)]
ClipHigh = Annotated[
    float, about("ratios above 1 + clip_high are clipped (DAPO: clip-higher)", gt=0)
]
TruncatedKey = Annotated[
    dict[Limit, Truncated],
    about(
        "by limit: score a truncated trajectory, count its return as zero, or mask it "
        "(in no group, not trained); omitted limits keep the default"
    ),
]
DualClip = Annotated[
    float, about("bound on the loss of negative advantages, in units of |A|; or inf", gt=1)
]
NormalizeByStd = Annotated[
    bool, about("divide advantages by the group's deviation; false is Dr. GRPO's")
]
TeachKey = Annotated[
    float, about("weight of the teacher, [roles.teacher]: of its log-prob minus the policy's", ge=0)
]
Compat = Annotated[
    Literal["none", "reference"],
    about("reference: follow the released code where it differs from the paper"),
]


class Algorithm(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of the algorithms; each subclass has its own tag (`name`).

    Objective, per token with advantage A (decoupled PPO, Hilton 2022, eq. 3; importance weight
    truncated as in IMPALA, Espeholt 2018):

        min(rho, cap) * l(r, A),   r = current / proximal,   rho = proximal / behavior

    rho is detached; importance_cap = "none" omits the weight, as in the released code and in plain
    PPO. The tree form is l(r, adv_pos) + l(r, adv_neg), which equals the sum over the flat
    trajectories; `aggregation` defines the mean over tokens, see
    `agentenv.learners.trees.minibatch`. Options, off by default: kl_loss * KL(policy || reference)
    and -entropy_bonus * H are added to the loss, kl_reward * (log-ratio to the reference) is
    subtracted from the return; without either KL no reference model is built. The learner subtracts
    kl_reward's part, so that a group of equal returns has a signal too, unless queue.equal_groups
    drops it before.
    """

    group_size: Annotated[
        int, about("trajectories per question, the group of the advantage", ESSENTIAL, ge=1)
    ] = 8
    aggregation: AggregationKey = "token-mean"
    norm_length: Annotated[
        int, about("constant length L of seq-mean-token-sum-norm, tokens", ge=1)
    ] = 1024
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.28
    truncated: TruncatedKey = field(default_factory=TRUNCATED.copy)
    step_rewards: Annotated[
        StepRewards,
        about(
            "credit of a turn: the return of its trajectory, or the rewards-to-go, "
            "without rewards before the turn"
        ),
    ] = "return"
    overlong_tokens: Annotated[
        int,
        about(
            "number of sampled tokens from which the return loses 1 (DAPO's soft "
            "length penalty, linear over the last overlong_buffer tokens); 0 is off",
            ge=0,
        ),
    ] = 0
    overlong_buffer: Annotated[
        int, about("tokens before overlong_tokens over which the penalty grows", ge=1)
    ] = 512
    teach: TeachKey = 0.0
    teach_gate: Annotated[
        float, about("factor sigmoid(teach_gate * difference) of that advantage; 0: none", ge=0)
    ] = 0.0
    hint: Annotated[
        str,
        about(
            "text that only the teacher reads, before the turns of a failed trajectory: sibling "
            "(the rest of the one with the highest return), gold, or module:function of the tree "
            "and the trajectory; without roles.teacher the policy with the hint is the teacher"
        ),
    ] = ""
    teach_top_k: Annotated[
        int,
        about(
            "likeliest ids of the teacher at each token, whose KL is the loss; 0: its log-prob of "
            "the sampled one",
            ge=0,
            le=20,
        ),
    ] = 0
    importance_cap: Annotated[
        Annotated[float, Meta(gt=0)] | Literal["none"],
        about("upper bound of the proximal / behavior weight of a token; none: weight 1"),
    ] = 2.0
    token_mask: Annotated[
        Band | None,
        about(
            "mask tokens whose proximal / behavior ratio is outside the band; proximal "
            "log-probs are then always computed"
        ),
    ] = None
    sequence_mask: Annotated[
        Band | None,
        about(
            "mask trajectories whose mean ratio (geometric) is outside the band; "
            "proximal log-probs are then always computed"
        ),
    ] = None
    kl_loss: Annotated[
        float, about("weight of the KL to a reference policy in the loss", ESSENTIAL, ge=0)
    ] = 0.0
    kl_kind: Annotated[
        KLKind,
        about(
            "estimator of the KL, d = log(policy / reference): k1 d, abs |d|, k2 "
            "d^2/2, k3 exp(-d) + d - 1. Expected gradient: of k2, and of k1, which takes k2's, "
            "that of KL(policy || reference); of k3 that of KL(reference || policy); of abs that "
            "of sum |policy - reference|"
        ),
    ] = "k3"
    kl_reward: Annotated[
        float,
        about(
            "penalty on a trajectory's return per nat of its log-ratio to a reference policy", ge=0
        ),
    ] = 0.0
    reference_every: Annotated[
        int, about("updates between renewals of the reference policy; 0: never", ge=0)
    ] = 0
    entropy_bonus: Annotated[
        float, about("weight of the policy's entropy in the loss, nats", ge=0)
    ] = 0.0

    def __post_init__(self) -> None:
        if self.group_size < self.least_group_size:
            raise ConfigError(
                "algorithm.group_size = 1: an advantage compares trajectories; expected at least 2"
            )
        if self.overlong_tokens and self.overlong_buffer > self.overlong_tokens:
            raise ConfigError("algorithm: overlong_buffer must be at most overlong_tokens")
        is_by_leaf = self.needs_leaves or type(self).over_update is not Algorithm.over_update
        if self.has_turn_advantages and is_by_leaf:
            key = "step_rewards" if self.step_rewards == "to_go" else "name"
            raise ConfigError(
                f"algorithm.{key}: each turn has its own advantage; aggregation other than "
                "token-mean, kl_reward, sequence_mask, gspo and reinforce_pp need one per "
                f"trajectory: remove them, or change {key}"
            )
        if self.reference_every and not self.needs_reference:
            raise ConfigError(
                "algorithm.reference_every: no reference policy; set kl_loss or kl_reward"
            )

    least_group_size: ClassVar[int] = 2
    is_released: ClassVar[bool] = False  # the form of compat = "reference"
    clips_sequences: ClassVar[bool] = False  # ratios are those of whole trajectories
    refills: ClassVar[bool] = False  # groups of equal returns are replaced, as with `queue.refill`
    default_truncated: ClassVar[dict[Limit, Truncated]] = TRUNCATED  # by limits not in `truncated`

    @property
    def has_turn_advantages(self) -> bool:
        """Whether the turns of a trajectory have separate advantages."""
        return self.step_rewards == "to_go"

    # requirements on the learner

    @property
    def needs_entropies(self) -> bool:
        """Whether `loss` uses the entropies of the old policy."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether a reference model is necessary."""
        return self.kl_loss > 0 or self.kl_reward > 0

    @property
    def learns_from_equal_groups(self) -> bool:
        """Whether the loss has a gradient on a group without a signal: from a KL, from the entropy
        bonus, or because `loss` is overridden. Otherwise such a group needs no pass."""
        terms = self.kl_loss > 0 or self.kl_reward > 0 or self.entropy_bonus > 0
        return terms or type(self).loss is not Algorithm.loss

    @property
    def needs_leaves(self) -> bool:
        """True if the loss needs more than the sums over the leaves below a token."""
        whole = self.clips_sequences or self.kl_reward > 0 or self.sequence_mask is not None
        return whole or self.aggregation != "token-mean"

    @property
    def negative_bound(self) -> float:
        """Bound on the loss of negative advantages, in units of |A|: the key dual_clip, where the
        algorithm has it."""
        return float(getattr(self, "dual_clip", "inf"))

    @property
    def credit_sharing(self) -> Sharing:
        """Advantages of shared tokens: the key sharing, where the algorithm has it."""
        return getattr(self, "sharing", "soft")

    # rollout and credit

    def plan(self, vocab_size: int) -> RolloutPlan:
        """The rollout plan of one question; vocab_size normalizes entropies."""
        return Independent(self.group_size)

    @property
    def may_fork(self) -> bool:
        """Whether the plan may fork, also late."""
        plan = self.plan(2)
        return plan.fork_window > 0 or not isinstance(plan, Independent)

    def advantages(self, returns: Floats) -> Floats:
        """Advantages of one group from its returns; equal returns give exactly 0. They are divided
        by the deviation of the returns unless `normalize_by_std`, a key or a constant, is false."""
        return group_advantages(returns, norm_by_std=getattr(self, "normalize_by_std", True))

    def penalty(self, trajectory: Trajectory) -> float:
        """The penalty (at most 0) that is added to a trajectory's return."""
        length = trajectory.num_action_tokens
        return soft_length_penalty(length, self.overlong_tokens, self.overlong_buffer)

    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        """Credit per node; None if too few leaves count for a group."""
        return tree_credit(
            tree,
            group_size=self.group_size,
            sharing=self.credit_sharing,
            truncated={**self.default_truncated, **self.truncated},
            estimator=self.advantages,
            penalty=self.penalty if self.overlong_tokens else None,
            step_rewards=self.step_rewards,
        )

    def learn(self, state: dict[str, Any], trees: Sequence[TrajectoryTree]) -> dict[str, float]:
        """What the plan learns from a run: called after each update with its trees, also untrained
        ones. `state` is empty at first and a part of each checkpoint (numbers, texts, lists and
        dicts of them); every tree that begins later has its "plan" as `tree.root.info["plan"]`.
        Returns metrics."""
        return {}

    def over_update(
        self, trees: Sequence[TrajectoryTree], credits: Sequence[TreeCredit | None]
    ) -> list[TreeCredit | None]:
        """Credit of all trees of an update from the credit of the individual trees, which is None
        for untrained ones."""
        return list(credits)

    # loss

    def loss(
        self, batch: LossBatch, logprobs: Tensor, entropies: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and metrics of one micro-batch: its share of the mini-batch's mean.

        logprobs, entropies: [tokens] of the current weights, with gradient.
        Metrics of the micro-batches add up, except those ending in _max, which take the maximum.

        The loss is the sum over tokens of importance * policy loss + kl_loss * KL - entropy_bonus *
        H, the last two weighted by `batch.weight`, over `batch.total_weight`. A mini-batch without
        tokens gives 0.
        """
        from agentenv.learners.algorithms.losses import coarse_kl, kl_loss

        total = batch.total_weight or 1.0
        ratio = self.ratio(logprobs, batch.proximal)
        scale = self.advantage_scale(batch, entropies)
        adv_pos, adv_neg = batch.adv_pos * scale, batch.adv_neg * scale
        if batch.value is not None and batch.slope is not None:
            per_token = batch.value + batch.slope * (logprobs - logprobs.detach())
        else:
            per_token = self.token_loss(ratio, adv_pos) + self.token_loss(ratio, adv_neg)
        if batch.dense is not None:
            per_token = per_token + self.token_loss(ratio, batch.dense)
        loss = (batch.importance * per_token).sum() / total
        part = batch.weight / (batch.sum_weight or 1.0)
        metrics = self._metrics(batch, logprobs.detach(), ratio.detach(), part)
        metrics["entropy"] = (part * entropies.detach()).sum()
        if self.kl_loss > 0 and batch.reference is not None:
            kl = kl_loss(logprobs, batch.reference, self.kl_kind)
            loss = loss + self.kl_loss * (batch.weight * kl).sum() / total
        if batch.reference is not None:
            difference = logprobs.detach() - batch.reference
            metrics["kl_to_reference"] = (part * difference).sum()
        if batch.taught is not None and batch.teacher is not None:
            kl = coarse_kl(batch.taught, batch.teacher)
            loss = loss + self.teach * (batch.weight * kl).sum() / total
        if self.entropy_bonus > 0:
            loss = loss - self.entropy_bonus * (batch.weight * entropies).sum() / total
        return loss, {"loss": loss.detach(), **metrics}

    def _metrics(
        self, batch: LossBatch, logprobs: Tensor, ratio: Tensor, part: Tensor
    ) -> dict[str, Tensor]:
        """Metrics from detached tensors; `part` is each token's weight in the means."""
        from agentenv.learners.algorithms.losses import ratio_of

        behavior = ratio_of(batch.proximal, batch.behavior)
        cap = float("inf") if self.importance_cap == "none" else self.importance_cap
        metrics = {
            "ratio_mean": (part * ratio).sum(),
            "ratio_max": ratio.max() if len(ratio) else ratio.new_tensor(0.0),
            "importance_capped": (part * (behavior > cap)).sum(),
            "kl_to_proximal": (part * (batch.proximal - logprobs)).sum(),
        }
        if self.clips_sequences:
            return metrics
        high = (batch.adv_pos > 0) & (ratio > 1 + self.clip_high)
        low = (batch.adv_neg < 0) & (ratio < 1 - self.clip_low)
        metrics["clipped_high"] = (part * high).sum()
        metrics["clipped_low"] = (part * low).sum()
        dual = (batch.adv_neg < 0) & (ratio > self.negative_bound)
        metrics["clipped_dual"] = (part * dual).sum()
        return metrics

    def ratio(self, logprobs: Tensor, proximal: Tensor) -> Tensor:
        """current / proximal per token, with gradient."""
        from agentenv.learners.algorithms.losses import ratio_of

        return ratio_of(logprobs, proximal)

    def token_loss(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Loss per token, before weights: PPO's clip."""
        from agentenv.learners.algorithms.losses import ppo_loss

        return ppo_loss(ratio, advantages, self.clip_low, self.clip_high, self.negative_bound)

    def advantage_scale(self, batch: LossBatch, entropies: Tensor) -> Tensor | float:
        """A factor per token on the advantages; not negative. `entropies` are the current ones."""
        return 1.0


class Clipped(Algorithm, frozen=True, kw_only=True):
    """PPO's clipping with dual clip."""

    dual_clip: DualClip = 3.0


class Grouped(Clipped, frozen=True, kw_only=True):
    """Group-normalized advantages, as in GRPO, and the switch to the released code.

    compat = "reference" selects the behavior of ARPO's released code, a separate class:
    `agentenv.reference.algorithms` builds it from these keys.
    """

    normalize_by_std: NormalizeByStd = True
    compat: Compat = "none"
