"""From the returns of a tree's leaves to credit on its shared tokens (numpy only).

The leaves of a tree are the group. A token shared by d leaves has d advantages and one ratio;
losses of PPO's kind are exact when the advantages are summed by sign, so the credit of a node is
(adv_pos, adv_neg, weight): the sum of the positive and of the negative advantages of the leaves
below it, and the number of those leaves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from agentenv.tree import Node, TrajectoryTree
from agentenv.types import Limit

Floats = NDArray[np.float64]
Sharing = Literal["soft", "hard"]
Truncated = Literal["score", "zero", "mask"]

EPSILON = 1e-6


@dataclass(frozen=True)
class TreeCredit:
    """Credit per node, float64 arrays of length len(tree.nodes); weight 0 = not trained."""

    adv_pos: Floats
    adv_neg: Floats
    weight: Floats

    @property
    def has_signal(self) -> bool:
        """False when every advantage is exactly 0: nothing can be learned from this tree."""
        return bool(np.any(self.adv_pos) or np.any(self.adv_neg))


def group_advantages(
    rewards: Sequence[float] | Floats,
    *,
    norm_by_std: bool = True,
    epsilon: float = EPSILON,
    compat: bool = False,
) -> Floats:
    """(r - mean) / (std + epsilon) over one group, std unbiased (GRPO, Shao 2024, section 4.1.2).

    Without norm_by_std: r - mean (Dr. GRPO, Liu 2025). Equal rewards and single rewards give
    exactly 0; compat reproduces the released ARPO code, in which a single reward keeps its value
    (divided by 1 + epsilon) and equal ones leave rounding noise.
    """
    values = np.asarray(rewards, np.float64)
    if values.size == 1 and compat:
        return values / (1.0 + epsilon) if norm_by_std else values.copy()
    if values.size < 2 or (not compat and values.max() == values.min()):
        return np.zeros_like(values)
    centred: Floats = values - values.mean()
    if norm_by_std:
        centred /= values.std(ddof=1) + epsilon
    return centred


def tree_credit(
    tree: TrajectoryTree,
    *,
    group_size: int,
    min_group_fraction: float = 0.75,
    norm_by_std: bool = True,
    sharing: Sharing = "soft",
    truncated: Mapping[Limit, Truncated] | None = None,
    compat: bool = False,
) -> TreeCredit | None:
    """Credit of every node, or None when the group is too short to be normalised.

    Failed leaves are in no group. A truncated leaf counts with its return ("score"), with return
    0 ("zero") or not at all ("mask"), by its limit; limits not in the mapping are scored. What is
    left must be at least min_group_fraction of group_size. Soft sharing gives a token each
    leaf's own advantage, hard sharing the mean over the leaves below it, counted as often
    (ARPO, Dong 2025, section 3.2).
    """
    modes = truncated or {}
    leaves = [leaf for leaf in tree.leaves() if _is_counted(leaf, modes)]
    if not leaves or len(leaves) < min_group_fraction * group_size:
        return None
    paths = [tree.path(leaf) for leaf in leaves]
    returns = [
        0.0 if _mode(leaf, modes) == "zero" else sum(node.reward for node in path)
        for leaf, path in zip(leaves, paths, strict=True)
    ]
    advantages = group_advantages(returns, norm_by_std=norm_by_std, compat=compat)
    adv_pos, adv_neg, weight = np.zeros((3, len(tree.nodes)))
    for path, advantage in zip(paths, advantages, strict=True):
        nodes = [node.index for node in path]
        adv_pos[nodes] += max(advantage, 0.0)
        adv_neg[nodes] += min(advantage, 0.0)
        weight[nodes] += 1.0
    if sharing == "hard":
        total = adv_pos + adv_neg
        adv_pos, adv_neg = np.maximum(total, 0.0), np.minimum(total, 0.0)
    return TreeCredit(adv_pos, adv_neg, weight)


def _mode(leaf: Node, modes: Mapping[Limit, Truncated]) -> Truncated:
    if leaf.end != "truncated" or leaf.limit is None:
        return "score"
    return modes.get(leaf.limit, "score")


def _is_counted(leaf: Node, modes: Mapping[Limit, Truncated]) -> bool:
    return leaf.end != "failed" and _mode(leaf, modes) != "mask"
