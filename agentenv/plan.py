"""Rollout plans: how many trajectories of a task start from scratch, and where they fork.

A plan is the torch-free half of an algorithm. It is asked on events and answers at once with how
many trajectories to start now; there is no barrier. It keeps no state: all it needs to know is
on the tree, so one plan serves all trees of a run.

    on_start        -> from-scratch trajectories to begin with
    on_fork_point   -> siblings to start at a tool result, once the tokens after it are known
    on_leaf_end     -> from-scratch trajectories to add (the rest of the budget, refills)

Entropies are means over the first `fork_window` tokens of a turn, divided by ln V, so that they
lie in [0, 1] for a vocabulary of V tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Literal, Protocol

from agentenv.tree import Node, TrajectoryTree


class RolloutPlan(Protocol):
    """What the actor asks. `group_size` trajectories are wanted per task; `fork_window` is the
    number of tokens after a tool result that `on_fork_point` wants to see, 0 for never."""

    @property
    def group_size(self) -> int: ...
    @property
    def fork_window(self) -> int: ...

    def on_start(self, tree: TrajectoryTree) -> int: ...

    def on_fork_point(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float], rng: Random
    ) -> int:
        """`node` holds the tool result; `entropies` are those of the first tokens after it."""
        ...

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int:
        """Called after `leaf` ended; `tree.num_live` no longer counts it."""
        ...


@dataclass(frozen=True)
class Independent:
    """`group_size` from-scratch trajectories and no forks: GRPO, and every evaluation."""

    group_size: int
    fork_window: int = 0

    def on_start(self, tree: TrajectoryTree) -> int:
        return self.group_size

    def on_fork_point(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float], rng: Random
    ) -> int:
        return 0

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class ARPOPlan:
    """Fork where the policy became uncertain after a tool result (ARPO, arXiv 2507.19849, 3.1).

    dH = H(first k tokens after the tool result) - H(first k tokens of the from-scratch turn)
    P  = clip(alpha + beta * dH, 0, 1)

    mode "sample": each of `beam_size - 1` siblings starts with probability P; mode "threshold",
    the paper's text: all of them start if P > tau. Forks share the first turn of their root, so
    they inherit its baseline. What is left of the budget when nothing is growing any more starts
    from scratch, all at once.
    """

    group_size: int
    initial_rollouts: int
    vocab_size: int
    beam_size: int = 2
    base_probability: float = 0.5
    entropy_weight: float = 0.2
    mode: Literal["sample", "threshold"] = "sample"
    threshold: float = 0.5
    fork_window: int = 20

    def on_start(self, tree: TrajectoryTree) -> int:
        return min(self.initial_rollouts, self.group_size)

    def on_fork_point(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float], rng: Random
    ) -> int:
        budget = min(self.beam_size - 1, self.fork_budget(tree))
        if budget <= 0:
            return 0
        probability = self.fork_probability(tree, node, entropies)
        if self.mode == "threshold":
            return budget if probability > self.threshold else 0
        return sum(rng.random() < probability for _ in range(budget))

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int:
        return 0 if tree.num_live else self.group_size - tree.num_started

    def fork_budget(self, tree: TrajectoryTree) -> int:
        return self.group_size - tree.num_started

    def fork_probability(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float]
    ) -> float:
        rise = self.entropy(entropies) - self.entropy(tree.path(node)[1].entropies)
        return _clip(self.base_probability + self.entropy_weight * rise)

    def entropy(self, entropies: Sequence[float]) -> float:
        """Mean over the window, divided by ln V; 0 for an empty turn."""
        window = entropies[: self.fork_window]
        return fmean(window) / math.log(self.vocab_size) if window else 0.0


@dataclass(frozen=True, kw_only=True)
class AEPOPlan(ARPOPlan):
    """ARPO with a pre-monitored budget split and a damped fork probability (AEPO, 2510.14545).

    Split: the first from-scratch trajectory is the probe, and it is kept. When it ends,
        m = round(k * sigmoid(budget_beta * (H_root - mean H_tool)))
    of the k = group_size trajectories are to start from scratch, the probe among them, and the
    other m - 1 start at once; while it grows, its forks draw on the configured split. A probe
    without a tool turn leaves the configured split.

    Penalty: P = clip((alpha + beta * dH) * max(0, 1 - branch_penalty * l), 0, 1), where l is the
    number of consecutive fork points, ending before this one, at which this path forked.
    """

    budget_beta: float = 10.0
    branch_penalty: float = 0.1

    def on_start(self, tree: TrajectoryTree) -> int:
        return 1

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int:
        roots = 0
        if tree.num_roots == 1 and is_root_branch(leaf):
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
            gap = self.entropy(turns[0].entropies) - fmean(after_tools)
            wanted = math.floor(self.group_size * _sigmoid(self.budget_beta * gap) + 0.5)
        num_forks = tree.num_started - 1
        return max(1, min(wanted, self.group_size - num_forks))

    def fork_budget(self, tree: TrajectoryTree) -> int:
        if probing(tree):
            return self.group_size - self.initial_rollouts - (tree.num_started - 1)
        return super().fork_budget(tree)

    def fork_probability(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float]
    ) -> float:
        rise = self.entropy(entropies) - self.entropy(tree.path(node)[1].entropies)
        damping = max(0.0, 1.0 - self.branch_penalty * consecutive_forks(tree, node))
        return _clip((self.base_probability + self.entropy_weight * rise) * damping)


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


def _clip(probability: float) -> float:
    return min(1.0, max(0.0, probability))


def _sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x)) if x >= 0 else math.exp(x) / (1.0 + math.exp(x))
