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
from agentenv.learners.trees.batch import ActionTokens, EncodedTree, encode, encode_sequence
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


@pytest.mark.parametrize(
    "algorithm",
    [
        GSPO(group_size=2, clip_low=0.2, clip_high=0.3),
        ARPO(group_size=2, aggregation="seq-mean-token-mean", sequence_mask=Band(low=0.01)),
        ARPO(group_size=2, entropy_bonus=0.1, kl_loss=0.1),
    ],
    ids=["gspo", "sequences", "bonus and kl"],
)
def test_a_step_does_not_depend_on_the_cuts_of_trees(algorithm: Algorithm) -> None:
    """Trajectories cut over micro-batches included; several epochs, so that ratios move. Adam
    blows rounding up where a gradient is nearly 0."""
    results = []
    start = weights(trainer(algorithm))
    for max_tokens in (10**6, 40, 1):
        one = trainer(
            algorithm,
            max_tokens_per_microbatch=max_tokens,
            num_epochs_per_batch=2,
            proximal="always",
        )
        metrics = one.update([encoded(), encoded(5)], 1.0)
        results.append((weights(one), metrics))
    for found, metrics in results[1:]:
        moved = (results[0][0] - start).norm()
        assert float((found - results[0][0]).norm() / moved) < 1e-4
        assert metrics["loss"] == pytest.approx(results[0][1]["loss"], rel=1e-3)


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
    trees, old = encoded(), ActionTokens.of(encoded())
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


def test_imitation_is_a_mean_over_the_tokens_of_all_ranks() -> None:
    """As on the first of two ranks, which have the same sequences."""
    sequences = [encode_sequence([1, 2, 3, i], [False, True, True, True]) for i in (4, 5)]
    found = {}
    for num_ranks in (1, 2):
        one = trainer(GRPO(group_size=2))
        one.backend.gather = lambda value, count=num_ranks: [value] * count  # type: ignore
        gradients: list[torch.Tensor] = []
        one.backend.step = lambda scale, kept=gradients, own=one: (  # type: ignore
            kept.extend(p.grad.clone() for p in own.backend.policy.parameters()) or 0.0
        )
        found[num_ranks] = one.imitate(sequences, 1.0), gradients
    (alone, whole), (both, half) = found[1], found[2]
    assert (alone["num_tokens"], both["num_tokens"]) == (6, 12)
    assert both["loss"] == pytest.approx(alone["loss"], rel=1e-12)
    for gradient, part in zip(whole, half, strict=True):
        torch.testing.assert_close(2 * part, gradient)
