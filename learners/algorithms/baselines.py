"""The algorithms without forks: GRPO, Dr. GRPO, DAPO, RLOO, REINFORCE++, GSPO, CISPO.

Each rolls out independent trajectories; they differ in the advantage of a group, the clipping, or
the aggregation of token losses. Does not load torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from msgspec import field

from agentenv.base.errors import ConfigError
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Limit
from agentenv.learners.algorithms import algorithm
from agentenv.learners.algorithms.credit import (
    EPSILON,
    ROUNDING,
    Floats,
    Sharing,
    TreeCredit,
    Truncated,
    group_advantages,
    spread,
)

if TYPE_CHECKING:
    from torch import Tensor


class GRPO(algorithm.Grouped, frozen=True, kw_only=True, tag="grpo"):
    """Group relative policy optimization (Shao 2024, arXiv 2402.03300, section 4.1).

        A_i = (R_i - mean(R)) / (std(R) + 1e-6)
        J = mean over tokens of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Differs from the paper: the token-mean and clip_high > clip_low are DAPO's (Yu 2025, arXiv
    2503.14476, eq. 8), aggregation = "seq-mean-token-mean" and clip_high = 0.2 are GRPO's own;
    no KL by default (kl_loss = 0.04 is the paper's); dual clip (Ye 2020), inf switches it off;
    equal and single returns give exactly 0.
    """


class DrGRPO(algorithm.Clipped, frozen=True, kw_only=True, tag="dr_grpo"):
    """Dr. GRPO (Liu 2025, arXiv 2503.20783, section 3.2).

        A_i = R_i - mean(R)
        J = 1/N sum_i 1/L sum_t min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    No division by the group's deviation (it favors questions that are too easy or too hard),
    none by a trajectory's own length (it favors long wrong answers): L is the constant
    norm_length. Differs from the paper: dual clip, and L is no limit of the rollout.
    """

    aggregation: algorithm.AggregationKey = "seq-mean-token-sum-norm"
    normalize_by_std: ClassVar[bool] = False


OVERLONG: dict[Limit, Truncated] = {
    **algorithm.TRUNCATED,
    Limit.RESPONSE_TOKENS: "mask",
    Limit.TURN_TOKENS: "mask",
}


class DAPO(algorithm.Clipped, frozen=True, kw_only=True, tag="dapo"):
    """Decoupled clip and dynamic sampling (Yu 2025, arXiv 2503.14476, section 3).

        A_i = (R_i - mean(R)) / (std(R) + 1e-6)                       eq. 9
        J = sum over all tokens of min(r A, clip(r, 1 - 0.2, 1 + 0.28) A) / number of tokens

    Dynamic sampling (eq. 11): groups whose returns are all equal are replaced by later ones.
    Overlong filter (3.4): trajectories cut by a token limit are masked. Soft punishment (eq. 13):
    set overlong_tokens to the response length and overlong_buffer to its cache; the penalty
    counts sampled tokens, not tool results. Differs from the paper: dual clip stays on, inf
    switches it off; replacement takes the next questions in order, not a larger draw. Equal are
    returns, so with the soft punishment a group that is all right or all wrong, but of unequal
    lengths, is kept and learns from length alone (the paper asks for correctness). A masked
    trajectory is in no mean and deviation either (the paper masks its loss only).
    """

    truncated: algorithm.TruncatedKey = field(default_factory=OVERLONG.copy)
    normalize_by_std: algorithm.NormalizeByStd = True
    refills: ClassVar[bool] = True
    default_truncated: ClassVar[dict[Limit, Truncated]] = OVERLONG


def leave_one_out(rewards: Sequence[float] | Floats) -> Floats:
    """r_i - mean of the others, n / (n - 1) times r_i - mean (RLOO, Ahmadian 2024).

    Equal rewards and single rewards give exactly 0.
    """
    others = max(1.0, len(rewards) - 1.0)
    return group_advantages(rewards, norm_by_std=False) * (len(rewards) / others)


class RLOO(algorithm.Clipped, frozen=True, kw_only=True, tag="rloo"):
    """REINFORCE leave-one-out (Ahmadian 2024, arXiv 2402.14740).

        A_i = R_i - mean of the other returns of the group
        J = 1/N sum_i sum_t r A_i

    A trajectory is one action, so its tokens add up (seq-mean-token-sum). Differs from the paper:
    the ratio is clipped as in PPO, since one update takes several steps on asynchronous data; on
    the first step on fresh data r = 1, and the gradient is REINFORCE's. The paper's KL in the
    reward is kl_reward.
    """

    aggregation: algorithm.AggregationKey = "seq-mean-token-sum"

    def advantages(self, returns: Floats) -> Floats:
        return leave_one_out(returns)


def normalize_over_batch(
    trees: Sequence[TrajectoryTree], credits: Sequence[TreeCredit | None], sharing: Sharing
) -> list[TreeCredit | None]:
    """(A - mean) / (std + epsilon), statistics over the policy tokens of all trajectories
    (REINFORCE++, Hu 2025, arXiv 2501.03262); std unbiased. Trees whose credit is None are in no
    statistics. A mean within rounding is 0.
    """
    out = list(credits)
    parts = []
    for number, (tree, credit) in enumerate(zip(trees, credits, strict=True)):
        if credit is not None:
            leaves = np.flatnonzero(~np.isnan(credit.advantages))
            paths = [tree.history(tree.nodes[leaf]) for leaf in leaves.tolist()]
            lengths = [sum(len(node.action_ids) for node in path) for path in paths]
            figures = credit.returns[leaves], credit.advantages[leaves], lengths
            parts.append((number, credit, paths, *figures))
    if not parts:
        return out
    advantages = np.concatenate([own for *_, own, _ in parts])
    counts = np.concatenate([lengths for *_, lengths in parts]).astype(np.float64)
    total = float(counts.sum())
    mean = float((counts * advantages).sum()) / max(total, 1.0)
    if abs(mean) <= ROUNDING * np.abs(advantages).max():
        mean = 0.0
    variance = float((counts * (advantages - mean) ** 2).sum()) / max(total - 1.0, 1.0)
    scale = math.sqrt(variance) + EPSILON
    for number, old, paths, returns, own, _ in parts:
        new = spread(trees[number], paths, returns, (own - mean) / scale, sharing)
        out[number] = replace(new, dense=old.dense, awaits_teacher=old.awaits_teacher)
    return out


class ReinforcePP(algorithm.Clipped, frozen=True, kw_only=True, tag="reinforce_pp"):
    """REINFORCE++-baseline (Hu 2025, arXiv 2501.03262).

        A'_i = R_i - mean(R of the group),   A_i = (A'_i - mean(A')) / (std(A') + 1e-6)

    with mean and deviation over the policy tokens of all trajectories of an update. The loss is
    PPO's; the paper's KL in the loss is kl_loss with kl_kind = "k2". Groups of equal returns are in
    the statistics unless queue.equal_groups drops them. Differs from the paper: dual clip.
    """

    normalize_by_std: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_reward > 0:
            raise ConfigError(
                "algorithm.kl_reward: reinforce_pp normalizes over the whole update and has its KL "
                "in the loss; set kl_loss"
            )

    def over_update(
        self, trees: Sequence[TrajectoryTree], credits: Sequence[TreeCredit | None]
    ) -> list[TreeCredit | None]:
        return normalize_over_batch(trees, credits, self.credit_sharing)


class GSPO(algorithm.Algorithm, frozen=True, kw_only=True, tag="gspo"):
    """Group sequence policy optimization (Zheng 2025, arXiv 2507.18071, eq. 5 and 7).

        s_i = exp(mean over the policy tokens of trajectory i of log r)
        J = mean over i of min(s_i A_i, clip(s_i, 1 - clip_low, 1 + clip_high) A_i)

    The gradient is that of GSPO-token (eq. 13) with equal advantages: a token shared by several
    trajectories gets the sum of -A_i s_i over those that are not clipped. s_i needs all tokens
    of a trajectory, which micro-batches may split, so a step computes log-probs in an extra pass.
    Differs from the paper: log-ratios are bounded by +-20 per token.
    """

    aggregation: algorithm.AggregationKey = "seq-mean-token-mean"
    clip_low: algorithm.ClipLow = 3e-4
    clip_high: algorithm.ClipHigh = 4e-4
    normalize_by_std: algorithm.NormalizeByStd = True
    clips_sequences: ClassVar[bool] = True

    def token_loss(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        """Of dense advantages, whose ratios are those of tokens: not clipped."""
        return -advantages * ratio


class CISPO(algorithm.Algorithm, frozen=True, kw_only=True, tag="cispo"):
    """Clipped importance sampling policy optimization (MiniMax-M1, arXiv 2506.13585, eq. 4).

        J = sum over all tokens of sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi / number

    PPO drops tokens whose ratio leaves the band, which on stale data are the rare, uncertain
    ones; a bounded weight keeps them. As in the paper the band is open below (clip_low 1) and
    clip_high is the knob. Differs from the paper: the value reported is -sg(clip(r)) A.
    """

    clip_low: algorithm.ClipLow = 1.0
    clip_high: algorithm.ClipHigh = 1.0
    normalize_by_std: algorithm.NormalizeByStd = True

    def token_loss(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        from agentenv.learners.algorithms.losses import cispo_loss

        return cispo_loss(ratio, advantages, self.clip_low, self.clip_high)
