"""Per-token policy losses and KL estimators as functions of tensors; `Algorithm.loss` sums them.

All functions accept any float dtype and any common shape. They add numeric guards to the released
code of ARPO and AEPO, and equal that code wherever it is finite and log-ratios are within +-20.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from agentenv.learners.algorithms.credit import Floats, KLKind


@dataclass(frozen=True)
class LossBatch:
    """The trained tokens of one micro-batch; tensors of shape [tokens], no gradient.

    behavior: log-probs under the policy that sampled; proximal: under the learner's weights at
    the start of the update (nats). entropies: nats, of the old policy. adv_pos and adv_neg: sums
    of the positive and of the negative advantages of the leaves below a token; weight: number of
    leaves; if the aggregation is over sequences, each leaf counts with its coefficient
    (`agentenv.learners.trees.minibatch`). The scalars belong to the whole mini-batch: the
    denominator of the aggregation, and mean and unbiased standard deviation of `entropies` over the
    flat tokens.

    importance: truncated and masked proximal / behavior. sum_weight: sum of `weight` over the
    computed tokens of the mini-batch, for metrics. reference: log-probs of the reference policy.
    value and slope: loss and its derivative by the log-prob, of methods that clip whole sequences.
    dense: dense advantages, each times the weight of its token in the loss. taught (with gradient)
    and teacher: [tokens, k], log-probs of the teacher's likeliest ids; nan where it has none.
    """

    behavior: Tensor
    proximal: Tensor
    entropies: Tensor
    adv_pos: Tensor
    adv_neg: Tensor
    weight: Tensor
    total_weight: float
    entropy_mean: Tensor
    entropy_std: Tensor
    importance: Tensor
    sum_weight: float
    reference: Tensor | None = None
    value: Tensor | None = None
    slope: Tensor | None = None
    dense: Tensor | None = None
    taught: Tensor | None = None
    teacher: Tensor | None = None


MAX_LOG_RATIO = 20.0  # exp(20) = 4.9e8: far outside any clip range, far inside float32


def ratio_of(logprobs: Tensor, old_logprobs: Tensor) -> Tensor:
    """exp(logprobs - old_logprobs), with gradient; the log-ratio is clamped to +-20."""
    return (logprobs - old_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def ppo_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> Tensor:
    """Clipped surrogate with dual clip (Schulman 2017, eq. 7; Ye 2020, eq. 5), per token.

    l = max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0 at most -A c. `dual_clip` c > 1,
    inf switches it off.
    """
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return _dual_clip(torch.max(-advantages * ratio, -advantages * clipped), advantages, dual_clip)


def entropy_balanced_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> Tensor:
    """AEPO's clipping: the value of `ppo_loss`, but clipped exploration keeps its gradient.

    The upper bound is (1 + high) r / sg(r): where r > 1 + high and A > 0, the gradient with
    respect to the log-prob is -A (1 + high) in place of 0 (AEPO, entropy-balanced clipping).
    `ratio` must be finite and positive, as `ratio_of` makes it.
    """
    upper = (1.0 + clip_high) / ratio.detach() * ratio
    clipped = torch.clamp(ratio, min=torch.full_like(ratio, 1.0 - clip_low), max=upper)
    return _dual_clip(torch.max(-advantages * ratio, -advantages * clipped), advantages, dual_clip)


def _dual_clip(loss: Tensor, advantages: Tensor, dual_clip: float) -> Tensor:
    if dual_clip == float("inf"):
        return loss
    return torch.where(advantages < 0, torch.min(-advantages * dual_clip, loss), loss)


def cispo_loss(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """-sg(clip(r, 1 - low, 1 + high)) A log pi (MiniMax-M1, arXiv 2506.13585, eq. 4), per token.

    The ratio is clipped as a weight, so every token keeps a gradient. The value given is
    -clip(r) A, which is 0 where the advantages are; the gradient is the paper's.
    """
    weight = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * (ratio / ratio.detach())


def sequence_terms(
    ratio: Floats, advantages: Floats, clip_low: float, clip_high: float
) -> tuple[Floats, Floats]:
    """Loss of a token of each sequence, max(-A s, -A clip(s)), and its derivative by the
    log-prob: -A s, or 0 where clipped. float64 [sequences]."""
    plain = -advantages * ratio
    clipped = -advantages * np.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return np.maximum(plain, clipped), np.where(plain >= clipped, plain, 0.0)


def entropy_statistics(entropies: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted mean and unbiased standard deviation, weights being counts of equal tokens.

    Scalars (0-dim). A total weight below 2 gives a standard deviation of nan.
    """
    total = weights.sum()
    mean = (weights * entropies).sum() / total
    variance = (weights * (entropies - mean) ** 2).sum() / (total - 1.0)
    return mean, variance.clamp(min=0.0).sqrt()


def entropy_multiplier(entropies: Tensor, mean: Tensor, std: Tensor, coefficient: float) -> Tensor:
    """1 + a (H - mean) / std, detached: AEPO's entropy-aware advantage scale.

    Clamped to [0, 2], so that no advantage changes its sign; 1 where std is undefined (fewer than
    two tokens) or no more than rounding noise (equal entropies).
    """
    defined = std.isfinite() & (std > 1e-6 * mean.abs())
    score = (entropies.detach() - mean) / torch.where(defined, std, torch.ones_like(std))
    multiplier = (1.0 + coefficient * score).clamp(0.0, 2.0)
    return torch.where(defined, multiplier, torch.ones_like(multiplier))


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """Per-token estimators of KL(policy || reference) (Schulman 2020), d = log-ratio.

    k1: d, abs: |d|, k2: d^2 / 2, k3 or low_var_kl: exp(-d) + d - 1, at most 10.
    """
    difference = logprobs - ref_logprobs
    if kind == "k1":
        return difference
    if kind == "abs":
        return difference.abs()
    if kind == "k2":
        return 0.5 * difference.square()
    back = (-difference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return (back.exp() - back - 1.0).clamp(-10.0, 10.0)


def coarse_kl(policy: Tensor, teacher: Tensor) -> Tensor:
    """KL(policy || teacher), [tokens], from the log-probs of k ids, [tokens, k], with all other ids
    as one: at most the KL of the whole vocabulary, and equal to it if k has all. 0 where the
    teacher's are nan."""
    is_known = ~teacher.isnan().any(-1)
    teacher = torch.where(is_known[:, None], teacher, policy.detach())
    of_policy, of_teacher = ((1.0 - one.exp().sum(-1)).clamp(min=1e-6) for one in (policy, teacher))
    kl = (policy.exp() * (policy - teacher)).sum(-1) + of_policy * (of_policy / of_teacher).log()
    return is_known * kl


def kl_loss(logprobs: Tensor, ref_logprobs: Tensor, kind: KLKind) -> Tensor:
    """`kl_penalty` as a term of the loss: k1 keeps its value and gets the gradient of k2.

    The expected derivative of an estimator, on tokens that the policy samples:

        k1        0, as for every log-prob, so that it would have no effect
        k2        the gradient of KL(policy || reference)
        k3        the gradient of KL(reference || policy), inside its bounds; 0 outside
        abs       the gradient of sum |policy - reference|
    """
    value = kl_penalty(logprobs, ref_logprobs, kind)
    if kind != "k1":
        return value
    square = kl_penalty(logprobs, ref_logprobs, "k2")
    return value.detach() + square - square.detach()
