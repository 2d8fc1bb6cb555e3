"""The loss of each algorithm on trees: maps of leaves, shared credit, extreme values."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from agentenv.learners.algorithms.aepo import AEPO
from agentenv.learners.algorithms.algorithm import Algorithm, Band
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.baselines import (
    CISPO,
    DAPO,
    GRPO,
    GSPO,
    RLOO,
    DrGRPO,
    ReinforcePP,
)
from agentenv.learners.trees.encoded_tree import ActionTokens, encode
from agentenv.learners.trees.minibatch import LeafMap, MiniBatch
from tests.learners.flat import figures, grown, tree_form
from tests.learners.trees import credits_of

NARROW = Band(low=0.8, high=1.3)
ALGORITHMS: dict[str, Algorithm] = {
    "grpo": GRPO(group_size=2), "grpo without dual clip": GRPO(group_size=2, dual_clip=math.inf),
    "grpo, dual clip often": GRPO(group_size=2, dual_clip=1.1),
    "grpo as printed": GRPO(group_size=2, aggregation="seq-mean-token-mean", clip_high=0.2),
    "dr_grpo": DrGRPO(group_size=2), "dapo": DAPO(group_size=2), "rloo": RLOO(group_size=2),
    "reinforce_pp": ReinforcePP(group_size=2),
    "gspo": GSPO(group_size=2, clip_low=0.1, clip_high=0.1),
    "gspo, nothing clipped": GSPO(group_size=2, clip_low=0.9, clip_high=99.0),
    "gspo with its own clips": GSPO(group_size=2), "cispo": CISPO(group_size=2),
    "arpo": ARPO(group_size=2), "aepo": AEPO(group_size=2),
    "aepo without dual clip": AEPO(group_size=2, dual_clip=math.inf),
    "aepo, clipping only": AEPO(group_size=2, entropy_advantage=0.0),
    "aepo, advantage only": AEPO(group_size=2, entropy_balanced_clipping=False),
    "token mask": ARPO(group_size=2, token_mask=NARROW),
    "sequence mask": ARPO(group_size=2, sequence_mask=NARROW),
    "sequence mask in gspo": GSPO(group_size=2, sequence_mask=NARROW),
    "entropy bonus": ARPO(group_size=2, entropy_bonus=0.01),
    "kl in the reward": ARPO(group_size=2, kl_reward=0.1),
    "kl in the reward, by sequence": RLOO(group_size=2, kl_reward=0.1),
}  # fmt: skip
for kind, algorithm in (("k1", ARPO), ("abs", ARPO), ("k2", DrGRPO), ("k3", DrGRPO)):
    ALGORITHMS[f"kl {kind}"] = algorithm(group_size=2, kl_loss=0.3, kl_kind=kind)


def test_hard_sharing_gives_shared_tokens_the_mean() -> None:
    """ARPO's hard setting: mean advantage over the leaves below, counted as often."""
    trees = grown(6)
    soft, hard = ARPO(group_size=2), ARPO(group_size=2, sharing="hard")
    credits = credits_of(soft, trees)
    encoded = [encode(tree, credit, 0) for tree, credit in zip(trees, credits, strict=True)]
    leaves, tokens = LeafMap(encoded), ActionTokens(encoded)
    mean = leaves.to_tokens(leaves.advantages) / leaves.to_tokens(np.ones(len(leaves.lengths)))
    found = figures(hard, trees).minibatch
    np.testing.assert_allclose(found.adv_pos + found.adv_neg, mean * tokens.weight, atol=1e-12)
    assert not (found.adv_pos * found.adv_neg).any()
    weighted = figures(ARPO(group_size=2, sharing="hard", aggregation="seq-mean-token-mean"), trees)
    np.testing.assert_allclose(
        weighted.minibatch.adv_pos + weighted.minibatch.adv_neg,
        mean * weighted.minibatch.weight,
        atol=1e-12,
    )


