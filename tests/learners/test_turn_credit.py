"""The soft credit of a turn is d * (V(node) - V(root)) / s, as docs/algorithms.md has it."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from agentenv.base.tree import TrajectoryTree
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.credit import EPSILON, counted_leaves
from tests.learners.trees import random_tree


def values(tree: TrajectoryTree, returns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """By node, computed directly: the mean return of the leaves below and their number."""
    sums, number = np.zeros((2, len(tree.nodes)))
    for leaf in tree.leaves():
        if np.isnan(returns[leaf.index]):
            continue
        for node in tree.path(leaf):
            sums[node.index] += returns[leaf.index]
            number[node.index] += 1
    return sums / np.maximum(number, 1), number


@pytest.mark.parametrize("seed", range(30))
def test_soft_credit_is_the_value_of_a_turn_over_that_of_the_question(seed: int) -> None:
    tree = random_tree(Random(seed), num_leaves=12)
    credit = ARPO(group_size=len(tree.leaves())).credit(tree)
    assert credit is not None
    value, number = values(tree, credit.returns)
    returns = [credit.returns[leaf.index] for leaf in counted_leaves(tree, credit)]
    spread = np.std(returns, ddof=1) + EPSILON
    expected = number * (value - value[0]) / spread
    assert np.allclose(credit.adv_pos + credit.adv_neg, expected)
    assert np.array_equal(credit.weight, number)
    assert credit.has_signal
