"""GRPO, ARPO and AEPO of the released code, and their selection by a configuration.

A group with a single member keeps its reward, and the log-ratio is not clamped. AEPO's z-score is
over the micro-batch, from current entropies, and not clamped. Equal rewards leave rounding noise,
which credits do not contain (`agentenv.learners.algorithms.credit.tree_credit`): such a group has
no signal. The released code's weighting of micro-batches, which depends on the packing, is not
reproduced.

The rollouts of ARPO and AEPO also differ from the papers. Both compare the segment before the tool
result with the first segment of the trajectory's own list entry, by sums of entropies:

    H    = -sum over the first 20 tokens, and their top 10 or 11 tokens, of p ln p, / ln V
    ARPO   fork iff clip(u - w dH, 0, 1) <= p
    AEPO   fork iff clip((u + w dH) max(0, 1 - 0.05 l), 0, 1) >= p,   l counted per prompt

The functions here are exact. The plans follow the same rules without that code's barrier over all
prompts of a batch, and so without its side effects: baselines from earlier batches under the same
list index, and a reset of l by passes in which another prompt got a trajectory.
`tests/support/reference_loop.py` adds the barrier and replays recorded runs. Does not load torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from agentenv.base.errors import ConfigError
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.contract.plan import RolloutPlan
from agentenv.learners.algorithms.aepo import AEPO, AEPOPlan, penalty_factor, probing, sigmoid
from agentenv.learners.algorithms.algorithm import Algorithm, Grouped
from agentenv.learners.algorithms.arpo import ARPO, ARPOPlan, clip_probability
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.algorithms.credit import EPSILON, Floats

if TYPE_CHECKING:
    from torch import Tensor

    from agentenv.learners.algorithms.losses import LossBatch


def group_advantages(
    rewards: Sequence[float] | Floats, *, norm_by_std: bool = True, epsilon: float = EPSILON
) -> Floats:
    """(r - mean) / (std + epsilon) over one group, with unbiased std; without norm_by_std, r -
    mean.

    A single reward keeps its value (divided by 1 + epsilon); equal rewards leave rounding noise.
    """
    values = np.asarray(rewards, np.float64)
    if values.size == 1:
        return values / (1.0 + epsilon) if norm_by_std else values.copy()
    if values.size == 0:
        return np.zeros_like(values)
    centered: Floats = values - values.mean()
    if norm_by_std:
        centered /= values.std(ddof=1) + epsilon
    return centered


def entropy_multiplier(entropies: Tensor, mean: Tensor, std: Tensor, coefficient: float) -> Tensor:
    """1 + a (H - mean) / std, detached, neither clamped nor guarded; a std of 0 counts as 1."""
    return 1.0 + coefficient * (entropies.detach() - mean) / std.masked_fill(std == 0, 1.0)


class Released:
    """A mix-in with the released advantages and ratio, for an algorithm of groups."""

    __slots__ = ()
    is_released = True

    def advantages(self, returns: Floats) -> Floats:
        assert isinstance(self, Grouped)
        return group_advantages(returns, norm_by_std=self.normalize_by_std)

    def ratio(self, logprobs: Tensor, proximal: Tensor) -> Tensor:
        return (logprobs - proximal).exp()


class ReleasedGRPO(Released, GRPO, frozen=True, kw_only=True, tag="grpo"):
    """GRPO with the released advantages and ratio."""


class ReleasedARPO(Released, ARPO, frozen=True, kw_only=True, tag="arpo"):
    """ARPO with the released advantages, ratio and rollout."""

    def plan(self, vocab_size: int) -> RolloutPlan:
        return ReleasedARPOPlan(self, vocab_size)


class ReleasedAEPO(Released, AEPO, frozen=True, kw_only=True, tag="aepo"):
    """AEPO with the released advantages, ratio and rollout, its defaults for split and penalty, and
    a z-score per micro-batch."""

    default_beta: ClassVar[float] = 0.5
    default_penalty: ClassVar[float] = 0.05

    @property
    def needs_entropies(self) -> bool:
        return False

    def plan(self, vocab_size: int) -> RolloutPlan:
        return ReleasedAEPOPlan(self, vocab_size)

    @property
    def learns_from_equal_groups(self) -> bool:
        """Also with the entropy advantage, whose statistics include the tokens of equal groups."""
        return super().learns_from_equal_groups or self.entropy_advantage > 0

    def advantage_scale(self, batch: LossBatch, entropies: Tensor) -> Tensor | float:
        from agentenv.learners.algorithms.losses import entropy_statistics

        if self.entropy_advantage == 0 or batch.weight.sum() < 2:  # the released code gives nan
            return 1.0
        current = entropies.detach()
        mean, std = entropy_statistics(current, batch.weight)
        return entropy_multiplier(current, mean, std, self.entropy_advantage)


RELEASED: dict[type[Algorithm], type[Algorithm]] = {
    GRPO: ReleasedGRPO,
    ARPO: ReleasedARPO,
    AEPO: ReleasedAEPO,
}


def released(algorithm: Algorithm) -> Algorithm:
    """The released form of an algorithm with compat = "reference", without importance weights; any
    other algorithm unchanged.

    Raises ConfigError for a kind of algorithm without a released form, and for fork keys that the
    released rollout does not read.
    """
    kind = type(algorithm)
    if kind in RELEASED.values() or getattr(algorithm, "compat", "none") != "reference":
        return algorithm
    if kind not in RELEASED:
        raise ConfigError(
            f'algorithm.compat = "reference": {kind.__name__} has no released implementation, '
            "only grpo, arpo and aepo have; remove compat"
        )
    only = ("sample", "paper")
    if isinstance(algorithm, ARPO) and (algorithm.fork_rule, algorithm.fork_criterion) != only:
        raise ConfigError(
            'algorithm.compat = "reference" has a single fork criterion: remove fork_rule and '
            "fork_criterion"
        )
    values = {name: getattr(algorithm, name) for name in kind.__struct_fields__}
    return RELEASED[kind](**values | {"importance_cap": "none"})


# The released rollout.

WINDOW = 20  # number of first tokens of a segment whose entropies count


def segment_entropy(entropies: Sequence[float], vocab_size: int) -> float:
    """Sum over the first 20 tokens of a segment, divided by ln V; 0 for an empty one."""
    return math.fsum(entropies[:WINDOW]) / math.log(vocab_size)


def arpo_score(draw: float, rise: float, weight: float) -> float:
    """ARPO forks iff this is at most the base probability."""
    return clip_probability(draw - weight * rise)


def aepo_score(draw: float, rise: float, weight: float, penalty: float, run: int) -> float:
    """AEPO forks iff this is at least the base probability."""
    return clip_probability((draw + weight * rise) * penalty_factor(penalty, run))


def initial_rollouts(group_size: int, beta: float, root: float, steps: Sequence[float]) -> int:
    """AEPO's split: floor(n sigmoid(beta (H_root - mean H))) + 1, within [1, n].

    `steps`: entropies of all segments of the probe, including the first; if empty, the root's is
    used.
    """
    share = sigmoid(beta * (root - (fmean(steps) if steps else root)))
    return max(1, min(group_size, math.floor(group_size * share) + 1))


@dataclass(frozen=True)
class ReleasedARPOPlan(ARPOPlan):
    """The rollout of the released ARPO. Decisions depend only on segments before the tool result,
    so they wait for only one token."""

    @property
    def fork_window(self) -> int:
        return 1

    def on_fork_point(
        self, tree: TrajectoryTree, node: Node, entropies: Sequence[float], rng: Random
    ) -> int:
        left = self.fork_budget(tree)
        return self.num_forks(rng, self.rise(tree, node), forks_in_a_row(tree), left)

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int:
        """One refill at a time, when no trajectory of the prompt is growing."""
        return min(1, self.group_size - tree.num_started) if tree.num_live == 0 else 0

    def entropy(self, entropies: Sequence[float]) -> float:
        """H of a turn with these entropies."""
        return segment_entropy(entropies, self.vocab_size)

    def rise(self, tree: TrajectoryTree, node: Node) -> float:
        """dH of the segment that ends with the tool call of `node`."""
        own = next(turn for turn in tree.path(node)[1:] if turn.branch == node.branch)
        return self.entropy(node.entropies) - self.entropy(own.entropies)

    def num_forks(self, rng: Random, rise: float, run: int, left: int) -> int:
        """Number of forks: beam_size - 1 draws, within the remaining budget of the prompt."""
        count = 0
        for _ in range(self.rules.beam_size - 1):
            if count >= left:
                break
            count += self.forks(rng.random(), rise, run)
        return count

    def forks(self, draw: float, rise: float, run: int) -> bool:
        """Whether one uniform draw leads to a fork."""
        return arpo_score(draw, rise, self.rules.entropy_weight) <= self.rules.base_probability


@dataclass(frozen=True)
class ReleasedAEPOPlan(AEPOPlan, ReleasedARPOPlan):
    """The rollout of the released AEPO. The probe of the split counts as one of the m trajectories,
    while the released code discards it; the probe does not fork."""

    def fork_budget(self, tree: TrajectoryTree) -> int:
        return 0 if self.rules.budget_split and probing(tree) else super().fork_budget(tree)

    def num_roots(self, tree: TrajectoryTree, probe: Node) -> int:
        steps = [self.entropy(turn.entropies) for turn in tree.path(probe)[1:]]
        beta = self.rules.beta_of_split
        wanted = initial_rollouts(self.group_size, beta, steps[0], steps)
        return min(wanted, self.group_size - (tree.num_started - tree.num_roots))

    def forks(self, draw: float, rise: float, run: int) -> bool:
        """Whether one uniform draw leads to a fork."""
        rules = self.rules
        score = aepo_score(draw, rise, rules.entropy_weight, rules.penalty_per_fork, run)
        return score >= rules.base_probability


def forks_in_a_row(tree: TrajectoryTree) -> int:
    """Number of most recent consecutive fork points of the tree that forked."""
    count = 0
    for node in reversed(tree.nodes):
        if node.num_forks == 0:
            break
        count += node.num_forks is not None
    return count
