"""Credit of shared tokens from the returns of a tree's leaves (numpy only).

The leaves of a tree are the group. A token shared by d leaves has d advantages and one ratio;
losses of PPO's kind are exact when the advantages are summed by sign, so the credit of a node is
(adv_pos, adv_neg, weight): the sum of the positive and of the negative advantages of the leaves
below it, and the number of those leaves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentenv.base.crashes import called, name_of
from agentenv.base.errors import ConfigError
from agentenv.base.tree import Node, Trajectory, TrajectoryTree
from agentenv.base.types import Limit

Floats = NDArray[np.float64]
Sharing = Literal["soft", "hard"]
Truncated = Literal["score", "zero", "mask"]
StepRewards = Literal["return", "to_go"]
KLKind = Literal["k1", "abs", "k2", "k3", "low_var_kl"]
CreditedTree = tuple[TrajectoryTree, "TreeCredit"]  # a group of an update
Estimator = Callable[[Floats], Floats]  # returns of a group -> advantages

EPSILON = 1e-6
ROUNDING = 1e-12  # of a return, which is a sum of rewards; relative above 1
MIN_GROUP_FRACTION = 0.75  # of the leaves of a whole group; a mean of fewer is too noisy


class Taught(NamedTuple):
    """The teacher's likeliest ids for each sampled token, int64 [tokens, k], and their log-probs,
    nats, float64; nan where it did not score."""

    ids: NDArray[np.int64]
    logprobs: Floats

    @classmethod
    def unknown(cls, num_tokens: int, width: int) -> Taught:
        """Of tokens that it did not score."""
        return cls(np.zeros((num_tokens, width), np.int64), np.full((num_tokens, width), np.nan))

    def within(self, num_ids: int) -> Taught:
        """Without the tokens that have ids of a larger vocabulary."""
        beyond = (self.ids >= num_ids).any(1, keepdims=True)
        return Taught(np.where(beyond, 0, self.ids), np.where(beyond, np.nan, self.logprobs))

    @classmethod
    def joined(cls, parts: Sequence[Taught]) -> Taught:
        """Of all tokens; parts of width 0 are unknown."""
        width = max(one.ids.shape[1] for one in parts)
        whole = [one if one.ids.shape[1] else cls.unknown(len(one.ids), width) for one in parts]
        return cls(*map(np.concatenate, zip(*whole, strict=True)))


@dataclass(frozen=True)
class TreeCredit:
    """Credit per node, float64 arrays of length len(tree.nodes); weight 0 = not trained.

    `returns` and `advantages` hold the figures of each counted leaf at its node, nan elsewhere.

    `dense`: by node, float64 advantages of any sign for each of its sampled tokens; nodes that are
    missing have 0. They are a term of the loss of their own: a token of a flat trajectory with the
    advantage A and the dense advantage D has the loss l(r, A) + l(r, D), and a shared token, whose
    D is that of every trajectory below it, weight * l(r, D).
    """

    adv_pos: Floats
    adv_neg: Floats
    weight: Floats
    returns: Floats
    advantages: Floats
    dense: Mapping[int, Floats] = field(default_factory=dict)
    taught: Mapping[int, Taught] = field(default_factory=dict)  # by node
    teacher: Mapping[int, Floats] = field(default_factory=dict)  # by node, log-probs, to be shown
    awaits_teacher: bool = False  # dense advantages are added before the update

    @property
    def has_signal(self) -> bool:
        """False when every advantage is exactly 0, as in a group whose returns are equal."""
        parts = (self.adv_pos, self.adv_neg, *self.dense.values())
        return self.awaits_teacher or bool(self.taught) or any(map(np.any, parts))


def counted_leaves(tree: TrajectoryTree, credit: TreeCredit) -> list[Node]:
    """The leaves in the group: neither failed nor masked."""
    return [tree.nodes[index] for index in np.flatnonzero(~np.isnan(credit.advantages)).tolist()]


def parents(tree: TrajectoryTree) -> NDArray[np.int64]:
    """The previous node of each, across contexts; the root's is itself."""
    found = [node.continues if node.parent is None else node.parent for node in tree.nodes]
    return np.array([0 if one is None else one for one in found], np.int64)


