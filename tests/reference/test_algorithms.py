"""Differences of the update from the released code by default, and the effect of compat."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import build_config, load_config, to_plain
from agentenv.base.errors import ConfigError
from agentenv.learners.algorithms import losses
from agentenv.learners.algorithms.aepo import AEPO
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.algorithms.losses import LossBatch
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.messages import Init
from agentenv.reference.algorithms import (
    ReleasedAEPO,
    ReleasedARPO,
    ReleasedARPOPlan,
    group_advantages,
    released,
)
from tests.learners.flat import figures, grown, tree_form
from tests.support.released_losses import gspo_loss

DEFAULT, COMPAT = ARPO(group_size=2), ReleasedARPO(group_size=2)
COMPAT_AEPO = ReleasedAEPO(group_size=2)


def batch(size: int, entropies: torch.Tensor, **fields: object) -> LossBatch:
    zeros, ones = torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    mean, std = losses.entropy_statistics(entropies, ones)
    known = {"importance": ones, "sum_weight": float(size)}
    scalars = float(size), mean, std
    return LossBatch(zeros, zeros, entropies, ones, zeros, ones, *scalars, **{**known, **fields})


def test_compat_is_the_released_algorithm_with_the_same_keys() -> None:
    chosen = AEPO(group_size=16, compat="reference", branch_penalty=0.2, dual_clip=2.0)
    found = released(chosen)
    assert type(found) is ReleasedAEPO
    without_weight = {"importance_cap": "none"}  # the released code has none
    assert msgspec.to_builtins(found) == msgspec.to_builtins(chosen) | without_weight
    assert released(found) is found
    assert not found.needs_entropies
    assert released(DEFAULT) is DEFAULT


def test_a_configuration_with_compat_trains_the_released_algorithm() -> None:
    path = Path(__file__).parent.parent.parent / "configs" / "arpo_deep_search_8b.toml"
    config = load_config(TrainConfig, path, ["algorithm.compat=reference"])
    assert type(config.algorithm) is ReleasedARPO
    assert to_plain(config)["algorithm"]["compat"] == "reference"
    assert build_config(TrainConfig, to_plain(config), "saved") == config
    plan = config.algorithm.plan(100)
    assert (type(plan), plan.group_size) == (ReleasedARPOPlan, config.algorithm.group_size)


def test_compat_has_its_own_defaults_of_split_and_penalty() -> None:
    assert (COMPAT_AEPO.penalty_per_fork, COMPAT_AEPO.beta_of_split) == (0.05, 0.5)
    chosen = ReleasedAEPO(branch_penalty=0.2, budget_beta=3.0)
    assert (chosen.penalty_per_fork, chosen.beta_of_split) == (0.2, 3.0)


def test_compat_has_one_fork_criterion_and_three_algorithms() -> None:
    for keys in ({"fork_rule": "threshold"}, {"fork_criterion": "relative"}):
        with pytest.raises(ConfigError, match="single fork criterion"):
            released(ARPO(compat="reference", **keys))

    class Mine(GRPO, tag="mine"):
        pass

    with pytest.raises(ConfigError, match="no released implementation"):
        released(Mine(compat="reference"))


def test_difference_a_single_member_of_a_group_keeps_its_reward() -> None:
    assert DEFAULT.advantages(np.array([0.7])) == [0.0]
    assert COMPAT.advantages(np.array([0.7])) == pytest.approx([0.7 / (1 + 1e-6)])


def test_difference_equal_rewards_leave_rounding_noise() -> None:
    rewards = np.array([0.1, 0.1, 0.1])
    assert not DEFAULT.advantages(rewards).any()
    assert group_advantages(rewards).any()
    assert np.abs(COMPAT.advantages(rewards)).max() < 1e-9


def test_difference_the_log_ratio_is_not_bounded() -> None:
    far = torch.tensor([30.0, -30.0], dtype=torch.float64)
    old = torch.zeros_like(far)
    assert losses.ratio_of(far, old)[0] == pytest.approx(math.exp(20))
    assert COMPAT.ratio(far, old)[0] == pytest.approx(math.exp(30))
    for algorithm, expected in ((DEFAULT, math.exp(20)), (COMPAT, math.exp(30))):
        entropies = torch.ones(2, dtype=torch.float64)
        _, metrics = algorithm.loss(batch(2, entropies), far, entropies)
        assert metrics["ratio_max"] == pytest.approx(expected)


def test_difference_aepo_scales_by_the_micro_batch_and_current_entropies() -> None:
    old = torch.tensor([1.0, 2.0, 3.0, 10.0], dtype=torch.float64)
    current = torch.tensor([0.0, 0.0, 0.0, 4.0], dtype=torch.float64)
    whole = batch(4, old)
    default = AEPO(group_size=2).advantage_scale(whole, current)
    compat = ReleasedAEPO(group_size=2).advantage_scale(whole, current)
    torch.testing.assert_close(default, 1 + 0.2 * (old - old.mean()) / old.std())
    torch.testing.assert_close(compat, 1 + 0.2 * (current - current.mean()) / current.std())


def test_difference_the_multiplier_can_flip_an_advantage_in_compat_only() -> None:
    entropies = torch.tensor([3.0] * 60 + [0.0], dtype=torch.float64)
    low, high = (
        kind(group_size=2).advantage_scale(batch(61, entropies), entropies)
        for kind in (ReleasedAEPO, AEPO)
    )
    assert low.min() < 0.0
    assert high.min() == 0.0


def test_the_advantage_of_a_single_token_is_not_scaled() -> None:
    """The released code gives nan, here as in the fixture `single_valid_token`."""
    entropies = torch.ones(1, dtype=torch.float64)
    for kind in (ReleasedAEPO, AEPO):
        scale = kind(group_size=2).advantage_scale(batch(1, entropies), entropies)
        assert torch.as_tensor(scale).item() == 1.0


def test_equal_entropies_are_not_separated_by_rounding() -> None:
    entropies = torch.full((7,), 0.1, dtype=torch.float64)
    mean = entropies.mean() * (1 + 1e-15)
    std = torch.tensor(1e-17, dtype=torch.float64)
    multiplier = losses.entropy_multiplier(entropies, mean, std, 0.2)
    assert torch.equal(multiplier, torch.ones_like(multiplier))


def test_compat_equals_the_default_when_neither_guard_acts() -> None:
    trees = grown(4)
    found = figures(DEFAULT, trees)
    torch.testing.assert_close(tree_form(COMPAT, found), tree_form(DEFAULT, found))


def test_cispo_keeps_the_gradient_of_every_token() -> None:
    ratio = torch.tensor([0.1, 1.0, 1.9, 5.0], dtype=torch.float64)
    for advantage in (2.0, -2.0):
        logprobs = ratio.log().requires_grad_()
        value = losses.cispo_loss(
            losses.ratio_of(logprobs, torch.zeros_like(logprobs)),
            torch.full_like(logprobs, advantage),
            1.0,
            1.0,
        )
        value.sum().backward()
        expected = -advantage * torch.tensor([0.1, 1.0, 1.9, 2.0], dtype=torch.float64)
        torch.testing.assert_close(logprobs.grad, expected)
        torch.testing.assert_close(value.detach(), expected)


def test_gspo_clips_whole_sequences() -> None:
    old = torch.zeros(2, 3, dtype=torch.float64)
    logprobs = torch.tensor([[0.3, 0.0, 0.0], [0.01, 0.0, -0.01]], dtype=torch.float64)
    logprobs.requires_grad_()
    ones = torch.ones_like(old)
    loss, ratio = gspo_loss(logprobs, old, ones, ones, 0.05, 0.05)
    loss.sum().backward()
    torch.testing.assert_close(ratio[:, 0].detach(), torch.tensor([math.exp(0.1), 1.0]).double())
    assert not logprobs.grad[0].any()
    torch.testing.assert_close(logprobs.grad[1], -torch.ones(3, dtype=torch.float64))


@pytest.mark.parametrize("kind", ["k1", "abs", "k2", "k3"])
def test_kl_to_a_reference_enters_loss_and_gradient(kind: str) -> None:
    logprobs = torch.tensor([-1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -1.0], dtype=torch.float64)
    entropies = torch.ones(2, dtype=torch.float64)
    plain = batch(2, entropies)
    given = batch(2, entropies, reference=reference)
    with_kl = ARPO(group_size=2, kl_loss=0.5, kl_kind=kind).loss(given, logprobs, entropies)[0]
    without = ARPO(group_size=2).loss(plain, logprobs, entropies)[0]
    expected = 0.5 * losses.kl_loss(logprobs, reference, kind).mean()
    torch.testing.assert_close(with_kl - without, expected)
    grads = torch.autograd.grad(with_kl - without - expected, logprobs)[0]
    assert grads.abs().max() < 1e-12


def test_entropy_bonus_reaches_the_entropies_gradient() -> None:
    entropies = torch.tensor([1.0, 3.0], dtype=torch.float64, requires_grad=True)
    bonus = ARPO(group_size=2, entropy_bonus=0.1)
    loss, _ = bonus.loss(batch(2, entropies.detach()), torch.zeros(2).double(), entropies)
    loss.backward()
    torch.testing.assert_close(entropies.grad, torch.full((2,), -0.05, dtype=torch.float64))


def test_the_ranks_get_the_released_class() -> None:
    sent = msgspec.msgpack.encode(Init.of(LearnerConfig(), COMPAT_AEPO, "model", seed=0))
    assert msgspec.msgpack.decode(sent, type=Init).make_algorithm() == COMPAT_AEPO
