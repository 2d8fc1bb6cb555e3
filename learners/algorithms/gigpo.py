"""GiGPO: compares turns from the same state, across roots. Does not load torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable
from typing import Annotated, Any, Literal

import numpy as np

from agentenv.base.config import about
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.learners.algorithms.credit import Floats, TreeCredit, parents
from agentenv.learners.algorithms.late_forks import LateForks, LatePlan

STATE = "state_key"  # in the info of a step or reset: the state before the next turn


class GiGPO(LateForks, frozen=True, kw_only=True, tag="gigpo"):
    """Group-in-group policy optimization (Feng 2025, arXiv 2505.10978, eq. 6 to 8).

        A_n = (V_n - mu) / s + state_weight m / (m + evidence) (Q_n - mean of Q over G) / F

    Q_n is the mean over the leaves below turn n of the discounted rewards from n on,
    sum gamma^(k - t) reward_k; G are the m turns of the question that begin in the same state, of
    at least two branches; F is 1, or the deviation of Q in G (`state_scale`). The state of a turn
    is `info["state_key"]` of the step before it, where the environment gives one, else the tokens
    of that observation. `evidence` shrinks the comparisons of few turns; 0 is the paper's.
    """

    plan_name: LatePlan = "flat"
    state_weight: Annotated[float, about("weight of the comparison (omega)", ge=0)] = 1.0
    discount: Annotated[float, about("discount of a turn's later rewards", gt=0, le=1)] = 0.95
    state_scale: Annotated[
        Literal["none", "std"], about("divisor of differences within a state")
    ] = "none"
    evidence: Annotated[
        float,
        about(
            "number of turns at which a comparison has half its weight; 0: always full weight", ge=0
        ),
    ] = 2.0

    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        group = super().credit(tree)
        if group is None:
            return None
        weight = np.maximum(group.weight, 1e-12)
        total = (group.adv_pos + group.adv_neg) / weight + self.state_weight * self._within(
            tree, group
        )
        total = np.where(group.weight > 0, total * group.weight, 0.0)
        figures = (np.maximum(total, 0.0), np.minimum(total, 0.0), group.weight)
        return TreeCredit(*figures, group.returns, group.advantages)

    def _within(self, tree: TrajectoryTree, group: TreeCredit) -> Floats:
        """Of each turn, over the turns from the same state."""
        values, found = self._discounted(tree, group), np.zeros(len(tree.nodes))
        above = parents(tree)
        states: defaultdict[Hashable, list[int]] = defaultdict(list)
        for node in tree.nodes:
            if len(node.action_ids) and group.weight[node.index] > 0:
                states[_state(tree.nodes[above[node.index]])].append(node.index)
        for turns in states.values():
            if len({tree.nodes[one].branch for one in turns}) < 2:
                continue
            apart = values[turns] - values[turns].mean()
            if self.state_scale == "std":
                apart = apart / (values[turns].std(ddof=1) + 1e-6)
            found[turns] = apart * len(turns) / (len(turns) + self.evidence)
        return found

    def _discounted(self, tree: TrajectoryTree, group: TreeCredit) -> Floats:
        """Q of each turn: its own reward, then those of the counted children, by their leaves."""
        values, leaves = np.zeros((2, len(tree.nodes)))
        above = parents(tree)
        for node in reversed(tree.nodes):
            if not np.isnan(group.advantages[node.index]):
                leaves[node.index] = 1.0
            if leaves[node.index]:
                later = values[node.index] / leaves[node.index]
                values[node.index] = node.reward + self.discount * later
                if node.index:
                    values[above[node.index]] += leaves[node.index] * values[node.index]
                    leaves[above[node.index]] += leaves[node.index]
        return values


def _state(before: Node) -> tuple[Any, ...]:
    key = before.info.get(STATE)
    return (key,) if key is not None else tuple(before.observation_ids)
