"""Advantage estimators other than GRPO's, the length penalty, and off-policy weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentenv.base.errors import ConfigError
from agentenv.base.types import Limit
from agentenv.learners.algorithms.algorithm import Band
from agentenv.learners.algorithms.baselines import DAPO, GRPO, ReinforcePP, leave_one_out
from agentenv.learners.algorithms.credit import advantages_of, soft_length_penalty
from agentenv.learners.trees import minibatch
from agentenv.learners.trees.encoded_tree import encode
from agentenv.learners.trees.minibatch import LeafMap, coefficients, denominator
from tests.learners.flat import grown
from tests.learners.trees import credits_of, truncate


def test_leave_one_out_is_the_mean_of_the_others() -> None:
    rewards = [1.0, 0.0, 0.5, 0.2]
    expected = [r - (sum(rewards) - r) / 3 for r in rewards]
    np.testing.assert_allclose(leave_one_out(rewards), expected)
    assert not leave_one_out([0.7] * 12).any()
    assert not leave_one_out([0.7]).any()


def test_batch_normalization_is_over_the_accepted_groups() -> None:
    """One of equal returns is as far from the mean of an update as its 0 is."""
    trees, algorithm = grown(3), ReinforcePP(group_size=2)
    for node in trees[0].nodes:
        node.reward = 0.5 if node.end else 0.0
    for leaf in trees[1].leaves():
        leaf.end = "failed"
    first, second, third = credits_of(algorithm, trees)
    assert second is None
    (level,) = set(first.advantages[~np.isnan(first.advantages)])
    alone = algorithm.over_update(trees, [None, None, algorithm.credit(trees[2])])
    assert alone[:2] == [None, None]
    flat = []
    for tree, credit in ((trees[0], first), (trees[2], third)):
        own = algorithm.credit(tree).advantages
        for leaf in np.flatnonzero(~np.isnan(credit.advantages)):
            length = sum(len(node.action_ids) for node in tree.path(tree.nodes[leaf]))
            flat += [own[leaf]] * length
    assert level == pytest.approx(-np.mean(flat) / (np.std(flat, ddof=1) + 1e-6))
    assert level != 0
    assert all(c is None or not c.has_signal for c in credits_of(algorithm, trees[:2]))


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0.0), (80, 0.0), (90, -0.5), (100, -1.0), (500, -1.0)]
)
def test_soft_length_penalty(tokens: int, penalty: float) -> None:
    assert soft_length_penalty(tokens, 100, 20) == penalty
    assert soft_length_penalty(tokens, 0, 20) == 0.0


def test_long_trajectories_lose_return() -> None:
    tree = grown(3)[0]
    plain, short = GRPO(group_size=2), GRPO(group_size=2, overlong_tokens=8, overlong_buffer=8)
    leaves = [path.leaf.index for path in tree.trajectories()]
    lengths = np.array([path.num_action_tokens for path in tree.trajectories()])
    loss = plain.credit(tree).returns[leaves] - short.credit(tree).returns[leaves]
    np.testing.assert_allclose(loss, np.minimum(lengths / 8, 1.0))


def test_dapo_filters_trajectories_truncated_by_a_token_limit() -> None:
    tree = grown(3)[0]
    cut = tree.leaves()[0]
    truncate(cut, Limit.RESPONSE_TOKENS)
    assert DAPO(group_size=2).credit(tree).weight[cut.index] == 0
    assert GRPO(group_size=2).credit(tree).weight[cut.index] == 1
    kept = DAPO(group_size=2, truncated={Limit.RESPONSE_TOKENS: "score"})
    assert kept.credit(tree).weight[cut.index] == 1


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 5.0),
        ("seq-mean-token-sum", 2.0),
        ("seq-mean-token-mean", 2.0),
        ("seq-mean-token-sum-norm", 20.0),
    ],
)
def test_denominators_exclude_trajectories_without_tokens(mode: str, expected: float) -> None:
    lengths = np.array([2.0, 0.0, 3.0])
    assert denominator(mode, lengths, 10) == expected
    assert np.isfinite(coefficients(mode, lengths)).all()


def test_importance_is_truncated_and_masked() -> None:
    ratio = np.array([0.1, 1.0, 1.9, 7.0])
    np.testing.assert_allclose(minibatch.token_importance(ratio, 2.0, None), [0.1, 1, 1.9, 2])
    band = Band(low=0.5, high=5.0)
    np.testing.assert_allclose(minibatch.token_importance(ratio, 2.0, band), [0, 1, 1.9, 0])
    far = minibatch.ratios(np.array([900.0, -900.0]), np.zeros(2))
    assert np.isfinite(far).all()


def test_a_sequence_is_masked_by_its_geometric_mean() -> None:
    tree = grown(3)[0]
    leaves = LeafMap([encode(tree, GRPO(group_size=2).credit(tree), 0)])
    shift = np.zeros(len(leaves.node))
    last = leaves.leaf_node[0]
    shift[leaves.node == last] = 3.0
    means = minibatch.sequence_ratios(shift, leaves, lambda x: [x])
    share = (leaves.node == last).sum() / leaves.lengths[0]
    assert means[0] == pytest.approx(np.exp(3.0 * share))
    assert (means[1:] == 1.0).all()
    weights = minibatch.sequence_weights(shift, leaves, Band(low=0.9, high=1.1), lambda x: [x])
    assert weights.tolist() == [0.0] + [1.0] * (len(leaves.lengths) - 1)


def test_effective_sample_size_falls_when_few_tokens_carry_the_weight() -> None:
    ones = np.ones(100)
    even = minibatch.ratio_metrics(minibatch.ratio_moments(ones, ones, None))
    assert even == {"ratio_out_of_band": 0.0, "effective_sample_size": 1.0}
    one = np.full(100, 1e-6)
    one[0] = 100.0
    peaked = minibatch.ratio_metrics(minibatch.ratio_moments(one, ones, None))
    assert peaked["effective_sample_size"] == pytest.approx(0.01, rel=1e-3)
    assert peaked["ratio_out_of_band"] == 1.0
    nothing = minibatch.ratio_metrics(minibatch.ratio_moments(ones[:0], ones[:0], None))
    assert nothing == {}, "what was not measured is not reported"


def raises(returns: np.ndarray) -> np.ndarray:
    raise ValueError("my own bug")


@pytest.mark.parametrize(
    ("estimator", "problem"),
    [
        (raises, r"raises raised ValueError: my own bug \(test_credit_estimators\.py, line \d+\)"),
        (lambda returns: returns * np.nan, r"returned \[nan, nan\] for the returns \[0\.0, 1\.0\]"),
        (lambda returns: returns[:-1], r"returned \[0\.0\] for"),
        (lambda returns: returns.mean(), r"returned 0\.5 for"),
        (lambda returns, index: returns, "missing 1 required positional argument"),
    ],
)
def test_an_estimator_has_a_finite_advantage_for_each_return(estimator: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        advantages_of(estimator, np.array([0.0, 1.0]))


def test_advantages_can_be_a_list() -> None:
    assert advantages_of(lambda returns: [1, -1], np.array([1.0, 0.0])).tolist() == [1.0, -1.0]
