"""Rollout plans: how many trajectories of a task start from scratch, and where they fork.

A plan is the torch-free half of an algorithm; those of ARPO and AEPO stand in the files of the
algorithms. A plan is asked on events and answers at once with how many trajectories to start now;
there is no barrier. A plan keeps no state: all it needs to know is on the tree, so one plan serves
all trees of a run.

    on_start        -> from-scratch trajectories to begin with
    on_fork_point   -> siblings to start at a tool result, once the tokens after it are known
    on_leaf_end     -> from-scratch trajectories to add (the rest of the budget)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

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
        """`node` holds the tool result; `entropies` (nats) are those of the first tokens after."""
        ...

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int:
        """Called after `leaf` ended, or failed and is not replaced; `tree.num_live` no longer
        counts it."""
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
