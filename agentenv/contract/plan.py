"""Rollout plans: the number of root trajectories of a task, and their fork points.

A plan is the torch-free half of an algorithm, and is in the file of its algorithm. Its methods are
called on events and return the number of trajectories to start now; there is no barrier. A plan is
stateless: its inputs are on the tree, so one plan serves all trees of a run. `on_start` may store
more of them in `tree.root.info`, which the journal keeps.

    on_start        -> from-scratch trajectories to begin with
    on_fork_point   -> siblings to start at a tool result, once the tokens after it are known
    on_leaf_end     -> from-scratch trajectories to add (the rest of the budget), or siblings at
                       any earlier tool result, restored by a replay in a fresh environment
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from agentenv.base.tree import Node, TrajectoryTree

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

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int | Sequence[Place]:
        """Called after `leaf` ended, or failed and is not replaced; `tree.num_live` no longer
        counts it. A number of from-scratch trajectories, or pairs of a node that holds a tool
        result (or the root) and the number of siblings that continue from there."""


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
