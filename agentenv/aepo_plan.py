"""AEPO's rollout: a pre-monitored budget split and a damped fork probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from agentenv.plan import ARPOPlan, clip_probability
from agentenv.tree import Node, TrajectoryTree


@dataclass(frozen=True, kw_only=True)
class AEPOPlan(ARPOPlan):
    """ARPO with entropy pre-monitoring and a branch penalty (AEPO, arXiv 2510.14545, 3.1).

    Pre-monitoring (`split`): the first from-scratch trajectory is the probe, and it is kept. When
    it ends, m = `num_roots_of` of the k = group_size trajectories are to start from scratch, the
    probe among them, and the other m - 1 start at once; while it grows, its forks draw on the
    configured split. A probe without a tool turn leaves the configured split.

    Penalty: P = clip((alpha + beta * dH) * `penalty_factor`, 0, 1).

    Differs from the paper: entropies are means over the window in place of sums, hence the larger
    budget_beta; the probe is one of the trajectories and no extra one.
    """

    split: bool = True
    budget_beta: float = 10.0
    branch_penalty: float = 0.1

    def on_start(self, tree: TrajectoryTree) -> int:
        return 1 if self.split else super().on_start(tree)

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int:
        roots = 0
        if self.split and tree.num_roots == 1 and is_root_branch(leaf):
            roots = self.num_roots(tree, leaf) - 1
        return roots or super().on_leaf_end(tree, leaf)

    def num_roots(self, tree: TrajectoryTree, probe: Node) -> int:
        """m, from the probe that ended at leaf `probe`; at most what its forks have left."""
        turns = tree.path(probe)[1:]
        after_tools = [
            self.entropy(turn.entropies)
            for turn, before in zip(turns[1:], turns, strict=False)
            if before.observation_ids and turn.entropies
        ]
        wanted = self.initial_rollouts
        if after_tools:
            root = self.entropy(turns[0].entropies)
            wanted = num_roots_of(self.group_size, self.budget_beta, root, after_tools)
        num_forks = tree.num_started - 1
        return max(1, min(wanted, self.group_size - num_forks))

    def fork_budget(self, tree: TrajectoryTree) -> int:
        if self.split and probing(tree):
            return self.group_size - self.initial_rollouts - (tree.num_started - 1)
        return super().fork_budget(tree)

    def fork_probability(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float]
    ) -> float:
        probability = self.base_probability + self.raise_of(tree, node, entropies)
        run = consecutive_forks(tree, node)
        return clip_probability(probability * penalty_factor(self.branch_penalty, run))


def num_roots_of(group_size: int, beta: float, root: float, after_tools: Sequence[float]) -> int:
    """Entropy pre-monitoring: m = round(k * sigmoid(beta * (H_root - mean H_tool))), half up,
    within [1, k]. More uncertainty at the question than after its tools asks for more roots."""
    share = sigmoid(beta * (root - fmean(after_tools)))
    return max(1, min(group_size, math.floor(group_size * share + 0.5)))


def penalty_factor(penalty: float, run: int) -> float:
    """max(0, 1 - penalty * l), l = forks in a row on this path before the decision."""
    return max(0.0, 1.0 - penalty * run)


def probing(tree: TrajectoryTree) -> bool:
    """True while the first from-scratch trajectory is the only one and still grows."""
    return tree.num_roots <= 1 and not any(
        leaf.end != "failed" and is_root_branch(leaf) for leaf in tree.leaves()
    )


def is_root_branch(node: Node) -> bool:
    """True if the node was grown by a from-scratch trajectory, not by a fork."""
    return "+" not in node.branch


def consecutive_forks(tree: TrajectoryTree, node: Node) -> int:
    """Fork points above `node`, the nearest first, at which this path forked without a break."""
    count = 0
    for above in reversed(tree.path(node)[:-1]):
        if above.num_forks == 0:
            break
        count += above.num_forks is not None
    return count


def sigmoid(x: float) -> float:
    """1 / (1 + exp(-x)) without overflow."""
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