def are_equal(returns: Floats) -> bool:
    """Whether none of the returns is better than another: they differ by rounding at most."""
    low, high = float(returns.min()), float(returns.max())
    return high - low <= ROUNDING * max(1.0, abs(low), abs(high))


def group_advantages(rewards: Sequence[float] | Floats, *, norm_by_std: bool = True) -> Floats:
    """(r - mean) / (std + 1e-6) over one group, std unbiased (GRPO, Shao 2024, section 4.1.2).

    Without norm_by_std: r - mean (Dr. GRPO, Liu 2025). Equal rewards and single rewards give
    exactly 0.
    """
    values = np.asarray(rewards, np.float64)
    if values.size < 2 or are_equal(values):
        return np.zeros_like(values)
    centered: Floats = values - values.mean()
    if norm_by_std:
        centered /= values.std(ddof=1) + EPSILON
    return centered


def soft_length_penalty(num_tokens: int, max_tokens: int, buffer: int) -> float:
    """DAPO's soft overlong punishment (Yu 2025, eq. 13): 0 up to max_tokens - buffer, then down
    linearly to -1 at max_tokens and beyond. max_tokens 0 switches it off; buffer > 0."""
    if max_tokens == 0:
        return 0.0
    return -min(1.0, max(0.0, (num_tokens - (max_tokens - buffer)) / buffer))


def advantages_of(estimator: Estimator, returns: Floats) -> Floats:
    """The advantages of a group, float64 [len(returns)]. Raises ConfigError for a user's estimator
    that raises, or returns a wrong number of advantages or non-finite ones."""
    found = np.asarray(called(estimator, returns), np.float64)
    if found.shape != returns.shape or not np.isfinite(found).all():
        raise ConfigError(
            f"{name_of(estimator)} returned {found.tolist()} for the returns {returns.tolist()}; "
            "expected a finite number for each return"
        )
    return found


def credit_of(algorithm: Any, tree: TrajectoryTree) -> TreeCredit | None:
    """The tree's credit. Raises ConfigError if a custom algorithm raises or its credit is not
    finite."""
    found: TreeCredit | None = called(algorithm.credit, tree)
    for key in ("adv_pos", "adv_neg", "weight") if found is not None else ():
        values = np.asarray(getattr(found, key, None), np.float64)
        if values.shape != (len(tree.nodes),) or not np.isfinite(values).all():
            raise ConfigError(
                f"{name_of(algorithm.credit)} returned {key} that is not a finite number for each "
                f"of {len(tree.nodes)} nodes, for tree {tree.index}"
            )
    if found is not None and algorithm.teach:
        # of equal returns, none has a better sibling
        returns = found.returns[~np.isnan(found.returns)]
        waits = algorithm.hint != "sibling" or not are_equal(returns)
        found = replace(found, awaits_teacher=waits)
    for index, values in found.dense.items() if found is not None else ():
        size = len(tree.nodes[index].action_ids)
        if np.shape(values) != (size,) or not np.isfinite(values).all():
            raise ConfigError(
                f"{name_of(algorithm.credit)} returned dense that is not a finite number for each "
                f"of {size} sampled tokens of node {index}, for tree {tree.index}"
            )
    return found


