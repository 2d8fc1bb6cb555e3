"""Options of the loss through the real trainer: reference policy, whole sequences, metrics."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from agentenv.learners.algorithms.aepo import AEPO
from agentenv.learners.algorithms.algorithm import Algorithm, Band
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.baselines import GRPO, GSPO
from agentenv.learners.keys import Agreement, LearnerConfig
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.trainer import Trainer
from agentenv.learners.trees.encoded_tree import ActionTokens, EncodedTree, encode
from agentenv.learners.trees.policy import Policy
from tests.learners.flat import grown
from tests.learners.trees import tiny_model


def trainer(algorithm: Algorithm, **keys: object) -> Trainer:
    keys = {"optimizer": "adamw", "learning_rate": 1e-2, "grad_clip": 0.0, **keys}
    config = LearnerConfig(zero_stage=0, **keys)
    return Trainer(RankBackend(Policy(tiny_model(dtype=torch.float64)), config), algorithm, config)


def encoded(seed: int = 4) -> list[EncodedTree]:
    algorithm = GRPO(group_size=2)
    trees = grown(seed)
    return [encode(tree, algorithm.credit(tree), 0) for tree in trees]


def weights(trainer: Trainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.backend.policy.parameters()])


def test_without_a_kl_no_reference_model_is_built() -> None:
    plain = trainer(ARPO(group_size=2, kl_kind="k1"))
    metrics = plain.update([encoded()], 1.0)
    assert plain.reference.weights is None
    assert "kl_to_reference" not in metrics


def test_the_reference_is_the_initial_policy_of_rl() -> None:
    kl = trainer(ARPO(group_size=2, kl_loss=0.1), proximal="always")
    before = weights(kl)
    first = kl.update([encoded()], 1.0)
    assert first["kl_to_reference"] == pytest.approx(0.0, abs=1e-12)
    second = kl.update([encoded()], 1.0)
    assert abs(second["kl_to_reference"]) > 1e-4
    kept = torch.cat([elements for _, elements in kl.reference.weights.values()])
    assert torch.equal(kept, before)
    assert not torch.equal(weights(kl), before)


def test_the_reference_is_renewed_after_the_configured_number_of_updates() -> None:
    kl = trainer(ARPO(group_size=2, kl_reward=0.01, reference_every=2), proximal="always")
    gaps = [kl.update([encoded()], 1.0)["kl_to_reference"] for _ in range(4)]
    assert [abs(gap) < 1e-12 for gap in gaps] == [True, False, True, False]


def test_off_policy_metrics_are_reported() -> None:
    """Log-probs of the fixture's trees are made up, so the learner's differ from them."""
    metrics = trainer(ARPO(group_size=2), proximal="always").update([encoded()], 1.0)
    assert 0.0 < metrics["effective_sample_size"] < 1.0
    assert 0.0 < metrics["ratio_out_of_band"] <= 1.0
    fresh = trainer(ARPO(group_size=2)).update([encoded()], 1.0)
    of_ratios = {"effective_sample_size", "ratio_out_of_band", "behaviour_ratio/staleness_0"}
    assert of_ratios <= metrics.keys()
    assert not of_ratios & fresh.keys(), "what was not measured is not reported"


@pytest.mark.parametrize("mask", ["token_mask", "sequence_mask"])
def test_a_mask_acts_on_fresh_trees_too(mask: str) -> None:
    """The engine's log-probs are far from the learner's: a band leaves nearly all out."""
    algorithm = ARPO(group_size=2, **{mask: Band(low=0.9, high=1.1)})
    metrics = trainer(algorithm).update([encoded()], 1.0)
    assert metrics == pytest.approx(
        trainer(algorithm, proximal="always").update([encoded()], 1.0)
        | {name: metrics[name] for name in ("wall_s", "cpu_s")}
    )
    assert metrics["ratio_out_of_band"] > 0.5
    if mask == "sequence_mask":
        assert metrics["sequences_masked"] > 0.5


@pytest.mark.parametrize(
    ("algorithm", "agreement", "is_computed"),
    [
        (ARPO(group_size=2), "exact", False),
        (ARPO(group_size=2), "close", False),
        (ARPO(group_size=2), "unknown", True),
        (AEPO(group_size=2), "exact", False),
        (AEPO(group_size=2), "close", True),  # entropies of the likeliest tokens are bounds
    ],
)
def test_log_probs_of_an_engine_are_used_only_as_far_as_agreement_is_known(
    algorithm: ARPO, agreement: Agreement, is_computed: bool
) -> None:
    metrics = trainer(algorithm).update([encoded()], 1.0, agreement)
    assert ("effective_sample_size" in metrics) == is_computed


def test_without_a_cap_there_is_no_importance_weight() -> None:
    """PPO against the learner's own log-probs, for any log-probs of the engine: only these
    differ."""
    updates = []
    for shift in (0.0, 0.7):
        trees = [
            replace(tree, behavior=(tree.floats("behavior") + shift).tobytes())
            for tree in encoded()
        ]
        plain = trainer(ARPO(group_size=2, importance_cap="none"), proximal="always")
        metrics = plain.update([trees], 1.0)
        updates.append((metrics["loss"], metrics["grad_norm"]))
    assert updates[0] == updates[1]
    capped = trainer(ARPO(group_size=2), proximal="always").update([encoded()], 1.0)
    assert capped["grad_norm"] != updates[0][1]


def test_gspo_reports_clipped_trajectories() -> None:
    gspo = trainer(GSPO(group_size=2), num_epochs_per_batch=2, proximal="always")
    metrics = gspo.update([encoded()], 1.0)
    assert metrics["sequences_clipped"] > 0.0  # in the second epoch; in the first all ratios are 1
    assert "clipped_high" not in metrics


def test_stale_trees_get_the_entropies_of_the_policy_before_the_update() -> None:
    trees, old = encoded(), ActionTokens(encoded())
    for proximal, is_kept in (("stale", True), ("always", False)):
        aepo = trainer(AEPO(group_size=2), proximal=proximal)
        (prepared,) = aepo._prepare_all([trees])
        expected = old.entropies if is_kept else aepo.figures(trees)[1]
        np.testing.assert_array_equal(prepared.entropies, expected)


def test_no_tree_is_fresh_after_an_unpublished_step() -> None:
    grpo = trainer(GRPO(group_size=2))
    trees = encoded()
    for moved in (False, True):
        grpo.moved = moved
        (prepared,) = grpo._prepare_all([trees])
        expected = grpo.figures(trees)[0] if moved else prepared.tokens.behavior
        np.testing.assert_array_equal(prepared.proximal, expected)
    grpo.moved = False
    grpo.update([trees], 1.0)
    assert grpo.moved
