"""AEPO: ARPO with a balanced budget, a penalty on runs of forks, and an entropy-aware update.

The whole algorithm is here: keys (`AEPO`), the plan of the rollout (`AEPOPlan`), and AEPO's parts
of the loss (`token_loss`, `advantage_scale`). Does not load torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from agentenv.base.config import about
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.contract.plan import RolloutPlan
from agentenv.learners.algorithms.arpo import ARPO, ARPOPlan, clip_probability

if TYPE_CHECKING:
    from torch import Tensor

    from agentenv.learners.algorithms.losses import LossBatch


class AEPO(ARPO, frozen=True, kw_only=True, tag="aepo"):
    """Agentic entropy-balanced policy optimization (Dong 2025, arXiv 2510.14545).

    Four parts, each with its own switch; without all four this is ARPO:

        budget_split               m = k sigmoid(budget_beta (H_root - H_tool)) of k trajectories
                                   start from scratch (`num_roots_of`)
        branch_penalty             P = (alpha + beta dH) max(0, 1 - branch_penalty l), l = forks
                                   in a row on this path (`penalty_factor`)
        entropy_balanced_clipping  gradient -A (1 + clip_high) in place of 0 where
                                   r > 1 + clip_high and A > 0 (`losses.entropy_balanced_loss`)
        entropy_advantage          A' = A (1 + a z(H)) (`losses.entropy_multiplier`)

    On the quick start, the four together have no measurable effect compared to ARPO: the split
    stays at half of the group, and few tokens are clipped from above (docs/experiments.md).

    Differs from the paper: dual clip (inf switches it off); z over all tokens of the mini-batch,
    those of groups of equal returns included (queue.equal_groups), from entropies of the old
    policy, so that z depends neither on micro-batches nor on the step; the multiplier is clamped to
    [0, 2], so that no advantage changes its sign; missing entropies are an error. compat =
    "reference" is the released code, `agentenv.reference.algorithms`: z over the micro-batch, from
    current entropies, not clamped; its own forks and split (its scripts have budget_split = false).
    """

    budget_split: Annotated[
        bool, about("split the budget between roots and forks by the entropies of a probe")
    ] = True
    budget_beta: Annotated[
        Annotated[float, Meta(ge=0)] | None,
        about("sharpness of that split (beta); default 10, in compat 0.5"),
    ] = None
    branch_penalty: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        about(
            "fork probability lost per fork in a row on a path; 0 is off, default 0.1, "
            "in compat 0.05"
        ),
    ] = None
    entropy_balanced_clipping: Annotated[
        bool, about("keep the gradient of tokens clipped from above")
    ] = True
    entropy_advantage: Annotated[
        float, about("weight of a token's entropy in its advantage (a); 0 is off", ge=0)
    ] = 0.2

    default_beta: ClassVar[float] = 10.0
    default_penalty: ClassVar[float] = 0.1

    @property
    def needs_entropies(self) -> bool:
        return self.entropy_advantage > 0

    @property
    def beta_of_split(self) -> float:
        """`budget_beta` or its default."""
        return self.default_beta if self.budget_beta is None else self.budget_beta

    @property
    def penalty_per_fork(self) -> float:
        """`branch_penalty` or its default."""
        return self.default_penalty if self.branch_penalty is None else self.branch_penalty

    def plan(self, vocab_size: int) -> RolloutPlan:
        return AEPOPlan(self, vocab_size)

    def token_loss(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        from agentenv.learners.algorithms.losses import entropy_balanced_loss

        if not self.entropy_balanced_clipping:
            return super().token_loss(ratio, advantages)
        return entropy_balanced_loss(
            ratio, advantages, self.clip_low, self.clip_high, self.dual_clip
        )

    def advantage_scale(self, batch: LossBatch, entropies: Tensor) -> Tensor | float:
        from agentenv.learners.algorithms.losses import entropy_multiplier

        if self.entropy_advantage == 0:
            return 1.0
        return entropy_multiplier(
            batch.entropies, batch.entropy_mean, batch.entropy_std, self.entropy_advantage
        )


@dataclass(frozen=True)
class AEPOPlan(ARPOPlan):
    """ARPO with entropy pre-monitoring and a branch penalty (AEPO, arXiv 2510.14545, 3.1).

    Pre-monitoring (`budget_split`): the first from-scratch trajectory is the probe, and the probe
    is kept. When it ends, m = `num_roots_of` of the k = group_size trajectories are to start from
    scratch, the probe among them, and the other m - 1 start at once; while it grows, its forks
    draw on the configured split. A probe without a tool turn leaves the configured split.

    Penalty: P = clip((alpha + beta * dH) * `penalty_factor`, 0, 1).

    Differs from the paper: entropies are means over the window in place of sums, hence the larger
    budget_beta; the probe is one of the trajectories and no extra one.
    """

    rules: AEPO

    def on_start(self, tree: TrajectoryTree) -> int:
        return 1 if self.rules.budget_split else super().on_start(tree)

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int:
        roots = 0
        if self.rules.budget_split and is_probe(tree, leaf):
            roots = max(0, self.num_roots(tree, leaf) - tree.num_roots)
        return roots or super().on_leaf_end(tree, leaf)

    def num_roots(self, tree: TrajectoryTree, probe: Node) -> int:
        """m, from the probe that ended at leaf `probe`; at most the budget that its forks leave."""
        turns = tree.history(probe)[1:]
        after_tools = [
            self.entropy(turn.entropies)
            for turn, before in zip(turns[1:], turns, strict=False)
            if before.observation_ids and turn.entropies
        ]
        wanted = self.rules.num_initial
        if after_tools:
            root = self.entropy(turns[0].entropies)
            wanted = num_roots_of(self.group_size, self.rules.beta_of_split, root, after_tools)
        num_forks = tree.num_started - tree.num_roots
        return max(1, min(wanted, self.group_size - num_forks))

    def fork_budget(self, tree: TrajectoryTree) -> int:
        if self.rules.budget_split and probing(tree):
            return self.group_size - self.rules.num_initial - (tree.num_started - tree.num_roots)
        return super().fork_budget(tree)

    def fork_probability(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float]
    ) -> float:
        probability = self.rules.base_probability + self.rise_term(tree, node, entropies)
        run = consecutive_forks(tree, node)
        return clip_probability(probability * penalty_factor(self.rules.penalty_per_fork, run))


def num_roots_of(group_size: int, beta: float, root: float, after_tools: Sequence[float]) -> int:
    """Entropy pre-monitoring: m = round(k * sigmoid(beta * (H_root - mean H_tool))), half up,
    within [1, k]. More uncertainty at the question than after its tools gives more roots."""
    share = sigmoid(beta * (root - fmean(after_tools)))
    return max(1, min(group_size, math.floor(group_size * share + 0.5)))


def penalty_factor(penalty: float, run: int) -> float:
    """max(0, 1 - penalty * l), l = forks in a row on this path before the decision."""
    return max(0.0, 1.0 - penalty * run)


def probing(tree: TrajectoryTree) -> bool:
    """True while the first from-scratch trajectory that has not failed still grows."""
    return not any(is_probe(tree, leaf) for leaf in tree.leaves())


def is_probe(tree: TrajectoryTree, leaf: Node) -> bool:
    """True for the end of the first from-scratch trajectory that has not failed. Others may have
    begun in addition, to replace failed forks."""
    if leaf.end == "failed" or "+" in leaf.branch:  # of a fork
        return False
    failed = {node.branch for node in tree.failures()}
    return all(str(number) in failed for number in range(int(leaf.branch)))


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
