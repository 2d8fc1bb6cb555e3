"""Laws of the credits of turns: Tree-GRPO, GiGPO, and those of `rescue`."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Task
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.algorithms.credit import TreeCredit
from agentenv.learners.algorithms.gigpo import GiGPO
from agentenv.learners.algorithms.tree_grpo import TreeGRPO
from benchmarks.experiments.rescue import Rescue
from tests.learners.trees import ANY_TREE

SIZE = 2
PRESETS = {
    "rescue": Rescue(group_size=SIZE, initial_rollouts=SIZE),
    "tree_grpo": TreeGRPO(group_size=SIZE),
    "gigpo": GiGPO(group_size=SIZE, evidence=0.0),
}
presets = pytest.mark.parametrize("algorithm", PRESETS.values(), ids=PRESETS)


def credit_of(algorithm: Algorithm, tree: TrajectoryTree) -> TreeCredit:
    found = algorithm.credit(tree)
    assert found is not None
    return found


def advantages(algorithm: Algorithm, tree: TrajectoryTree) -> np.ndarray:
    """A_n of each node that is trained, nan elsewhere."""
    credit = credit_of(algorithm, tree)
    with np.errstate(invalid="ignore"):
        return np.where(
            credit.weight > 0, (credit.adv_pos + credit.adv_neg) / credit.weight, np.nan
        )


def flat_tree(seed: int, count: int = 6) -> TrajectoryTree:
    rng = Random(seed)
    nodes = [Node(0, None, observation_ids=[7])]
    for branch in range(count):
        parent = 0
        for turn in range(3):
            node = Node(len(nodes), parent, str(branch), action_ids=[1, 2], logprobs=[-1.0] * 2)
            node.entropies = [rng.random()] * 2
            if turn < 2:
                node.observation_ids = [branch, turn, 9]
            else:
                node.end, node.reward = "terminated", rng.choice([0.0, 1.0])
            parent = node.index
            nodes.append(node)
    return TrajectoryTree(Task("t", "e", "q", ("a",)), nodes=nodes, num_roots=count)


def shuffled(tree: TrajectoryTree, seed: int) -> tuple[TrajectoryTree, list[int]]:
    """The same tree with its nodes in another order that keeps parents first; old indices."""
    rng, order, left = Random(seed), [0], list(range(1, len(tree.nodes)))
    while left:
        free = [one for one in left if tree.nodes[one].parent in order]
        order.append(chosen := rng.choice(free))
        left.remove(chosen)
    place = {old: new for new, old in enumerate(order)}
    nodes = []
    for old in order:
        values = {name: getattr(tree.nodes[old], name) for name in Node.__struct_fields__}
        parent = values["parent"]
        values |= {"index": place[old], "parent": None if parent is None else place[parent]}
        nodes.append(Node(**values))
    return TrajectoryTree(tree.task, nodes=nodes, num_roots=tree.num_roots), order


@given(seed=st.integers(0, 1000))
def test_a_flat_tree_has_the_credit_of_grpo(seed: int) -> None:
    tree = flat_tree(seed)
    expected, found = (credit_of(one, tree) for one in (GRPO(group_size=SIZE), PRESETS["rescue"]))
    np.testing.assert_allclose(found.adv_pos[1:], expected.adv_pos[1:], atol=1e-12)
    np.testing.assert_allclose(found.adv_neg[1:], expected.adv_neg[1:], atol=1e-12)
    np.testing.assert_array_equal(found.weight[1:], expected.weight[1:])


@presets
@given(tree=ANY_TREE, seed=st.integers(0, 100))
def test_the_order_of_nodes_changes_nothing(
    algorithm: Algorithm, tree: TrajectoryTree, seed: int
) -> None:
    other, order = shuffled(tree, seed)
    expected, found = credit_of(algorithm, tree), credit_of(algorithm, other)
    for name in ("adv_pos", "adv_neg", "weight"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name)[order], atol=1e-9)


@presets
@given(tree=ANY_TREE)
def test_a_failed_leaf_changes_nothing(algorithm: Algorithm, tree: TrajectoryTree) -> None:
    before = credit_of(algorithm, tree)
    tree.add(tree.root, branch="9", action_ids=[1], logprobs=[-1.0], entropies=[0.3])
    tree.nodes[-1].end, tree.nodes[-1].error, tree.nodes[-1].reward = "failed", "x", 9.0
    after = credit_of(algorithm, tree)
    np.testing.assert_array_equal(after.adv_pos[:-1], before.adv_pos)
    np.testing.assert_array_equal(after.adv_neg[:-1], before.adv_neg)
    assert after.weight[-1] == 0


@presets
@given(tree=ANY_TREE)
def test_equal_returns_give_exactly_zero(algorithm: Algorithm, tree: TrajectoryTree) -> None:
    for node in tree.nodes:
        node.reward = 0.7 if node.end is not None else 0.0
    if isinstance(algorithm, GiGPO):  # lengths differ, and so do discounted rewards
        algorithm = GiGPO(group_size=SIZE, discount=1.0, evidence=0.0)
    credit = credit_of(algorithm, tree)
    np.testing.assert_allclose(credit.adv_pos, 0, atol=1e-15)
    np.testing.assert_allclose(credit.adv_neg, 0, atol=1e-15)


@given(ANY_TREE)
def test_tree_grpo_adds_the_comparison_within_a_root(tree: TrajectoryTree) -> None:
    paths = [path.path for path in tree.trajectories()]
    returns = np.array([sum(node.reward for node in path) for path in paths])
    roots = np.array([path[1].index for path in paths])

    def normal(values: np.ndarray) -> np.ndarray:
        if len(values) < 2 or np.ptp(values) == 0:
            return np.zeros(len(values))
        return (values - values.mean()) / (values.std(ddof=1) + 1e-6)

    expected = normal(returns)
    for root in set(roots):
        expected[roots == root] += normal(returns[roots == root])
    credit = credit_of(TreeGRPO(group_size=SIZE), tree)
    np.testing.assert_allclose(
        credit.advantages[[path[-1].index for path in paths]], expected, atol=1e-9
    )


def test_gigpo_compares_turns_from_the_same_state_across_roots() -> None:
    """Four roots; two of them reach the state [5], where one acts right and one wrong."""
    nodes = [Node(0, None, observation_ids=[7])]
    for branch, (seen, reward) in enumerate([([5], 1.0), ([5], 0.0), ([6], 1.0), ([8], 0.0)]):
        first = Node(len(nodes), 0, str(branch), action_ids=[1], observation_ids=seen)
        nodes += [first]
        last = Node(len(nodes), first.index, str(branch), action_ids=[2], reward=reward)
        last.end = "terminated"
        nodes += [last]
    tree = TrajectoryTree(Task("t", "e", "q", ("a",)), nodes=nodes, num_roots=4)
    plain = advantages(GRPO(group_size=4), tree)
    for evidence, share in ((0.0, 1.0), (2.0, 0.5)):
        found = advantages(GiGPO(group_size=4, evidence=evidence, discount=0.5), tree) - plain
        assert found[[2, 4]] == pytest.approx([0.5 * share, -0.5 * share])
        assert found[[6, 8]] == pytest.approx([0.0, 0.0]), "alone in their states"
        first = 4 / (4 + evidence)  # all four begin in one state, with Q = 0.5 r
        assert found[[1, 3, 5, 7]] == pytest.approx(np.array([1, -1, 1, -1]) * 0.25 * first)
    nodes[5].info["state_key"] = "five"
    nodes[1].info["state_key"] = "five"
    found = advantages(GiGPO(group_size=4, evidence=0.0, discount=0.5), tree) - plain
    assert found[[2, 4]] == pytest.approx([0.0, 0.0]), "the key of the environment decides"
