"""Losses on tensors of shape [sequence, token] as the released code of ARPO and AEPO has them.

The published fixtures check each to the digit (`tests/check_fixtures.py`); the flat oracle of the
tree batches uses them too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentenv.learners.algorithms.algorithm import Aggregation

MAX_LOG_SEQUENCE_RATIO = 10.0


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    bound: float = MAX_LOG_SEQUENCE_RATIO,
) -> tuple[Tensor, Tensor]:
    """Per-token loss and sequence ratio s_i, all [sequence, token] (GSPO-token, arXiv 2507.18071,
    eq. 13 and 14): s_i = exp(mean of the log-ratios), whose gradient is each token's own.

    Where the log of s_i exceeds `bound`, it is cut there, and the gradient with it. A sequence
    without valid tokens has a ratio of 1.
    """
    log_ratio = torch.where(mask > 0, logprobs - old_logprobs, torch.zeros_like(logprobs))
    mean = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1.0)
    log_sequence = logprobs - logprobs.detach() + mean.detach()
    ratio = log_sequence.clamp(max=bound).exp()
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return torch.max(-advantages * ratio, -advantages * clipped), ratio


def clip_shares(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, dual_clip: float
) -> tuple[Tensor, Tensor]:
    """0/1 per token: loss taken from the clipped ratio; loss cut by the dual clip."""
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    plain, bounded = -advantages * ratio, -advantages * clipped
    below = (torch.max(plain, bounded) > -advantages * dual_clip) & (advantages < 0)
    return (bounded > plain).to(ratio.dtype), below.to(ratio.dtype)


def aggregate(loss: Tensor, mask: Tensor, mode: Aggregation) -> Tensor:
    """A scalar from per-token losses and a 0/1 mask of shape [sequence, token].

    seq-mean-token-sum-norm divides by the padded length. A loss that is not finite is nan even
    where masked, and so is a fully masked sequence in seq-mean-token-mean.
    """
    kept = loss * mask
    if mode == "token-mean":
        return kept.sum() / (mask.sum() + 1e-8)
    if mode == "seq-mean-token-sum":
        return kept.sum(-1).mean()
    if mode == "seq-mean-token-sum-norm":
        return kept.sum() / mask.shape[-1]
    return (kept.sum(-1) / mask.sum(-1)).mean()