def test_the_leaf_map_rebuilds_the_encoded_credit() -> None:
    for sharing in ("soft", "hard"):
        algorithm = ARPO(group_size=2, sharing=sharing)
        trees = grown(8)
        credits = credits_of(algorithm, trees)
        encoded = [encode(tree, credit, 0) for tree, credit in zip(trees, credits, strict=True)]
        leaves, tokens = LeafMap(encoded), ActionTokens(encoded)
        built = leaves.credit(leaves.advantages, np.ones(len(leaves.lengths)), sharing)
        for ours, expected in zip(
            built, (tokens.adv_pos, tokens.adv_neg, tokens.weight), strict=True
        ):
            np.testing.assert_allclose(ours, expected, atol=1e-12)
        returns = [path.reward for tree in trees for path in tree.trajectories()]
        assert sorted(leaves.returns) == pytest.approx(sorted(returns))
        lengths = [path.num_action_tokens for tree in trees for path in tree.trajectories()]
        assert sorted(leaves.lengths) == sorted(lengths)


def test_the_maps_are_transposed() -> None:
    encoded = [encode(t, GRPO(group_size=2).credit(t), 0) for t in grown(9)]
    leaves = LeafMap(encoded)
    rng = np.random.default_rng(0)
    tokens, values = rng.normal(size=len(leaves.node)), rng.normal(size=len(leaves.lengths))
    assert leaves.to_leaves(tokens) @ values == pytest.approx(tokens @ leaves.to_tokens(values))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_equal_returns_give_exactly_zero_advantages(name: str) -> None:
    trees = grown(5, count=1)
    for node in trees[0].nodes:
        node.reward = 0.7 if node.end else 0.0
    credit = credits_of(ALGORITHMS[name], trees)[0]
    assert not credit.has_signal


@pytest.mark.parametrize("name", ALGORITHMS)
def test_extreme_log_probs_give_finite_losses_and_gradients(name: str) -> None:
    algorithm = ALGORITHMS[name]
    trees = grown(4, count=1)
    found = figures(algorithm, trees)
    theta = found.theta.detach().clone()
    theta[::3] += 400.0
    theta[1::3] -= 400.0
    found.theta = theta.float().requires_grad_()
    loss = tree_form(algorithm, found)
    loss.backward()
    assert loss.isfinite()
    assert found.theta.grad.isfinite().all()


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("kept", [0, 1])
def test_the_loss_of_one_or_no_valid_token_is_finite(name: str, kept: int) -> None:
    algorithm = ALGORITHMS[name]
    tree = grown(4, count=1)[0]
    for number, node in enumerate(tree.nodes[1:]):
        size = kept if number == 0 else 0
        node.action_ids, node.logprobs = node.action_ids[:size], node.logprobs[:size]
        node.entropies, node.version_spans = node.entropies[:size], []
    found = figures(algorithm, [tree])
    assert len(found.theta) == kept
    loss = tree_form(algorithm, found)
    assert loss.isfinite()
    assert kept or not loss


def test_missing_entropies_raise_an_error_when_read() -> None:
    from agentenv.base.errors import DataError

    trees = grown(4, count=1)
    encoded = [encode(tree, GRPO(group_size=2).credit(tree), 0) for tree in trees]
    tokens = ActionTokens(encoded)
    missing = np.full_like(tokens.entropies, np.nan)
    args = (encoded, tokens, tokens.behavior, missing, None)
    all_of_them = np.ones(len(missing), np.bool_)
    with pytest.raises(DataError, match="entropies"):
        MiniBatch(*args, AEPO(group_size=2), lambda x: [x], all_of_them)
    for algorithm in (AEPO(group_size=2, entropy_advantage=0.0), GRPO(group_size=2)):
        batch = MiniBatch(*args, algorithm, lambda x: [x], all_of_them).loss_batch(
            np.arange(len(missing)), torch.zeros(1, dtype=torch.float64), None
        )
        loss, metrics = algorithm.loss(batch, batch.proximal, torch.zeros(len(missing)))
        assert loss.isfinite()
        assert all(value.isfinite() for value in metrics.values())
