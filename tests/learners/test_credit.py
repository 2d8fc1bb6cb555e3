from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.base.types import Limit
from agentenv.learners.algorithms.algorithm import TRUNCATED
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.credit import group_advantages, tree_credit
from tests.learners.trees import ANY_TREE, random_tree, truncate


def test_equal_and_single_rewards_give_exactly_zero_advantages() -> None:
    assert not group_advantages([0.7] * 12).any()
    assert not group_advantages([0.7]).any()
    assert group_advantages([]).shape == (0,)


@given(st.lists(st.floats(-2, 2), min_size=2, max_size=16))
def test_advantages_are_centered(rewards: list[float]) -> None:
    for norm_by_std in (True, False):
        advantages = group_advantages(rewards, norm_by_std=norm_by_std)
        assert abs(advantages.sum()) < 1e-6
        assert np.isfinite(advantages).all()


@given(ANY_TREE)
def test_credit_is_the_sum_over_the_leaves_below(tree) -> None:
    credit = tree_credit(tree, group_size=1)
    paths = list(tree.trajectories())
    advantages = group_advantages([path.reward for path in paths])
    for node in tree.nodes:
        below = [
            a
            for path, a in zip(paths, advantages, strict=True)
            if any(n is node for n in path.path)
        ]
        assert credit.weight[node.index] == len(below)
        assert credit.adv_pos[node.index] == pytest.approx(sum(a for a in below if a > 0))
        assert credit.adv_neg[node.index] == pytest.approx(sum(a for a in below if a < 0))
    assert credit.has_signal == bool(advantages.any())


def test_failed_leaves_are_in_no_group() -> None:
    tree = random_tree(Random(1), num_leaves=6)
    leaf = tree.leaves()[0]
    before = len(tree.leaves())
    leaf.end, leaf.error, leaf.reward = "failed", "x", -100.0
    credit = tree_credit(tree, group_size=before)
    assert credit.weight[leaf.index] == 0
    assert credit.weight[0] == before - 1


@pytest.mark.parametrize("mode", ["score", "zero", "mask"])
def test_truncated_leaves_are_credited_by_their_limit(mode: str) -> None:
    tree = random_tree(Random(2), num_leaves=6)
    for leaf in tree.leaves():
        leaf.reward = 1.0
    leaf = tree.leaves()[0]
    truncate(leaf, Limit.TURNS)
    leaf.reward = -3.0
    credit = tree_credit(tree, group_size=1, truncated={Limit.TURNS: mode})
    returns = [path.reward for path in tree.trajectories()]
    if mode == "zero":
        returns[0] = 0.0
    if mode == "mask":
        assert credit.weight[leaf.index] == 0
        expected = group_advantages(returns[1:]).min()
    else:
        expected = group_advantages(returns)[0]
    assert credit.adv_neg[[n.index for n in tree.leaves()]].min() == pytest.approx(expected)


def test_a_short_group_is_dropped() -> None:
    tree = random_tree(Random(3), num_leaves=6)
    count = len(tree.leaves())
    truncate(tree.leaves()[0], Limit.SECONDS)
    assert tree_credit(tree, group_size=count, truncated=TRUNCATED) is not None  # 5 of 6
    truncate(tree.leaves()[1], Limit.SECONDS)
    assert tree_credit(tree, group_size=count, truncated=TRUNCATED) is None  # 4 of 6
    for leaf in tree.leaves():
        leaf.end = "failed"
    assert tree_credit(tree, group_size=1) is None


def test_omitted_limits_keep_their_default() -> None:
    tree = random_tree(Random(3), num_leaves=6)
    leaf = tree.leaves()[0]
    truncate(leaf, Limit.SECONDS)
    for algorithm in (ARPO(group_size=6), ARPO(group_size=6, truncated={Limit.TURNS: "zero"})):
        credit = algorithm.credit(tree) or pytest.fail("dropped")
        assert credit.weight[leaf.index] == 0
