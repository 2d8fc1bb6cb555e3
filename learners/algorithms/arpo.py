"""ARPO: trajectories fork after tool results whose entropy rose, and share credit above a fork.

This file has ARPO's own parts: keys (`ARPO`), the fork criterion, which AEPO shares, and the plan
of the rollout (`ARPOPlan`). Credit and loss are those of every algorithm with a clipped ratio
(`credit` and `loss` in learners/algorithms/algorithm.py, `ppo_loss` in
learners/algorithms/losses.py), with the settings in the docstring of `ARPO`. Does not load torch.

Two criteria of the policy's uncertainty after a tool result, as pure functions of the tree.
Entropies are means over the first `entropy_window` tokens of a turn, divided by ln V, and so lie
in [0, 1] for a vocabulary of V tokens.

    rise      dH = H(after the tool result) - H(first turn of the trajectory)
    paper     P = alpha + beta * dH                                (ARPO, arXiv 2507.19849, 3.1)
    relative  P = alpha + beta * (H after - H first) / (H after + H first)

With the paper's beta of 0.2 "paper" is a coin toss: on the quick start one standard deviation of
dH moves P = 0.5 by 0.001 to 0.003. "relative" lies within +-1 and keeps its scale when entropies
fall during training. Whether a rise predicts the value of a fork depends on the window, which must
reach the deciding tokens of the turn, after its fixed opening phrase (docs/experiments.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Annotated, Literal

from msgspec import Meta

from agentenv.base.config import ESSENTIAL, about
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.contract.plan import RolloutPlan
from agentenv.learners.algorithms.algorithm import Grouped
from agentenv.learners.algorithms.credit import Sharing

Criterion = Literal["paper", "relative"]
SharingKey = Annotated[
    Sharing, about("shared tokens get each leaf's advantage (soft) or their mean (hard)")
]

InitialRollouts = Annotated[
    Annotated[int, Meta(ge=1)] | None,
    about("trajectories from scratch; default half of the group", ESSENTIAL),
]


class ARPO(Grouped, frozen=True, kw_only=True, tag="arpo"):
    """Agentic reinforced policy optimization (Dong 2025, arXiv 2507.19849).

    Rollout, eq. 3 and section 3.1: see `ARPOPlan`; forks and refills share a budget of group_size
    trajectories. Credit, section 3.2: the advantages of GRPO over all leaves; a token shared by d
    leaves counts d times, with their own advantages (soft) or d times with the mean (hard), as
    `agentenv.learners.algorithms.credit` computes it. Loss: that of GRPO, `Algorithm.token_loss`.

    Differs from the paper: sampling a fork is the default, its text forks iff P > tau
    (fork_rule = "threshold"); entropies are means over the window; the loss is a token-mean
    without KL.

    The paper's signal is inert: with entropy_weight = 0.2 a standard deviation of dH moves the
    fork probability by 0.001 to 0.003 (quick start; docs/experiments.md), so the gain comes
    from forking itself. fork_criterion = "relative" lets the signal decide; the signal carries
    information only with an entropy_window that reaches past a turn's opening phrase.

    compat = "reference" is the released code, `agentenv.reference.algorithms`; entropy_window is
    then always 20 tokens.
    """

    initial_rollouts: InitialRollouts = None
    beam_size: Annotated[
        int, about("a fork point starts at most beam_size - 1 siblings", ESSENTIAL, ge=1)
    ] = 2
    base_probability: Annotated[
        float, about("fork probability without entropy rise (alpha)", ESSENTIAL, ge=0, le=1)
    ] = 0.5
    entropy_weight: Annotated[
        float, about("weight of the entropy rise in the fork probability (beta)", ESSENTIAL, ge=0)
    ] = 0.2
    fork_rule: Annotated[
        Literal["sample", "threshold"],
        about("fork with that probability, or when it exceeds fork_threshold"),
    ] = "sample"
    fork_threshold: Annotated[
        float, about("threshold of fork_rule threshold (tau)", ge=0, le=1)
    ] = 0.5
    fork_criterion: Annotated[
        Criterion,
        about(
            "term that the weight multiplies: paper, the entropy rise / ln V, which "
            "changes the probability by less than 0.01 (nearly a coin toss); relative, the rise "
            "over the sum of both entropies"
        ),
    ] = "paper"
    entropy_window: Annotated[
        int, about("tokens after a tool result whose entropy is measured", ge=1)
    ] = 20
    sharing: SharingKey = "soft"

    @property
    def num_initial(self) -> int:
        """Trajectories from scratch, at most the group."""
        return min(self.initial_rollouts or max(1, self.group_size // 2), self.group_size)

    def plan(self, vocab_size: int) -> RolloutPlan:
        return ARPOPlan(self, vocab_size)


@dataclass(frozen=True)
class ARPOPlan:
    """Fork where the policy became uncertain after a tool result (ARPO, arXiv 2507.19849, 3.1).

    P = clip(alpha + beta * `rise_term`, 0, 1). fork_rule "sample": each of beam_size - 1 siblings
    starts with probability P; fork_rule "threshold", the paper's text: all of them start if
    P > tau. Forks share the first turn of their root, so they inherit its baseline. When no
    branch grows, the rest of the budget starts from scratch, all at once.

    Differs from the paper: it prints dH as a sum over k divided by V, which makes beta
    ineffective; here dH is a mean over the tokens, divided by ln V.
    """

    rules: ARPO
    vocab_size: int

    @property
    def group_size(self) -> int:
        return self.rules.group_size

    @property
    def fork_window(self) -> int:
        return self.rules.entropy_window

    def on_start(self, tree: TrajectoryTree) -> int:
        return self.rules.num_initial

    def on_fork_point(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float], rng: Random
    ) -> int:
        budget = min(self.rules.beam_size - 1, self.fork_budget(tree))
        if budget <= 0:
            return 0
        probability = self.fork_probability(tree, node, entropies)
        if self.rules.fork_rule == "threshold":
            return budget if probability > self.rules.fork_threshold else 0
        return sum(rng.random() < probability for _ in range(budget))

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int:
        return 0 if tree.num_live else self.group_size - tree.num_started

    def fork_budget(self, tree: TrajectoryTree) -> int:
        """Siblings that may still start anywhere in the tree."""
        return self.group_size - tree.num_started

    def fork_probability(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float]
    ) -> float:
        """P; `node` holds the tool result, `entropies` are those of the tokens after it (nats)."""
        rise = self.rise_term(tree, node, entropies)
        return clip_probability(self.rules.base_probability + rise)

    def rise_term(self, tree: TrajectoryTree, node: Node, entropies: Sequence[float]) -> float:
        """The entropies' addition to the base probability."""
        after, before = self.entropy(entropies), self.entropy(tree.history(node)[1].entropies)
        is_relative = self.rules.fork_criterion == "relative"
        rise = relative_rise(after, before) if is_relative else after - before
        return self.rules.entropy_weight * rise

    def entropy(self, entropies: Sequence[float]) -> float:
        """Mean over the window (nats), divided by ln V; 0 for an empty turn."""
        first = entropies[: self.rules.entropy_window]
        return fmean(first) / math.log(self.vocab_size) if first else 0.0


def relative_rise(after: float, before: float) -> float:
    """(after - before) / (after + before) of two entropies, in [-1, 1]; 0 if both are 0."""
    total = after + before
    return (after - before) / total if total > 0 else 0.0


def clip_probability(probability: float) -> float:
    """The nearest probability in [0, 1]."""
    return min(1.0, max(0.0, probability))
