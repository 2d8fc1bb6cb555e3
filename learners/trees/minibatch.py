"""A mini-batch with all inputs of its loss, computed once before the split into micro-batches.

An aggregation mode, which combines token losses into one number, is a coefficient c_i per
trajectory and a denominator over the mini-batch of N trajectories with lengths |y_i| (policy
tokens):

    loss = sum_i c_i sum_t l_it / denominator

    token-mean               c_i = 1         denominator sum |y_i|     DAPO, the default
    seq-mean-token-sum       c_i = 1         denominator N
    seq-mean-token-mean      c_i = 1/|y_i|   denominator N             GRPO and GSPO as printed
    seq-mean-token-sum-norm  c_i = 1         denominator N * L         Dr. GRPO, L a constant

A token shared by several trajectories takes the sum of their coefficients. Trajectories without
policy tokens do not count in any mode. Groups of equal returns count like others: tokens that no
pass computes (EncodedTree.is_counted) come last and add only to denominators and statistics. The
released code of ARPO differs: it aggregates each micro-batch separately and weights by rows, so
that the result depends on the packing; and its last mode divides by L without N.

Data of an older policy or another engine is corrected by

    rho = proximal / behavior      per token; 1 when engine and learner agree and data is fresh

Truncation bounds rho from above (IMPALA, Espeholt 2018; decoupled PPO, Hilton 2022). Masks drop
tokens that truncation cannot repair: a token mask outside a band of rho (IcePop, Ling team 2025), a
sequence mask outside a band of the geometric mean of rho over a trajectory. Masked tokens add
nothing to the numerator and stay in the denominator: a step shrinks when many are masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentenv.base.errors import DataError
from agentenv.learners.algorithms.algorithm import Algorithm, Band
from agentenv.learners.algorithms.credit import Floats
from agentenv.learners.algorithms.losses import MAX_LOG_RATIO, LossBatch, sequence_terms
from agentenv.learners.keys import Metrics
from agentenv.learners.trees.encoded_tree import ActionTokens, EncodedTree, computed
from agentenv.learners.trees.leaf_map import (
    Gather,
    LeafMap,
    coefficients,
    denominator,
    leaf_advantages,
    sequence_ratios,
    sequence_weights,
)

WIDE = (0.5, 2.0)  # the band for metrics when no mask is set


class MiniBatch:
    """Credit, weights and batch statistics of one mini-batch, computed once.

    Values per trained token of this rank's share, in the order of `ActionTokens`, float64:
    proximal, entropies, reference (None without one), see LossBatch; is_measured, bool: whether the
    proximal log-prob was computed (None: all), otherwise it is the engine's. adv_pos, adv_neg and
    weight include the aggregation's coefficients and the sequence mask; importance includes
    truncation and token mask. leaf_advantages, leaf_weights: [leaves], for methods on sequences.
    Denominator and statistics are over all ranks. Computed trees come first, and so do the
    `num_computed` tokens of micro-batches.

    Each rank passes its share of the trees and of their tokens. Raises DataError if the algorithm
    needs entropies or groups that the trees do not have.
    """

    def __init__(
        self,
        trees: Sequence[EncodedTree],
        tokens: ActionTokens,
        proximal: Floats,
        entropies: Floats,
        reference: Floats | None,
        algorithm: Algorithm,
        gather: Gather,
        is_measured: NDArray[np.bool_] | None = None,
    ) -> None:
        if is_measured is None:
            is_measured = np.ones(len(proximal), np.bool_)
        if algorithm.needs_entropies and np.isnan(entropies).any():
            raise DataError("the algorithm needs entropies, but the engine returned none")
        self.trees, self.tokens, self.is_measured = trees, tokens, is_measured
        self.proximal, self.entropies, self.reference = proximal, entropies, reference
        self.leaves = LeafMap(trees) if algorithm.needs_leaves else None
        self.adv_pos, self.adv_neg, self.weight = tokens.adv_pos, tokens.adv_neg, tokens.weight
        self.leaf_advantages = self.leaf_weights = np.zeros(0)
        share, num_kept = float(self.weight.sum()), (0, 0)  # of trajectories: those kept, and all
        log_ratio = proximal - tokens.behavior
        if (leaves := self.leaves) is not None:
            if np.isnan(leaves.advantages).any():
                raise DataError("the trees have no advantages of their leaves")
            advantages = leaf_advantages(algorithm, leaves, proximal, reference, gather)
            plain = coefficients(algorithm.aggregation, leaves.lengths)
            mask = sequence_weights(log_ratio, leaves, algorithm.sequence_mask, gather)
            self.leaf_advantages, self.leaf_weights = advantages, plain * mask
            self.adv_pos, self.adv_neg, _ = leaves.credit(
                advantages, self.leaf_weights, algorithm.credit_sharing
            )
            self.weight = leaves.to_tokens(plain)
            home = leaves.is_home
            share = denominator(algorithm.aggregation, leaves.lengths[home], algorithm.norm_length)
            shown = home & leaves.is_computed
            num_kept = int((self.leaf_weights[shown] > 0).sum()), int(shown.sum())
        ratio = ratios(proximal, tokens.behavior)
        band = algorithm.token_mask
        self.importance = token_importance(ratio, algorithm.importance_cap, band)
        moments = ratio_moments(ratio, tokens.weight * is_measured, band)
        counts = np.array([share, self.weight[: self.num_computed].sum(), *num_kept])
        known = np.where(np.isnan(entropies), 0.0, entropies)
        first = np.array([tokens.weight.sum(), (tokens.weight * known).sum()])
        sums = over_all(np.concatenate([counts, first, moments]), gather)
        self.denominator, self.sum_weight = float(sums[0]), float(sums[1])
        self.entropy_mean = mean = float(sums[5] / max(sums[4], 1.0))
        second = over_all(np.array([(tokens.weight * (known - mean) ** 2).sum()]), gather)[0]
        self.entropy_std = float(np.sqrt(second / (sums[4] - 1.0))) if sums[4] > 1.0 else np.nan
        self.metrics = ratio_metrics(sums[6:])
        if algorithm.sequence_mask is not None:
            self.metrics["sequences_masked"] = 1.0 - float(sums[2] / max(sums[3], 1.0))
        self.found_entropies = entropies.copy()  # nan until a pass has computed them
        self.logprobs = np.full(len(proximal), np.nan)  # of the pass that trained a token first

    def loss_batch(
        self, index: np.ndarray, like: Tensor, terms: tuple[Floats, Floats] | None
    ) -> LossBatch:
        """The tokens at `index`, as tensors like `like`; `terms` are value and slope."""

        def pick(values: Floats) -> Tensor:
            return torch.from_numpy(values[index]).to(like)

        value, slope = (None, None) if terms is None else (pick(terms[0]), pick(terms[1]))
        return LossBatch(
            behavior=pick(self.tokens.behavior),
            proximal=pick(self.proximal),
            entropies=pick(self.entropies),
            adv_pos=pick(self.adv_pos),
            adv_neg=pick(self.adv_neg),
            weight=pick(self.weight),
            total_weight=self.denominator,
            entropy_mean=like.new_tensor(self.entropy_mean),
            entropy_std=like.new_tensor(self.entropy_std),
            importance=pick(self.importance),
            sum_weight=self.sum_weight,
            reference=None if self.reference is None else pick(self.reference),
            value=value,
            slope=slope,
        )

    def record(self, index: np.ndarray, logprobs: Tensor, entropies: Tensor) -> None:
        """Store the values of the tokens at `index` that are not known yet."""
        for known, values in ((self.logprobs, logprobs), (self.found_entropies, entropies)):
            unknown = np.isnan(known[index])
            if unknown.any():
                known[index[unknown]] = values.detach().double().cpu().numpy()[unknown]

    @property
    def num_computed(self) -> int:
        """Number of trained tokens of computed trees, which come first."""
        return sum(tree.num_action_tokens for tree in computed(self.trees))

    @property
    def values(self) -> Floats:
        """Entropies and proximal log-probs, nan where they are the engine's, and log-probs."""
        are_brought = ~np.isnan(self.tokens.entropies) & ~self.is_measured
        entropies = np.where(are_brought, np.nan, self.found_entropies)
        measured = np.where(self.is_measured, self.proximal, np.nan)
        return np.stack([entropies, measured, self.logprobs])

    def terms(self, algorithm: Algorithm, current: Floats, gather: Gather) -> tuple[Floats, Floats]:
        """Value and slope per token of a loss that clips whole trajectories; `current` are the
        current log-probs. Sets the metric `sequences_clipped`."""
        assert self.leaves is not None
        ratio = sequence_ratios(current - self.proximal, self.leaves, gather)
        low, high = algorithm.clip_low, algorithm.clip_high
        advantages, weights = self.leaf_advantages, self.leaf_weights
        value, slope = sequence_terms(ratio, advantages, low, high)
        counted = self.leaves.is_home & self.leaves.is_computed
        clipped = ((slope == 0.0) & (advantages != 0.0))[counted]
        counts = over_all(np.array([float(clipped.sum()), float(len(clipped))]), gather)
        self.metrics["sequences_clipped"] = float(counts[0] / max(counts[1], 1.0))
        return self.leaves.to_tokens(weights * value), self.leaves.to_tokens(weights * slope)


