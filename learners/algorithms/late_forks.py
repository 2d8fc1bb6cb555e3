"""Late forks: trajectories that begin at tool results of paths which have ended. No torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Annotated, Literal

from agentenv.base.config import about
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.contract.plan import Independent, Place, RolloutPlan
from agentenv.learners.algorithms.algorithm import Clipped, NormalizeByStd
from agentenv.learners.algorithms.arpo import InitialRollouts

LatePlan = Annotated[
    Literal["rounds", "uniform", "flat"],
    about(
        "rounds: as many forks as roots, at any tool results of finished paths, when "
        "all paths have finished; uniform: one fork after each finished path; flat: no forks"
    ),
]


class LateForks(Clipped, frozen=True, kw_only=True):
    """Base of algorithms whose trajectories may fork late, and whose turns have advantages of
    their own."""

    normalize_by_std: NormalizeByStd = True
    plan_name: LatePlan = "rounds"
    initial_rollouts: InitialRollouts = None

    @property
    def has_turn_advantages(self) -> bool:
        return True

    def plan(self, vocab_size: int) -> RolloutPlan:
        if self.plan_name == "flat":
            return Independent(self.group_size)
        num_roots = self.initial_rollouts or max(1, self.group_size // 2)
        at_once = self.plan_name == "rounds"
        return Uniform(self.group_size, num_roots, at_once=at_once)


@dataclass(frozen=True)
class Uniform:
    """`num_roots` trajectories from scratch; then forks at tool results of paths that have ended,
    drawn uniformly, those of forks included, until there are `group_size` trajectories.

    In a toy whose mistakes can be corrected, few roots with forks at any depth give more signal per
    call of the policy than many roots; if one mistake is fatal, they do not (docs/algorithms.md).
    With `at_once`, the forks of a round, as many as `num_roots`, begin when no branch is growing
    (Ji 2025, arXiv 2509.21240, section 3.2); otherwise one fork follows each end. A node has at
    most `max_children` children; if no node has room, a trajectory begins from scratch.
    """

    group_size: int
    num_roots: int
    max_children: int = 4
    at_once: bool = False
    fork_window: int = 0

    def on_start(self, tree: TrajectoryTree) -> int:
        return min(self.num_roots, self.group_size)

    def on_fork_point(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float], rng: Random
    ) -> int:
        return 0

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> Sequence[Place]:
        left = self.group_size - tree.num_started
        if left <= 0 or (self.at_once and tree.num_live):
            return []
        rng = Random(f"{tree.index}/{tree.task.id}/{tree.num_started}")
        number = min(left, self.num_roots if self.at_once else 1)
        room = self.room(tree)
        drawn: Counter[int] = Counter()
        for _ in range(number):
            free = [index for index, most in room.items() if drawn[index] < most]
            drawn[rng.choice(free) if free else 0] += 1
        return [(tree.nodes[index], count) for index, count in drawn.items()]

    def room(self, tree: TrajectoryTree) -> dict[int, int]:
        """By index of the tool results on ended paths that did not fail, the number of children
        that they may still have."""
        found = {node.index: node for path in tree.trajectories() for node in path.turns}
        return {
            index: self.max_children - 1 - (node.num_forks or 0)  # 1: its own next turn
            for index, node in found.items()
            if node.end is None and len(node.observation_ids)
        }
