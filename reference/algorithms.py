"""GRPO, ARPO and AEPO as the released code has them, and how a configuration gets them.

The only member of a group keeps its reward, the log-ratio is not bounded; AEPO's z is over the
micro-batch, from current entropies, not clamped. Equal rewards leave rounding noise, which no
credit has (`learners.credit.tree_credit`): such a group is without a signal. The released code's
weighting of micro-batches, which depends on the packing, is not brought back. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from agentenv.errors import ConfigError
from agentenv.learners.aepo import AEPO
from agentenv.learners.algorithm import Algorithm, Grouped
from agentenv.learners.arpo import ARPO
from agentenv.learners.baselines import GRPO
from agentenv.learners.credit import EPSILON, Floats
from agentenv.plan import RolloutPlan
from agentenv.reference.rollout import ReleasedAEPOPlan, ReleasedARPOPlan

if TYPE_CHECKING:
    from torch import Tensor

    from agentenv.learners.losses import LossBatch


def group_advantages(
    rewards: Sequence[float] | Floats, *, norm_by_std: bool = True, epsilon: float = EPSILON
) -> Floats:
    """(r - mean) / (std + epsilon) over one group, std unbiased; without norm_by_std r - mean.

    A single reward keeps its value (divided by 1 + epsilon), equal ones leave rounding noise.
    """
    values = np.asarray(rewards, np.float64)
    if values.size == 1:
        return values / (1.0 + epsilon) if norm_by_std else values.copy()
    if values.size == 0:
        return np.zeros_like(values)
    centred: Floats = values - values.mean()
    if norm_by_std:
        centred /= values.std(ddof=1) + epsilon
    return centred


def entropy_multiplier(entropies: Tensor, mean: Tensor, std: Tensor, coefficient: float) -> Tensor:
    """1 + a (H - mean) / std, detached, neither clamped nor guarded; a std of 0 counts as 1."""
    return 1.0 + coefficient * (entropies.detach() - mean) / std.masked_fill(std == 0, 1.0)


class Released:
    """The released advantages and ratio, in front of an algorithm of groups."""

    __slots__ = ()
    is_released = True

    def advantages(self, returns: Floats) -> Floats:
        assert isinstance(self, Grouped)
        return group_advantages(returns, norm_by_std=self.normalize_by_std)

    def ratio(self, logprobs: Tensor, proximal: Tensor) -> Tensor:
        return (logprobs - proximal).exp()


class ReleasedGRPO(
    Released, GRPO, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="grpo"
):
    """GRPO with the released advantages and ratio."""


class ReleasedARPO(
    Released, ARPO, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="arpo"
):
    """The same, with the released rollout."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_criterion(self)

    def plan(self, vocab_size: int) -> RolloutPlan:
        return ReleasedARPOPlan(self, vocab_size)


class ReleasedAEPO(
    Released, AEPO, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="aepo"
):
    """The same, with its own defaults of the split and the penalty, and z of each micro-batch."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_criterion(self)

    @property
    def needs_entropies(self) -> bool:
        return False

    @property
    def beta_of_split(self) -> float:
        return 0.5 if self.budget_beta is None else self.budget_beta

    @property
    def penalty_per_fork(self) -> float:
        return 0.05 if self.branch_penalty is None else self.branch_penalty

    def plan(self, vocab_size: int) -> RolloutPlan:
        return ReleasedAEPOPlan(self, vocab_size)

    @property
    def learns_from_equal_groups(self) -> bool:
        """Also where their tokens are needed, with current entropies, in the micro-batches."""
        return super().learns_from_equal_groups or self.entropy_advantage > 0

    def advantage_scale(self, batch: LossBatch, entropies: Tensor) -> Tensor | float:
        from agentenv.learners.losses import entropy_statistics

        if self.entropy_advantage == 0 or batch.weight.sum() < 2:  # the released code gives nan
            return 1.0
        current = entropies.detach()
        mean, std = entropy_statistics(current, batch.weight)
        return entropy_multiplier(current, mean, std, self.entropy_advantage)


def check_criterion(rules: ARPO) -> None:
    """Raise ConfigError for fork keys that the released rollout does not read."""
    if (rules.fork_rule, rules.fork_criterion) != ("sample", "paper"):
        raise ConfigError(
            'algorithm.compat = "reference" has one fork criterion: leave fork_rule and '
            "fork_criterion out"
        )


RELEASED: dict[type[Algorithm], type[Algorithm]] = {
    GRPO: ReleasedGRPO,
    ARPO: ReleasedARPO,
    AEPO: ReleasedAEPO,
}


def released(algorithm: Algorithm) -> Algorithm:
    """The released form of an algorithm with compat = "reference", which has no importance weight;
    any other as it is.

    Raises ConfigError for a kind of algorithm without a released form.
    """
    kind = type(algorithm)
    if kind in RELEASED.values() or getattr(algorithm, "compat", "none") != "reference":
        return algorithm
    if kind not in RELEASED:
        raise ConfigError(
            f'algorithm.compat = "reference": {kind.__name__} has no released form, only '
            "grpo, arpo and aepo have; leave compat out"
        )
    values = {name: getattr(algorithm, name) for name in kind.__struct_fields__}
    return RELEASED[kind](**values | {"importance_cap": "none"})
