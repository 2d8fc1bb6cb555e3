"""Which trajectories run through which trained token of encoded trees (numpy only).

Trees are in pre-order, so the leaves below a node are a contiguous range of leaf ordinals. Two
linear maps do all that methods on whole sequences need; each is the other's transpose:

    to_leaves   values of tokens -> their sum over each trajectory
    to_tokens   values of leaves -> their sum over the leaves below each token
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from learners.credit import Sharing
from learners.encoding import EncodedTree

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]


@dataclass(frozen=True)
class LeafMap:
    """Trained tokens as in `ActionTokens`, leaves tree after tree in pre-order.

    node: int64 [tokens], the node of a token, nodes being numbered over all trees; parent: int64
    [nodes], -1 for a root; first, last: int64 [nodes], range of leaves below a node, `last`
    exclusive; leaf_node: int64 [leaves]; returns, advantages: float64 [leaves], nan without a
    group; lengths: float64 [leaves], trained tokens of a trajectory.
    """

    node: Longs
    parent: Longs
    first: Longs
    last: Longs
    leaf_node: Longs
    group: Longs  # [leaves], the tree of a leaf
    returns: Floats
    advantages: Floats
    lengths: Floats

    @classmethod
    def of(cls, trees: Sequence[EncodedTree]) -> LeafMap:
        none = np.zeros(0, np.int64)  # a rank may have no tree
        nodes, parents, groups, figures = [none], [none], [none], [np.zeros((2, 0))]
        num_nodes = 0
        for number, tree in enumerate(trees):
            starts = tree.ints("starts").astype(np.int64)
            sizes = np.diff(np.append(starts, tree.num_tokens))
            owner = np.repeat(np.arange(len(starts)), sizes)
            parent = tree.ints("parents").astype(np.int64)
            nodes.append(owner[tree.actions()] + num_nodes)
            parents.append(np.where(parent < 0, -1, parent + num_nodes))
            groups.append(np.full(len(starts), number, np.int64))
            empty = np.full(len(starts), np.nan)
            leaf_figures = [
                tree.floats(name) if getattr(tree, name) else empty
                for name in ("returns", "advantages")
            ]
            figures.append(np.stack(leaf_figures))
            num_nodes += len(starts)
        parent, node = np.concatenate(parents), np.concatenate(nodes)
        is_leaf = np.ones(num_nodes, np.bool_)
        is_leaf[parent[parent >= 0]] = False
        first: Longs = np.cumsum(is_leaf) - is_leaf  # leaves before the node, in pre-order
        last = first + is_leaf
        for i in range(num_nodes - 1, 0, -1):
            if parent[i] >= 0:
                last[parent[i]] = max(last[parent[i]], last[i])
        returns, advantages = np.concatenate(figures, axis=1)[:, is_leaf]
        counts = np.bincount(node, minlength=num_nodes)
        return cls(
            node=node,
            parent=parent,
            first=first,
            last=last,
            leaf_node=np.flatnonzero(is_leaf),
            group=np.concatenate(groups)[is_leaf],
            returns=returns,
            advantages=advantages,
            lengths=_path_sums(counts.astype(np.float64), parent)[is_leaf],
        )

    @property
    def num_leaves(self) -> int:
        return len(self.leaf_node)

    def to_leaves(self, values: Floats) -> Floats:
        """float64 [tokens] -> [leaves]: sum over the trained tokens of each trajectory."""
        per_node = np.bincount(self.node, values, minlength=len(self.parent))
        return _path_sums(per_node.astype(np.float64), self.parent)[self.leaf_node]

    def to_tokens(self, values: Floats) -> Floats:
        """float64 [leaves] -> [tokens]: sum over the leaves below each token."""
        bounds = np.stack([self.first, self.last], axis=1).ravel()
        per_node: Floats = np.add.reduceat(np.append(values, 0.0), bounds)[::2]
        return per_node[self.node]

    def credit(
        self, advantages: Floats, weights: Floats, sharing: Sharing
    ) -> tuple[Floats, Floats, Floats]:
        """adv_pos, adv_neg and weight per token, each leaf counting `weights` times.

        With weights 1 these are the sums of `learners.credit.tree_credit`.
        """
        weight = self.to_tokens(weights)
        if sharing == "hard":
            count = self.to_tokens(np.ones(self.num_leaves))
            mean = self.to_tokens(advantages) / count * weight
            return np.maximum(mean, 0.0), np.minimum(mean, 0.0), weight
        positive = self.to_tokens(weights * np.maximum(advantages, 0.0))
        return positive, self.to_tokens(weights * np.minimum(advantages, 0.0)), weight


def _path_sums(values: Floats, parent: Longs) -> Floats:
    """Per node: the sum of `values` over the path that ends with it."""
    sums = values.copy()
    for i, above in enumerate(parent.tolist()):
        if above >= 0:
            sums[i] += sums[above]
    return sums
