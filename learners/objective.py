"""The objective of a micro-batch and its metrics, for every algorithm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from learners import losses
from learners.losses import LossBatch

if TYPE_CHECKING:
    from learners.algorithm import Algorithm


def objective(
    algorithm: Algorithm, batch: LossBatch, logprobs: Tensor, entropies: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """See `Algorithm.loss`.

    sum over tokens of importance * policy loss + kl_loss * KL - entropy_bonus * H, the last two
    weighted by `batch.weight`, over `batch.total_weight`. A mini-batch without tokens gives 0.
    """
    total = batch.total_weight or 1.0
    ratio = losses.ratio_of(logprobs, batch.proximal, compat=algorithm.is_compat)
    importance = batch.importance
    if importance is None:
        behaviour = losses.ratio_of(batch.proximal, batch.behaviour)
        importance = behaviour.clamp(max=algorithm.importance_cap)
    scale = algorithm.advantage_scale(batch, entropies)
    adv_pos, adv_neg = batch.adv_pos * scale, batch.adv_neg * scale
    if batch.value is not None and batch.slope is not None:
        per_token = batch.value + batch.slope * (logprobs - logprobs.detach())
    else:
        per_token = algorithm.token_loss(ratio, adv_pos) + algorithm.token_loss(ratio, adv_neg)
    loss = (importance * per_token).sum() / total
    part = batch.weight / (batch.sum_weight or total)
    metrics = _metrics(algorithm, batch, logprobs.detach(), ratio.detach(), part)
    metrics["entropy"] = (part * entropies.detach()).sum()
    if algorithm.kl_loss > 0 and batch.reference is not None:
        kl = losses.kl_penalty(logprobs, batch.reference, algorithm.kl_kind)
        loss = loss + algorithm.kl_loss * (batch.weight * kl).sum() / total
    if batch.reference is not None:
        difference = logprobs.detach() - batch.reference
        metrics["kl_to_reference"] = (part * difference).sum()
    if algorithm.entropy_bonus > 0:
        loss = loss - algorithm.entropy_bonus * (batch.weight * entropies).sum() / total
    return loss, {"loss": loss.detach(), **metrics}


@torch.no_grad()
def _metrics(
    algorithm: Algorithm, batch: LossBatch, logprobs: Tensor, ratio: Tensor, part: Tensor
) -> dict[str, Tensor]:
    behaviour = losses.ratio_of(batch.proximal, batch.behaviour)
    metrics = {
        "ratio_mean": (part * ratio).sum(),
        "ratio_max": ratio.max() if len(ratio) else ratio.new_tensor(0.0),
        "importance_capped": (part * (behaviour > algorithm.importance_cap)).sum(),
        "kl_to_proximal": (part * (batch.proximal - logprobs)).sum(),
    }
    if algorithm.clips_sequences:
        return metrics
    high = (batch.adv_pos > 0) & (ratio > 1 + algorithm.clip_high)
    low = (batch.adv_neg < 0) & (ratio < 1 - algorithm.clip_low)
    metrics["clipped_high"] = (part * high).sum()
    metrics["clipped_low"] = (part * low).sum()
    dual = (batch.adv_neg < 0) & (ratio > algorithm.negative_bound)
    metrics["clipped_dual"] = (part * dual).sum()
    return metrics