def tree_credit(
    tree: TrajectoryTree,
    *,
    group_size: int,
    sharing: Sharing = "soft",
    truncated: Mapping[Limit, Truncated] | None = None,
    estimator: Estimator = group_advantages,
    penalty: Callable[[Trajectory], float] | None = None,
    step_rewards: StepRewards = "return",
) -> TreeCredit | None:
    """Credit of every node, or None if the group is too small to be normalized.

    Failed leaves and cancelled trees do not count. A truncated leaf counts with its return
    ("score"), with return 0 ("zero") or not at all ("mask"), by its limit; limits not in the
    mapping are scored. At least MIN_GROUP_FRACTION of group_size must remain. `penalty` is added to
    each return. With step_rewards "to_go" a turn is not credited with the rewards of earlier turns
    (`without_past`). `estimator` computes advantages from returns; those of equal returns, which
    are only rounding errors, become 0. Soft sharing gives a token each leaf's own advantage, hard
    sharing the mean over the leaves below it, with the same total weight (ARPO, Dong 2025, section
    3.2).
    """
    modes = truncated or {}
    done = (leaf for leaf in tree.leaves() if leaf.end != "failed")
    leaves = [leaf for leaf in done if _mode(leaf, modes) != "mask"]
    if not leaves or len(leaves) < MIN_GROUP_FRACTION * group_size or tree.is_cancelled:
        return None
    trajectories = [Trajectory(tree.history(leaf)) for leaf in leaves]
    returns = np.array(
        [0.0 if _mode(path.leaf, modes) == "zero" else path.reward for path in trajectories]
    )
    if penalty is not None:
        returns += [penalty(path) for path in trajectories]
    paths = [path.path for path in trajectories]
    advantages = advantages_of(estimator, returns)
    if are_equal(returns) and np.abs(advantages).max() <= EPSILON * max(1.0, abs(returns[0])):
        advantages = np.zeros_like(returns)
    if step_rewards == "return":
        return spread(tree, paths, returns, advantages, sharing)
    counts = np.array([_mode(path[-1], modes) != "zero" for path in paths], np.float64)
    of_turns = without_past(paths, counts, returns, advantages)
    return spread(tree, paths, returns, advantages, sharing, of_turns)


def without_past(
    paths: Sequence[Sequence[Node]], counts: Floats, returns: Floats, advantages: Floats
) -> list[Floats]:
    """Advantages of each turn of each path, from those of the whole paths.

        A_it = A_i - c (past_it - mean of past_jt over all paths j that have a turn t)

    past_it is the sum of the rewards of path i before turn t (0 for a leaf whose return counts as
    zero: its entry of `counts` is 0), and c = dA / dR the scale of the estimator. Rewards before a
    turn do not depend on its action, so the expected gradient is that of the whole return, with
    less variance (rewards to go, Sutton 1999, eq. 2). With rewards at the ends only, and in a group
    of equal returns, A_it = A_i exactly.
    """
    scale = 0.0 if are_equal(returns) else float(np.ptp(advantages) / np.ptp(returns))
    past = np.full((len(paths), max(map(len, paths))), np.nan)
    for number, path in enumerate(paths):
        before = np.cumsum([0.0, *(node.reward for node in path[:-1])])
        past[number, : len(path)] = before * counts[number]
    above = past - np.nanmean(past, axis=0)
    return [
        own - scale * row[: len(path)] if row[: len(path)].any() else np.full(len(path), own)
        for own, row, path in zip(advantages, above, paths, strict=True)
    ]


def spread(
    tree: TrajectoryTree,
    paths: Sequence[Sequence[Node]],
    returns: Floats,
    advantages: Floats,
    sharing: Sharing,
    of_turns: Sequence[Floats] | None = None,
) -> TreeCredit:
    """Credit of every node from the values of the counted leaves, the last nodes of `paths`.
    `of_turns` has an advantage for each node of each path, instead of one per path."""
    adv_pos, adv_neg, weight = np.zeros((3, len(tree.nodes)))
    leaf_figures = np.full((2, len(tree.nodes)), np.nan)
    for number, path in enumerate(paths):
        nodes = [node.index for node in path]
        credit = advantages[number] if of_turns is None else of_turns[number]
        adv_pos[nodes] += np.maximum(credit, 0.0)
        adv_neg[nodes] += np.minimum(credit, 0.0)
        weight[nodes] += 1.0
        leaf_figures[:, nodes[-1]] = returns[number], advantages[number]
    if sharing == "hard":
        total = adv_pos + adv_neg
        adv_pos, adv_neg = np.maximum(total, 0.0), np.minimum(total, 0.0)
    return TreeCredit(adv_pos, adv_neg, weight, *leaf_figures)


def _mode(leaf: Node, modes: Mapping[Limit, Truncated]) -> Truncated:
    if leaf.end != "truncated" or leaf.limit is None:
        return "score"
    return modes.get(leaf.limit, "score")
