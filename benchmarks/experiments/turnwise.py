"""Forks anywhere, an arm of the study, and a credit of turns.

    [algorithm]
    name = "benchmarks.experiments.turnwise:Turnwise"

Published credits for trees differ in three parameters, which are keys here (`Turnwise`), and in the
plan: ARPO's, trajectories from scratch, or forks at any depth of ended paths. Does not load torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from agentenv.base.errors import ConfigError
from agentenv.base.tree import TrajectoryTree
from agentenv.contract.plan import Independent, RolloutPlan
from agentenv.learners.algorithms.arpo import ARPO, SharingKey
from agentenv.learners.algorithms.credit import Floats, TreeCredit, counted_leaves, parents
from agentenv.learners.algorithms.late_forks import Uniform

Value = Literal["leaves", "children", "softmax"]
PlanName = Annotated[
    Literal["arpo", "uniform", "rounds", "flat"],
    Meta(
        description="fork points: arpo, by entropy; uniform, any tool result of a finished path; "
        "rounds, the same after all paths have finished; flat, none"
    ),
]


class Turnwise(ARPO, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="turnwise"):
    """A credit of turns for trees; by default ARPO with hard sharing.

        A_n = [(V_n - mu) + local (V_n - V_parent)] / s,   w_n = d_n ** weight_exponent

    V_n is the mean return of the d_n counted leaves below turn n (`value` "leaves"), mu that of
    all, s their deviation. "children" takes the mean of the children's values instead, so that a
    branch with many leaves counts no more than one with few, "softmax" their mean weighted by
    softmax(H_c), H_c the mean entropy of the child's turn in nats.

        published as                                   local  weight_exponent  value
        ARPO, hard sharing (arXiv 2507.19849, 3.2)     0      1                leaves
        TreeRL (arXiv 2506.11902), up to n / (n - 1)   1      0.5              leaves
        TEMPO, of turns (arXiv 2509.18314)             1      1                leaves
        AT2PO's credit (arXiv 2601.04767)              0      1                softmax

    Weights below d bias the gradient toward the turns after forks, and gave no more signal per call
    in the toy of docs/algorithms.md. `local` above 4 is rejected: with eight leaves, the difference
    to the parent alone has almost no signal.

    plan_name = "uniform" begins `initial_rollouts` trajectories from scratch and forks ended paths
    at tool results that are drawn uniformly; "flat" has no forks.
    """

    sharing: SharingKey = "hard"
    plan_name: PlanName = "arpo"
    max_children: Annotated[
        int,
        Meta(
            ge=2,
            description="maximum number of turns after one tool result, with forks of finished "
            "paths",
        ),
    ] = 4
    local: Annotated[
        float,
        Meta(ge=0, le=4, description="weight of a turn's value relative to the previous turn's"),
    ] = 0.0
    weight_exponent: Annotated[
        float,
        Meta(ge=0, le=1, description="exponent e in the weight d ** e of a turn with d leaves"),
    ] = 1.0
    value: Annotated[
        Value, Meta(description="value of a turn: mean of its leaves, or of its children's values")
    ] = "leaves"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.compat != "none":
            raise ConfigError("algorithm.compat: turnwise has no released code; use 'none'")
        plain = self.local == 0 and self.value == "leaves"
        if self.sharing == "soft" and not plain:
            raise ConfigError(
                "algorithm.sharing: 'soft' keeps the advantages of leaves separate, which values "
                "of turns do not have; set 'hard', or local = 0 and value = 'leaves'"
            )
        if self.step_rewards == "to_go" and not plain:
            raise ConfigError(
                "algorithm.step_rewards: 'to_go' has a separate value for each turn; set local = 0 "
                "and value = 'leaves'"
            )

    @property
    def has_turn_advantages(self) -> bool:
        return True

    def plan(self, vocab_size: int) -> RolloutPlan:
        if self.plan_name == "flat":
            return Independent(self.group_size)
        if self.plan_name == "arpo":
            return super().plan(vocab_size)
        size, roots, most = self.group_size, self.num_initial, self.max_children
        return Uniform(size, roots, most, self.plan_name == "rounds")

    def credit(self, tree: TrajectoryTree) -> TreeCredit | None:
        group = super().credit(tree)
        if group is None:
            return None
        count = np.maximum(group.weight, 1.0)
        total = group.adv_pos + group.adv_neg
        if self.value != "leaves":
            total = count * self._values(tree, group)
        if self.local:
            total = total + self.local * (total - count * (total / count)[parents(tree)])
        if self.local or self.value != "leaves":
            total = np.where(group.weight > 0, total, 0.0)
            group = _with(group, np.maximum(total, 0.0), np.minimum(total, 0.0))
        scale = np.where(group.weight > 0, count ** (self.weight_exponent - 1.0), 0.0)
        return TreeCredit(
            group.adv_pos * scale,
            group.adv_neg * scale,
            group.weight * scale,
            group.returns,
            group.advantages,
        )

    def _values(self, tree: TrajectoryTree, group: TreeCredit) -> Floats:
        """The value of each node from those of its counted children, as advantages."""
        values = np.zeros(len(tree.nodes))
        weights = np.zeros(len(tree.nodes))
        for leaf in counted_leaves(tree, group):
            values[leaf.index], weights[leaf.index] = group.advantages[leaf.index], 1.0
        above = parents(tree)
        for node in reversed(tree.nodes[1:]):  # children come after their parents
            if group.weight[node.index] == 0:
                continue
            values[node.index] /= weights[node.index]
            share = 1.0
            if self.value == "softmax":
                entropies = np.asarray(node.entropies, np.float64)
                known = entropies[~np.isnan(entropies)]
                share = float(np.exp(known.mean())) if len(known) else 1.0
            values[above[node.index]] += share * values[node.index]
            weights[above[node.index]] += share
        values[0] /= max(weights[0], 1e-12)
        return values


def _with(group: TreeCredit, adv_pos: Floats, adv_neg: Floats) -> TreeCredit:
    return TreeCredit(adv_pos, adv_neg, group.weight, group.returns, group.advantages)
