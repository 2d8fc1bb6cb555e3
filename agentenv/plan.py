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

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal, Protocol

from agentenv.fork_criterion import (
    Criterion,
    relative_rise,
    rise_score,
    seen_rises,
    window_entropy,
)
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

    Differs from the paper: it prints dH as a sum over k divided by V, which leaves beta without
    influence; here dH is a mean over the tokens and divided by ln V, which with beta = 0.2 still
    leaves a coin toss. The criteria "zscore" and "relative" give dH a scale
    (`agentenv.fork_criterion`). The released code is another plan, `agentenv.reference_plan`.
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
    criterion: Criterion = "paper"
    rise_scale: float = 0.02

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
        """P; `node` holds the tool result, `entropies` are those of the tokens after it."""
        return clip_probability(self.base_probability + self.raise_of(tree, node, entropies))

    def raise_of(self, tree: TrajectoryTree, node: Node, entropies: Sequence[float]) -> float:
        """What the entropies add to the base probability."""
        after, before = self.entropy(entropies), self.entropy(tree.path(node)[1].entropies)
        rise = after - before
        if self.criterion == "relative":
            rise = relative_rise(after, before)
        if self.criterion == "zscore":
            seen = seen_rises(tree, self.fork_window, self.vocab_size)
            rise = rise_score(rise, seen, self.rise_scale)
        return self.entropy_weight * rise

    def entropy(self, entropies: Sequence[float]) -> float:
        """Mean over the window, divided by ln V; 0 for an empty turn."""
        return window_entropy(entropies, self.fork_window, self.vocab_size)


def clip_probability(probability: float) -> float:
    """The nearest probability in [0, 1]."""
    return min(1.0, max(0.0, probability))
