"""Groups of equal returns: in the means over a mini-batch, in no pass, and a step all the same."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.aepo import AEPO
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.algorithms.credit import are_equal
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.learner import encode_groups
from agentenv.learners.trees.partition import minibatches
from agentenv.reference.algorithms import released
from tests.learners.oracle import grow
from tests.learners.ranks import plain_torch, two_ranks, weights_of
from tests.learners.test_oracle import compare
from tests.learners.trees import VOCABULARY, credits_of, level, random_tree

CASES: list[tuple[str, dict[str, Any]]] = [
    ("arpo", {}), ("arpo", {"sharing": "hard", "aggregation": "seq-mean-token-mean"}),
    ("aepo", {"entropy_advantage": 1.0}),
    ("aepo", {"sharing": "hard", "aggregation": "seq-mean-token-sum-norm"}),
    ("aepo", {"proximal": "always", "aggregation": "seq-mean-token-sum"}),
    ("gspo", {"clip_low": 0.2, "clip_high": 0.3}), ("grpo", {"kl_loss": 0.3, "kl_kind": "k1"}),
    ("arpo", {"entropy_bonus": 0.05, "aggregation": "seq-mean-token-mean"}),
    ("rloo", {"kl_reward": 0.1}), ("reinforce_pp", {}),
    ("dr_grpo", {"sequence_mask": (0.2, 5.0), "token_mask": (0.3, 3.0)}),
    ("aepo", {"equal_groups": "drop"}), ("reinforce_pp", {"equal_groups": "drop"}),
]  # fmt: skip
QUICK = (1, 2, 6)


def name_of(value: Any) -> str:
    return " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else str(value)


def some_equal(seed: int) -> list[list[TrajectoryTree]]:
    """Two mini-batches of random trees, about half of which have equal returns; of one all have."""
    random = Random(seed)
    trees = [grow(seed, index, VOCABULARY) for index in range(7)]
    for tree in trees[:4]:
        if tree.index and random.random() < 0.5:
            level(tree, random.choice([1.1, 0.7, -1.0, 0.1]))
    for tree in trees[4:]:
        level(tree, random.choice([1.1, 0.7, -1.0, 0.1]))
    return [trees[:4], trees[4:]]


@pytest.mark.parametrize(
    ("number", "kind", "settings"),
    [pytest.param(i, *case) for i, case in enumerate(CASES)],
    ids=name_of,
)
def test_every_step_has_the_gradient_of_all_groups_delivered(
    number: int, kind: str, settings: dict[str, Any]
) -> None:
    """Of the mean over every trajectory, also in a mini-batch in which no group has a signal."""
    parts = some_equal(number)
    if settings.get("equal_groups") == "drop":  # the oracle takes no step on an empty batch
        parts = [[*parts[0], *parts[1][:2]], [grow(50, 1, VOCABULARY), *parts[1][2:]]]
    for metrics in compare(kind, settings, "qwen3", 60, parts):
        assert metrics["num_steps"] == 4


class Counting:
    """Counts passes of a trainer's backend, with and without gradient, and their tokens."""

    def __init__(self, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tokens = {True: 0, False: 0}
        forward = backend.forward

        def counted(batch: Any, *others: Any, **keys: Any) -> Any:
            self.tokens[torch.is_grad_enabled()] += len(batch.targets)
            return forward(batch, *others, **keys)

        monkeypatch.setattr(backend, "forward", counted)


PASSES: list[tuple[Algorithm, dict[str, str], bool, bool]] = [
    # algorithm, agreement of the engine, are equal groups computed with and without gradient
    (ARPO(group_size=2), {"agreement": "unknown"}, False, False),
    (AEPO(group_size=2), {"agreement": "exact"}, False, False),
    (AEPO(group_size=2), {"agreement": "close"}, False, True),
    (ARPO(group_size=2, entropy_bonus=0.1), {"agreement": "exact"}, True, False),
    (released(AEPO(group_size=2, compat="reference")), {"agreement": "exact"}, True, False),
]


@pytest.mark.parametrize(("algorithm", "known", "trained", "scored"), PASSES)
def test_a_group_without_a_signal_costs_no_pass_unless_a_term_needs_it(
    algorithm: Algorithm,
    known: dict[str, Any],
    trained: bool,
    scored: bool,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = two_ranks(num_ranks=1, zero_stage=0)
    trainer = plain_torch(model_dir, config, torch.float32, algorithm)
    trees = [level(random_tree(Random(i), index=i), 1.1) for i in range(3)]
    groups = [
        (tree, credit) for tree, credit in zip(trees, credits_of(algorithm, trees), strict=True)
    ]
    counting = Counting(trainer.backend, monkeypatch)
    encoded = encode_groups(groups, 0, config, algorithm)
    metrics = trainer.update([encoded], 1.0, **known)
    own = sum(tree.num_action_tokens for tree in encoded)
    # 1 of an empty micro-batch, for gradients of 0.
    assert counting.tokens[True] == (own if trained else 1)
    assert counting.tokens[False] == (own if scored else 0)
    assert metrics["num_tokens"] == (own if trained else 0)
    assert metrics["num_steps"] == 1
    assert metrics["loss"] == 0 or algorithm.entropy_bonus


def test_a_step_without_a_signal_is_an_optimizer_step_on_zero_gradients(model_dir: Path) -> None:
    """Momentum continues and weights decay, as in verl."""
    algorithm = GRPO(group_size=2)
    config = two_ranks(num_ranks=1, zero_stage=0, grad_clip=0.0, weight_decay=0.1)
    trainer = plain_torch(model_dir, config, torch.float32, algorithm)
    trees = [random_tree(Random(i), index=i) for i in range(2)]
    groups = list(zip(trees, credits_of(algorithm, trees), strict=True))
    trainer.update([encode_groups(groups, 0, config, algorithm)], 1.0)
    before = {name: weight.clone() for name, weight in weights_of(trainer).items()}
    state = {
        name: {k: v.clone() for k, v in trainer.backend.base_optimizer.state[p].items()}
        for name, p in trainer.backend.policy.model.named_parameters()
    }
    equal = [level(tree, 0.7) for tree in trees]
    groups = list(zip(equal, credits_of(algorithm, equal), strict=True))
    metrics = trainer.update([encode_groups(groups, 0, config, algorithm)], 1.0)
    assert metrics["grad_norm"] == 0
    name = "model.layers.0.mlp.up_proj.weight"
    first, second = 0.9 * state[name]["exp_avg"], 0.999 * state[name]["exp_avg_sq"]
    moved = first / (1 - 0.9**2) / ((second / (1 - 0.999**2)).sqrt() + 1e-8)
    expected = before[name] * (1 - 1e-3 * 0.1) - 1e-3 * moved
    torch.testing.assert_close(weights_of(trainer)[name], expected)
    assert float(moved.abs().max()) > 0.1


@pytest.mark.parametrize("algorithm", [GRPO, ARPO, AEPO])
@pytest.mark.parametrize("size", [3, 8, 12, 16])
@pytest.mark.parametrize("compat", ["none", "reference"])
def test_the_returns_decide_whether_a_group_is_equal(
    algorithm: type[GRPO | ARPO | AEPO], size: int, compat: str
) -> None:
    rules = released(algorithm(group_size=size, compat=compat))
    random = Random(size)
    for value in (1.1, 0.1, 0.3, 0.4, 0.8, 1.0, -1.0, 2 / 3, 0.0, 1e4 / 3):
        tree = level(random_tree(random, num_leaves=size), value)
        credit = rules.credit(tree)
        assert credit is not None
        assert not credit.has_signal, value
        tree.leaves()[0].reward += 1e-3
        assert rules.credit(tree).has_signal


class Absolute(ARPO, frozen=True, kw_only=True, tag="absolute"):
    """REINFORCE without a baseline."""

    def advantages(self, returns: np.ndarray) -> np.ndarray:
        return returns.copy()


def test_an_estimator_without_a_group_baseline_learns_from_equal_returns() -> None:
    tree = level(random_tree(Random(1), num_leaves=5), 1.1)
    assert Absolute(group_size=5).credit(tree).has_signal


def test_equal_and_unequal_groups_by_hand() -> None:
    assert are_equal(np.array([0.1 + 0.2, 0.3, 0.3]))
    assert are_equal(np.array([3e7 + 0.1 + 0.2, 3e7 + 0.3]))
    assert not are_equal(np.array([0.3, 0.3, 0.3 + 1e-9]))
    assert not are_equal(np.array([np.nan, np.nan]))


def test_groups_are_divided_evenly_into_mini_batches() -> None:
    assert minibatches(range(16), 2) == [range(8), range(8, 16)]
    assert [len(one) for one in minibatches(range(13), 2)] == [6, 7]
    assert [len(one) for one in minibatches(range(1), 2)] == [1]
    assert minibatches([], 2) == []


def test_a_configuration_that_trains_a_router_computes_all_groups() -> None:
    algorithm = ARPO(group_size=2)
    trees = [level(random_tree(Random(1), num_leaves=5), 1.1)]
    groups = list(zip(trees, credits_of(algorithm, trees), strict=True))
    plain = LearnerConfig(zero_stage=0, optimizer="adamw")
    for config, is_counted in ((plain, True), (replace(plain, router_loss=0.01), False)):
        assert [one.is_counted for one in encode_groups(groups, 0, config, algorithm)] == [
            is_counted
        ]