def over_all(values: Floats, gather: Gather) -> Floats:
    """An array added up over all ranks."""
    return np.asarray(np.sum(gather(values), axis=0))


def ratios(proximal: Floats, behavior: Floats) -> Floats:
    """exp(proximal - behavior), the log-ratio clamped to +-20."""
    return np.asarray(np.exp(np.clip(proximal - behavior, -MAX_LOG_RATIO, MAX_LOG_RATIO)))


def token_importance(ratio: Floats, cap: float | Literal["none"], mask: Band | None) -> Floats:
    """min(rho, cap), or 1 without a cap, and 0 outside the mask's band; float64 [tokens]."""
    kept = np.ones_like(ratio) if mask is None else mask.holds(ratio).astype(np.float64)
    return np.asarray(kept if cap == "none" else np.minimum(ratio, cap) * kept)


def ratio_moments(ratio: Floats, weight: Floats, mask: Band | None) -> Floats:
    """Sums of w, w rho, w rho^2, and of w where rho is out of band: float64 [4], to be added
    over ranks. w counts the trajectories through a token."""
    low, high = WIDE if mask is None else (mask.low, mask.high)
    outside = (ratio < low) | (ratio > high)
    terms = (weight, weight * ratio, weight * ratio**2, weight * outside)
    return np.array([float(term.sum()) for term in terms])


def ratio_metrics(moments: Floats) -> Metrics:
    """Share of tokens with rho out of band, and effective sample size as a share of the tokens:
    (sum w rho)^2 / (sum w * sum w rho^2) (Kish): 1 on-policy, near 0 if few tokens dominate the
    estimate. Empty if no proximal log-prob was computed, since the ratio is then 1 by
    assumption."""
    total, first, second, outside = moments.tolist()
    if total == 0.0:
        return {}
    return {
        "ratio_out_of_band": outside / total,
        "effective_sample_size": first**2 / (total * second),
    }
