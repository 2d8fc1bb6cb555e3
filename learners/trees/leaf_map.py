"""Trajectories of a mini-batch: their relation to its tokens, and figures of whole sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from agentenv.learners.algorithms.algorithm import Aggregation, Algorithm, Band
from agentenv.learners.algorithms.credit import Floats, Sharing
from agentenv.learners.algorithms.losses import MAX_LOG_RATIO
from agentenv.learners.trees.encoded_tree import EncodedTree, leaf_ranges, path_sums

Gather = Callable[[Any], list[Any]]  # the values of all ranks, by rank; collective


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

    @property
    def num_leaves(self) -> int:
        return len(self.leaf_node)

    def to_leaves(self, values: Floats) -> Floats:
        """float64 [tokens] -> [leaves]: sum over the trained tokens of each trajectory."""
        per_node = np.bincount(self.node, values, minlength=len(self.parent))
        return path_sums(per_node.astype(np.float64), self.parent)[self.leaf_node]

    def over_parts(self, values: Floats, gather: Gather) -> Floats:
        """float64 [leaves], each summed over the ranks with a part of its tree, in the order of
        ranks, so that all get equal results; collective."""
        _, first, tree = np.unique(self.group, return_index=True, return_inverse=True)
        ordinal = np.arange(self.num_leaves) - first[tree]  # in its tree
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
            count = self.to_tokens(np.ones(self.num_leaves))
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
        return np.ones(leaves.num_leaves)
    return mask.holds(sequence_ratios(log_ratio, leaves, gather)).astype(np.float64)
