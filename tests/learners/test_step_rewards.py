"""Rewards of a step: kept by the tree, and credited to the turns that could earn them."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.base.errors import ConfigError
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Limit, Task
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.baselines import GRPO, GSPO, ReinforcePP, leave_one_out
from agentenv.learners.algorithms.credit import tree_credit
from tests.learners.trees import ANY_TREE, random_tree, truncate


def with_rewards(tree: TrajectoryTree, seed: int) -> TrajectoryTree:
    """A reward at every turn."""
    rng = Random(seed)
    for node in tree.nodes[1:]:
        node.reward = rng.choice([-1.0, 0.0, 0.5, 2.0])
    return tree


def without(tree: TrajectoryTree) -> TrajectoryTree:
    """Rewards at the leaves only."""
    for node in tree.nodes:
        if node.end is None:
            node.reward = 0.0
    return tree


@given(ANY_TREE)
def test_rewards_only_at_the_leaves_are_credited_like_returns(tree: TrajectoryTree) -> None:
    whole, to_go = (
        tree_credit(without(tree), group_size=1, step_rewards=kind) for kind in ("return", "to_go")
    )
    for name in ("adv_pos", "adv_neg", "weight", "returns", "advantages"):
        np.testing.assert_array_equal(getattr(whole, name), getattr(to_go, name))


@given(ANY_TREE, st.integers(0, 1000))
def test_a_turn_is_credited_with_its_reward_to_go_minus_the_mean_of_its_depth(
    tree: TrajectoryTree, seed: int
) -> None:
    """From the definition: sum over the leaves below, one by one."""
    credit = tree_credit(with_rewards(tree, seed), group_size=1, step_rewards="to_go")
    paths = [path.path for path in tree.trajectories()]
    returns = np.array([sum(node.reward for node in path) for path in paths])
    scale = 1 / (returns.std(ddof=1) + 1e-6)
    expected = np.zeros(len(tree.nodes))
    for path, whole in zip(paths, returns, strict=True):
        for depth, node in enumerate(path):
            past = [sum(n.reward for n in other[:depth]) for other in paths if len(other) > depth]
            own = sum(n.reward for n in path[:depth])
            expected[node.index] += scale * (whole - returns.mean() - own + np.mean(past))
    if np.ptp(returns) == 0:
        expected[:] = 0
    np.testing.assert_allclose(credit.adv_pos + credit.adv_neg, expected, atol=1e-6)


def test_a_constant_advantage_of_equal_returns_is_that_of_each_turn() -> None:
    tree = with_rewards(random_tree(Random(3), num_leaves=4), 0)
    for path in tree.trajectories():
        path.leaf.reward += 1.0 - path.reward
    found = tree_credit(
        tree, group_size=4, estimator=lambda returns: returns - 0.5, step_rewards="to_go"
    )
    np.testing.assert_allclose(found.adv_pos, 0.5 * found.weight)


def test_truncated_leaves_that_count_as_zero_have_no_rewards() -> None:
    tree = with_rewards(random_tree(Random(2), num_leaves=6), 0)
    for leaf in tree.leaves():
        truncate(leaf, Limit.TURNS)
    credit = tree_credit(tree, group_size=1, truncated={Limit.TURNS: "zero"}, step_rewards="to_go")
    assert not credit.has_signal


def episode(rng: Random, chances: list[float]) -> TrajectoryTree:
    """Eight trajectories of two turns, each with an action of 0 or 1 and its own reward; the
    first one's is noise of no use."""
    nodes = [Node(0, None)]
    for branch in range(8):
        for turn in range(2):
            action = int(rng.random() < chances[turn])
            reward = float(action) if turn else 3.0 * action
            parent = 0 if turn == 0 else len(nodes) - 1
            end = "terminated" if turn else None
            one = Node(len(nodes), parent, str(branch), action_ids=[action], reward=reward, end=end)
            nodes.append(one)
    return TrajectoryTree(Task("t", "env", "q", ("a",)), nodes=nodes, num_roots=8)


def test_rewards_to_go_have_the_gradient_of_the_return_with_less_variance() -> None:
    """With respect to the probabilities of both actions, over 2,000 groups; the true gradient is
    known."""
    rng, chances = Random(0), [0.5, 0.4]
    found: dict[str, list[np.ndarray]] = {"return": [], "to_go": []}
    for _ in range(2000):
        tree = episode(rng, chances)
        for kind, gradients in found.items():
            credit = tree_credit(tree, group_size=8, estimator=leave_one_out, step_rewards=kind)
            gradient = np.zeros(2)
            for node in tree.nodes[1:]:
                turn, action = int(node.end is not None), node.action_ids[0]
                score = action - chances[turn]  # of a logit
                gradient[turn] += score * (credit.adv_pos + credit.adv_neg)[node.index] / 8
            gradients.append(gradient)
    true = np.array([3 * 0.25, 0.24])
    for gradients in found.values():
        error = np.std(gradients, axis=0) / 2000**0.5
        assert (abs(np.mean(gradients, axis=0) - true) < 3.5 * error).all()
    variances = {kind: np.var(gradients, axis=0) for kind, gradients in found.items()}
    assert variances["to_go"][1] < 0.3 * variances["return"][1]
    assert variances["to_go"][0] == pytest.approx(variances["return"][0])


def test_algorithms_with_one_advantage_per_trajectory_refuse_rewards_to_go() -> None:
    assert ARPO(step_rewards="to_go").step_rewards == "to_go"
    for build in (
        lambda: GSPO(step_rewards="to_go"),
        lambda: ReinforcePP(step_rewards="to_go"),
        lambda: GRPO(step_rewards="to_go", aggregation="seq-mean-token-mean"),
        lambda: ARPO(step_rewards="to_go", kl_reward=0.1),
    ):
        with pytest.raises(ConfigError, match=r"step_rewards.*step_rewards"):
            build()
