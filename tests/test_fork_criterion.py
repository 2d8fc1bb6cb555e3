"""A rise measured against its own spread, beside the paper's criterion."""

from __future__ import annotations

import math

import pytest

from agentenv.plan import ARPOPlan, relative_rise, rise_score, seen_rises
from agentenv.tree import Node, TrajectoryTree
from agentenv.types import Task

V = 100
UNIT = math.log(V)


def make_tree(rises: list[float], base: float = 0.3) -> tuple[TrajectoryTree, Node]:
    """One trajectory that was asked at each tool result; the last one is open."""
    tree = TrajectoryTree(Task("t", "toy", "q", ("a",)), num_started=1, num_roots=1)
    node = tree.add(None, observation_ids=[1])
    for entropy in [base, *(base + rise for rise in rises)]:
        node = tree.add(
            node,
            branch="0",
            action_ids=[1, 2],
            entropies=[entropy * UNIT] * 2,
            observation_ids=[3],
            num_forks=0,
        )
    node.num_forks = None
    return tree, node


def plan(**fields: object) -> ARPOPlan:
    return ARPOPlan(group_size=8, initial_rollouts=4, vocab_size=V, **fields)  # type: ignore[arg-type]


def test_rises_are_read_from_the_tree_once_per_fork_point() -> None:
    tree, node = make_tree([0.01, -0.02])
    tree.add(tree.nodes[2], branch="0.2+1", entropies=[0.9 * UNIT])  # a sibling of a seen turn
    tree.add(node, branch="0", entropies=[0.9 * UNIT])  # follows a tool result nobody asked about
    assert seen_rises(tree, 20, V) == pytest.approx([0.01, -0.02])


def test_a_score_is_the_distance_from_the_mean_in_spreads() -> None:
    seen = [0.01, 0.03] * 50
    assert rise_score(0.05, seen, 0.02) == pytest.approx(2.94, rel=0.02)
    assert rise_score(0.03, [0.01], 0.02) == pytest.approx(math.sqrt(1.5))
    assert rise_score(0.02, [], 0.02) == 0.0
    assert rise_score(-5.0, seen, 0.02) == -3.0
    assert math.isfinite(rise_score(0.5, [0.0] * 1000, 1e-6))


def test_the_papers_signal_is_inert_where_the_zscore_decides() -> None:
    """dH of 0.02 in ln V, as measured on the quick start: 0.504 against 0.7."""
    tree, node = make_tree([0.0, -0.02, 0.02, 0.0])
    after = [(0.3 + 0.02) * UNIT] * 2
    assert plan().fork_probability(tree, node, after) == pytest.approx(0.504)
    zscore = plan(criterion="zscore")
    assert zscore.fork_probability(tree, node, after) > 0.7
    below = zscore.fork_probability(tree, node, [(0.3 - 0.02) * UNIT] * 2)
    assert below < 0.3


def test_a_steady_fall_is_not_taken_for_certainty() -> None:
    """Where entropy is always lower after a result, an average fall is no reason not to fork."""
    tree, node = make_tree([-0.2] * 12)
    after = [(0.3 - 0.2) * UNIT] * 2
    assert plan(criterion="zscore").fork_probability(tree, node, after) == pytest.approx(0.5)


def test_a_decision_depends_on_the_tree_alone() -> None:
    trees = [make_tree([0.01, -0.02, 0.03]) for _ in range(2)]
    zscore = plan(criterion="zscore")
    for _ in range(3):
        zscore.fork_probability(*make_tree([0.3, -0.3]), [0.1])
    first, second = (zscore.fork_probability(tree, node, [1.0]) for tree, node in trees)
    assert first == second


def test_a_relative_rise_has_no_scale_of_its_own() -> None:
    """It decides alike when training has made all entropies a hundred times smaller."""
    assert relative_rise(0.03, 0.01) == pytest.approx(0.5)
    assert relative_rise(0.0003, 0.0001) == pytest.approx(0.5)
    assert relative_rise(0.0, 0.2) == -1.0
    assert relative_rise(0.0, 0.0) == 0.0
    relative = plan(criterion="relative", entropy_weight=0.4)
    for base in (0.3, 0.003):
        tree, node = make_tree([], base)
        assert relative.fork_probability(tree, node, [3 * base * UNIT]) == pytest.approx(0.7)
        assert relative.fork_probability(tree, node, [base / 3 * UNIT]) == pytest.approx(0.3)
        assert plan().fork_probability(tree, node, [base * UNIT]) == pytest.approx(0.5)
