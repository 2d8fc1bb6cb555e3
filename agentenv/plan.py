"""Rollout plans: the number of root trajectories of a task, and their fork points.

A plan is the torch-free half of an algorithm; those of ARPO and AEPO are in the files of the
algorithms. Its methods are called on events and return the number of trajectories to start now;
there is no barrier. A plan is stateless: its inputs are on the tree, so one plan serves all trees
of a run.

    on_start        -> from-scratch trajectories to begin with
    on_fork_point   -> siblings to start at a tool result, once the tokens after it are known
    on_leaf_end     -> from-scratch trajectories to add (the rest of the budget), or siblings at
                       any earlier tool result, restored by a replay in a fresh environment
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from agentenv.forecast import Places
from agentenv.tree import Node, TrajectoryTree

Place = tuple[Node, int]


class RolloutPlan(Protocol):
    """The interface of plans for the actor. `group_size` is the number of trajectories per task;
    `fork_window` is the number of tokens after a tool result that `on_fork_point` needs, 0 if it is
    never called.
    """

    @property
    def group_size(self) -> int: ...
    @property
    def fork_window(self) -> int: ...

    def on_start(self, tree: TrajectoryTree) -> int: ...

    def on_fork_point(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float], rng: Random
    ) -> int:
        """`node` holds the tool result; `entropies` (nats) are those of the first tokens after."""
        ...

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int | Sequence[Place]:
        """Called after `leaf` ended, or failed and is not replaced; `tree.num_live` no longer
        counts it. A number of from-scratch trajectories, or pairs of a node that holds a tool
        result (or the root) and the number of siblings that continue from there."""
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


@dataclass(frozen=True)
class _Late:
    """Base of plans that begin with `num_roots` trajectories from scratch and fork late, after
    paths have ended. A node has `max_children` at most, `keep_forks` is the number of copies of
    environments that a tree keeps for late forks."""

    group_size: int
    num_roots: int
    max_children: int = 4
    fork_window: int = field(default=0, kw_only=True)
    keep_forks: int = field(default=0, kw_only=True)

    def on_start(self, tree: TrajectoryTree) -> int:
        return min(self.num_roots, self.group_size)

    def on_fork_point(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float], rng: Random
    ) -> int:
        return 0


@dataclass(frozen=True)
class Uniform(_Late):
    """`num_roots` trajectories from scratch; then forks at tool results of paths that have ended,
    drawn uniformly, those of forks included, until there are `group_size` trajectories.

    If mistakes can be corrected, few roots with forks at any depth give more signal per call than
    many roots; if one mistake is fatal, forks give none (docs/algorithms.md). With `at_once`, the
    forks of a round, as many as `num_roots`, begin when no branch is growing (Ji 2025, arXiv
    2509.21240, section 3.2); otherwise one fork follows each end. A node has at most `max_children`
    children; if no node has room, a trajectory begins from scratch.
    """

    at_once: bool = False

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> Sequence[Place]:
        left = self.group_size - tree.num_started
        if left <= 0 or (self.at_once and tree.num_live):
            return []
        rng = Random(f"{tree.index}/{tree.task.id}/{tree.num_started}")
        number = min(left, self.num_roots if self.at_once else 1)
        room = {node.index: self.max_children - _num_children(node) for node in _places(tree)}
        drawn: Counter[int] = Counter()
        for _ in range(number):
            free = [index for index, most in room.items() if drawn[index] < most]
            drawn[rng.choice(free) if free else 0] += 1
        return [(tree.nodes[index], count) for index, count in drawn.items()]


@dataclass(frozen=True)
class Spread(_Late):
    """`num_roots` trajectories from scratch; then, at each end, one more where a call is likely to
    teach most, until there are `group_size`: at the tool result of a path that has ended, or from
    scratch, with the highest

        score(c) = p (1 - p) / (1 + d) / (turns after c + led_cost * turns before c)

    p is the estimated success after c: the mean of the d returns below c (each 1 if it is above the
    middle of the lowest and highest return of the tree, else 0) and of `prior_weight` times the p
    of the previous turn, 0.5 at the root. Prefixes after which all succeed or all fail lose their
    budget, and a value that many leaves support gains less from one more. A share `explore` is
    drawn uniformly. `led_cost` is the cost of a replayed turn on the way to c, relative to a turn
    of the policy.

    The idea is that of TRACE (arXiv 2606.11119), which spends rollouts where outcomes are mixed;
    the score is this project's. With `learns`, p and the turns after c come from the forecast of
    the tree (agentenv/forecast.py), which was stored on it at its start, so that the plan remains
    stateless. A tree without a forecast is scored as above.
    """

    led_cost: float = 1.0
    prior_weight: float = 3.0
    explore: float = 0.1
    learns: bool = False

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> Sequence[Place]:
        if tree.num_started >= self.group_size:
            return []
        rng = Random(f"{tree.index}/{tree.task.id}/{tree.num_started}")
        free = [one for one in _places(tree) if _num_children(one) < self.max_children]
        places = [tree.root, *free]
        if rng.random() < self.explore:
            return [(rng.choice(places), 1)]
        scores = self.scores(tree)
        best = max(scores[one.index] for one in places)
        return [(rng.choice([one for one in places if scores[one.index] >= best - 1e-12]), 1)]

    def scores(self, tree: TrajectoryTree) -> dict[int, float]:
        """The scores by node index, for nodes on ended paths that did not fail, and the root."""
        places = Places(tree)
        found = dict[int, float]()
        for index, p in places.chances(self.prior_weight).items():
            one = places.of[index]
            calls = places.calls_after(index) + self.led_cost * one.depth
            found[index] = p * (1 - p) / (1 + one.num) / max(calls, 1)
        return found


def learns(plan: RolloutPlan) -> bool:
    """Whether trees of this plan need a forecast at their start."""
    return isinstance(plan, Spread) and plan.learns


def _places(tree: TrajectoryTree) -> list[Node]:
    """The tool results on ended paths that did not fail."""
    found = {node.index: node for path in tree.trajectories() for node in path.turns}
    return [one for one in found.values() if one.end is None and len(one.observation_ids)]


def _num_children(node: Node) -> int:
    """The children that have begun: its own next turn, and the forks."""
    return 1 + (node.num_forks or 0)
