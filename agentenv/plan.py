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

# When is the policy uncertain after a tool result? Three answers, as pure functions of the tree.
#
# Entropies are means over the first `window` tokens of a turn, divided by ln V, in [0, 1].
#
#     rise      dH = H(after the tool result) - H(first turn of the root)
#     paper     P = alpha + beta * dH                                (ARPO, arXiv 2507.19849, 3.1)
#     zscore    P = alpha + beta * clip((dH - m) / s, -3, 3)
#     relative  P = alpha + beta * (H after - H first) / (H after + H first)
#
# With the paper's beta of 0.2 "paper" is a coin toss: on the quick start one standard deviation of
# dH moves P = 0.5 by 0.001 to 0.003. The other two have a scale of their own, also when entropies
# fall during training. "zscore" measures a rise against the rises seen before on the same tree: m
# is their mean and s their spread, drawn towards `rise_scale` as if PRIOR_COUNT such rises had been
# seen; before any was seen P = alpha. "relative" needs no others and lies within +-1.
# Nothing is kept outside the tree, so decisions depend on nothing else.
#
# Whether a rise says anything about what a fork is worth depends on the window: it has to reach the
# tokens in which the turn is decided, and those behind a fixed phrase at its start are not among
# the first few. docs/experiments.md has the evidence.

Criterion = Literal["paper", "zscore", "relative"]

PRIOR_COUNT = 2.0
MAX_SCORE = 3.0


def window_entropy(entropies: Sequence[float], window: int, vocab_size: int) -> float:
    """Mean over the first `window` tokens (nats), divided by ln V; 0 for an empty turn."""
    first = entropies[:window]
    return fmean(first) / math.log(vocab_size) if first else 0.0


def seen_rises(tree: TrajectoryTree, window: int, vocab_size: int) -> list[float]:
    """Rises at the fork points of the tree whose next turn has ended, in order of the turns.

    One per fork point, from the first turn that followed it, over the first turn of its root.
    """
    rises, seen = [], set()
    bases = [0.0]  # by node: entropy of the first turn of its root, which forks inherit
    for node in tree.nodes[1:]:
        above = tree.nodes[node.parent or 0]
        first_turn = above.parent is None
        asked = above.num_forks is not None and above.index not in seen and bool(node.entropies)
        entropy = 0.0
        if first_turn or asked:
            entropy = window_entropy(node.entropies, window, vocab_size)
        bases.append(entropy if first_turn else bases[above.index])
        if asked:
            seen.add(above.index)
            rises.append(entropy - bases[above.index])
    return rises


def rise_score(rise: float, seen: Sequence[float], rise_scale: float) -> float:
    """(rise - m) / s, within +-3; 0 before any rise was seen.

    m = mean(seen), s^2 = (2 rise_scale^2 + sum (r - m)^2) / (n + 2).
    """
    if not seen:
        return 0.0
    mean = fmean(seen)
    squares = math.fsum((value - mean) ** 2 for value in seen)
    scale = math.sqrt((PRIOR_COUNT * rise_scale**2 + squares) / (len(seen) + PRIOR_COUNT))
    return min(MAX_SCORE, max(-MAX_SCORE, (rise - mean) / scale))


def relative_rise(after: float, before: float) -> float:
    """(after - before) / (after + before) of two entropies, in [-1, 1]; 0 if both are 0."""
    total = after + before
    return (after - before) / total if total > 0 else 0.0


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
    (`agentenv.plan`). The released code is another plan, `agentenv.reference_plan`.
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
