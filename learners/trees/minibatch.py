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

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentenv.base.errors import DataError
from agentenv.learners.algorithms.algorithm import Aggregation, Algorithm, Band
from agentenv.learners.algorithms.credit import Floats, Sharing
from agentenv.learners.algorithms.losses import MAX_LOG_RATIO, LossBatch, sequence_terms
from agentenv.learners.keys import Metrics
from agentenv.learners.trees.encoded_tree import (
    ActionTokens,
    EncodedTree,
    computed,
    leaf_ranges,
    path_sums,
)

WIDE = Band(low=0.5, high=2.0)  # the band for metrics when no mask is set

Gather = Callable[[Any], list[Any]]  # the values of all ranks, by rank; collective


class MiniBatch:
    """Credit, weights and batch statistics of one mini-batch, computed once.

    Values per trained token of this rank's share, in the order of `ActionTokens`, float64:
    proximal, entropies, reference (None without one), see LossBatch; is_measured, bool: whether the
    proximal log-prob was computed, otherwise it is the engine's. adv_pos, adv_neg and weight
    include the aggregation's coefficients and the sequence mask; importance includes truncation and
    token mask. leaf_advantages, leaf_weights: [leaves], for methods on sequences. Denominator and
    statistics are over all ranks. Computed trees come first, and so do the `num_computed` tokens of
    micro-batches.

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
        is_measured: NDArray[np.bool_],
    ) -> None:
        if algorithm.needs_entropies and np.isnan(entropies).any():
            raise DataError("the algorithm needs entropies, but the engine returned none")
        self.trees, self.tokens, self.is_measured = trees, tokens, is_measured
        self.proximal, self.entropies, self.reference = proximal, entropies, reference
        self.leaves = LeafMap(trees) if algorithm.needs_leaves else None
        self.adv_pos, self.adv_neg, self.weight = tokens.adv_pos, tokens.adv_neg, tokens.weight
        self.leaf_advantages = self.leaf_weights = np.zeros(0)
        in_loss = self.weight
        share, num_kept = float(self.weight.sum()), (0, 0)  # of trajectories: those kept, and all
        log_ratio = proximal - tokens.behavior
        if (leaves := self.leaves) is not None:
            if np.isnan(leaves.advantages).any():
                raise DataError("the trees have no advantages of their leaves")
            advantages = leaf_advantages(algorithm, leaves, proximal, reference, gather)
            plain = coefficients(algorithm.aggregation, leaves.lengths)
            mask = sequence_weights(log_ratio, leaves, algorithm.sequence_mask, gather)
            self.leaf_advantages, self.leaf_weights = advantages, plain * mask
            self.adv_pos, self.adv_neg, in_loss = leaves.credit(
                advantages, self.leaf_weights, algorithm.credit_sharing
            )
            self.weight = leaves.to_tokens(plain)
            home = leaves.is_home
            share = denominator(algorithm.aggregation, leaves.lengths[home], algorithm.norm_length)
            shown = home & leaves.is_computed
            num_kept = int((self.leaf_weights[shown] > 0).sum()), int(shown.sum())
        self.dense = None if tokens.dense is None else tokens.dense * in_loss
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
        self,
        index: np.ndarray,
        like: Tensor,
        terms: tuple[Floats, Floats] | None,
        taught: Tensor | None = None,
    ) -> LossBatch:
        """The tokens at `index`, as tensors like `like`; `terms` are value and slope."""

        def pick(values: Floats) -> Tensor:
            return torch.from_numpy(values[index]).to(like)

        tokens = self.tokens
        value, slope = (None, None) if terms is None else (pick(terms[0]), pick(terms[1]))
        picked = ("proximal", "entropies", "adv_pos", "adv_neg", "weight", "importance")
        return LossBatch(
            behavior=pick(self.tokens.behavior),
            **{name: pick(getattr(self, name)) for name in picked},
            total_weight=self.denominator,
            entropy_mean=like.new_tensor(self.entropy_mean),
            entropy_std=like.new_tensor(self.entropy_std),
            sum_weight=self.sum_weight,
            reference=None if self.reference is None else pick(self.reference),
            value=value,
            slope=slope,
            dense=None if self.dense is None else pick(self.dense),
            taught=taught,
            teacher=None if tokens.taught is None else pick(tokens.taught.logprobs),
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
    outside = ~(mask or WIDE).holds(ratio)
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


# Trajectories of a mini-batch: their relation to its tokens, and figures of whole sequences.


class LeafMap:
    """The relation of trajectories and trained tokens.

    Trees are in pre-order, so the leaves below a node are a contiguous range of leaf ordinals.
    Methods on whole sequences need only two linear maps, which are transposes of each other:

        to_leaves   values of tokens -> their sum over each trajectory
        to_tokens   values of leaves -> their sum over the leaves below each token

    Trained tokens are as in `ActionTokens`, leaves tree after tree in pre-order. node: int64
    [tokens], the node of a token, nodes being numbered over all trees; parent: int64 [nodes], -1
    for a root; first, last: int64 [nodes], range of leaves below a node, `last` exclusive;
    leaf_node: int64 [leaves]; group: int64 [leaves], the tree of a leaf: its number in the
    mini-batch, below 0 if whole; returns, advantages: float64 [leaves], nan without a group;
    lengths: float64 [leaves], trained tokens of a trajectory.

    A part of a tree has all leaves, but not all tokens, so that `to_leaves` returns partial sums;
    `over_parts` adds them up. is_home: bool [leaves], whether this rank counts them; is_computed:
    bool [leaves], whether micro-batches have their tokens.
    """

    returns: Floats
    advantages: Floats

    def __init__(self, trees: Sequence[EncodedTree]) -> None:
        none = np.zeros(0, np.int64)  # a rank may have no tree
        nodes, parents, groups, figures = [none], [none], [none], [np.zeros((2, 0))]
        counts, homes, computed = [none], [none.astype(np.bool_)], [none.astype(np.bool_)]
        num_nodes = 0
        for number, tree in enumerate(trees):
            starts, owner = tree.ints("starts"), tree.owner
            parent = tree.ints("parents").astype(np.int64)
            nodes.append(owner[tree.actions()] + num_nodes)
            parents.append(np.where(parent < 0, -1, parent + num_nodes))
            whole = tree.whole
            groups.append(np.full(len(starts), -1 - number if whole is None else whole.number))
            homes.append(np.full(len(starts), whole is None or whole.is_home))
            computed.append(np.full(len(starts), not tree.is_counted))
            here = np.bincount(owner[tree.actions()], minlength=len(starts))
            counts.append(here if whole is None else np.frombuffer(whole.num_actions, np.int32))
            empty = np.full(len(starts), np.nan)
            leaf_figures = [
                tree.floats(name) if getattr(tree, name) else empty
                for name in ("returns", "advantages")
            ]
            figures.append(np.stack(leaf_figures))
            num_nodes += len(starts)
        self.node, self.parent = np.concatenate(nodes), np.concatenate(parents)
        is_leaf, self.first, self.last = leaf_ranges(self.parent)
        self.leaf_node = np.flatnonzero(is_leaf)
        self.group = np.concatenate(groups)[is_leaf]
        self.returns, self.advantages = np.concatenate(figures, axis=1)[:, is_leaf]
        num_actions = np.concatenate(counts).astype(np.float64)
        self.lengths = path_sums(num_actions, self.parent)[is_leaf]
        self.is_home = np.concatenate(homes)[is_leaf]
        self.is_computed = np.concatenate(computed)[is_leaf]

    def to_leaves(self, values: Floats) -> Floats:
        """float64 [tokens] -> [leaves]: sum over the trained tokens of each trajectory."""
        per_node = np.bincount(self.node, values, minlength=len(self.parent))
        return path_sums(per_node.astype(np.float64), self.parent)[self.leaf_node]

    def over_parts(self, values: Floats, gather: Gather) -> Floats:
        """float64 [leaves], each summed over the ranks with a part of its tree, in the order of
        ranks, so that all get equal results; collective."""
        _, first, tree = np.unique(self.group, return_index=True, return_inverse=True)
        ordinal = np.arange(len(tree)) - first[tree]  # in its tree
        is_part = self.group >= 0
        keys = (self.group << 32 | ordinal)[is_part]
        everywhere = gather((keys, values[is_part]))
        known, place = np.unique(np.concatenate([k for k, _ in everywhere]), return_inverse=True)
        sums = np.bincount(place, np.concatenate([v for _, v in everywhere]), len(known))
        out = values.copy()
        out[is_part] = sums[np.searchsorted(known, keys)]
        return out

    def to_tokens(self, values: Floats) -> Floats:
        """float64 [leaves] -> [tokens]: sum over the leaves below each token."""
        bounds = np.stack([self.first, self.last], axis=1).ravel()
        per_node: Floats = np.add.reduceat(np.append(values, 0.0), bounds)[::2]
        return per_node[self.node]

    def credit(
        self, advantages: Floats, weights: Floats, sharing: Sharing
    ) -> tuple[Floats, Floats, Floats]:
        """adv_pos, adv_neg and weight per token, each leaf counting `weights` times.

        With weights 1 these are the sums of `agentenv.learners.algorithms.credit.tree_credit`.
        """
        weight = self.to_tokens(weights)
        if sharing == "hard":
            count = self.to_tokens(np.ones_like(self.lengths))
            mean = self.to_tokens(advantages) / count * weight
            return np.maximum(mean, 0.0), np.minimum(mean, 0.0), weight
        positive = self.to_tokens(weights * np.maximum(advantages, 0.0))
        return positive, self.to_tokens(weights * np.minimum(advantages, 0.0)), weight


def leaf_advantages(
    algorithm: Algorithm,
    leaves: LeafMap,
    proximal: Floats,
    reference: Floats | None,
    gather: Gather,
) -> Floats:
    """Advantages of the leaves, [leaves]; recomputed group by group with a KL in the reward.

    R'_i = R_i - kl_reward * sum over the trajectory's policy tokens of log(proximal / reference).
    """
    if algorithm.kl_reward == 0:
        return leaves.advantages
    assert reference is not None
    log_ratios = leaves.over_parts(leaves.to_leaves(proximal - reference), gather)
    returns = leaves.returns - algorithm.kl_reward * log_ratios
    advantages = np.zeros_like(returns)
    for group in np.unique(leaves.group):
        mine = leaves.group == group
        advantages[mine] = algorithm.advantages(returns[mine])
    return advantages


def coefficients(mode: Aggregation, lengths: Floats) -> Floats:
    """c_i, float64 [trajectories]."""
    if mode == "seq-mean-token-mean":
        return 1.0 / np.maximum(lengths, 1.0)
    return np.ones_like(lengths)


def denominator(mode: Aggregation, lengths: Floats, norm_length: int) -> float:
    """This rank's part of the denominator; `norm_length` is L."""
    if mode == "token-mean":
        return float(lengths.sum())
    num_sequences = float((lengths > 0).sum())
    return num_sequences * norm_length if mode == "seq-mean-token-sum-norm" else num_sequences


def sequence_ratios(log_ratio: Floats, leaves: LeafMap, gather: Gather) -> Floats:
    """exp of the mean log-ratio of each trajectory's trained tokens, float64 [leaves]; 1 for a
    trajectory without one. Log-ratios are clamped to +-20."""
    sums = leaves.to_leaves(np.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))
    sums = leaves.over_parts(sums, gather)
    return np.asarray(np.exp(sums / np.maximum(leaves.lengths, 1.0)))


def sequence_weights(
    log_ratio: Floats, leaves: LeafMap, mask: Band | None, gather: Gather
) -> Floats:
    """1 for trajectories inside the band, 0 outside, float64 [leaves]."""
    if mask is None:
        return np.ones_like(leaves.lengths)
    return mask.holds(sequence_ratios(log_ratio, leaves, gather)).astype(np.float64)
