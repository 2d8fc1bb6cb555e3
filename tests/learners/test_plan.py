"""Rollout plans against trees built by hand."""

from __future__ import annotations

import math
from random import Random

import pytest

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Task
from agentenv.contract.plan import Independent
from agentenv.learners.algorithms.aepo import AEPO, AEPOPlan, consecutive_forks, penalty_factor
from agentenv.learners.algorithms.arpo import ARPO, ARPOPlan, relative_rise

V = 100
UNIT = math.log(V)


class Draws(Random):
    """A generator that returns the given numbers."""

    def __init__(self, *numbers: float) -> None:
        super().__init__(0)
        self.numbers = list(numbers)

    def random(self) -> float:
        return self.numbers.pop(0)


def make_tree(*turns: float, started: int = 1, roots: int = 1) -> tuple[TrajectoryTree, Node]:
    """One branch whose turns have the given normalized entropies; returns its last node."""
    tree = TrajectoryTree(Task("t", "toy", "q", ("a",)), num_started=started, num_roots=roots)
    node = tree.add(None, observation_ids=[1])
    for entropy in turns:
        node = tree.add(
            node, branch="0", action_ids=[1, 2], entropies=[entropy * UNIT] * 2, observation_ids=[3]
        )
    return tree, node


def arpo(**keys: object) -> ARPOPlan:
    return ARPOPlan(ARPO(group_size=8, **keys), V)


def test_independent_starts_only_its_group() -> None:
    tree, node = make_tree(0.5)
    plan = Independent(6)
    assert plan.on_start(tree) == 6
    assert plan.on_fork_point(tree, node, [1.0], Random(0)) == 0
    assert plan.on_leaf_end(tree, node) == 0


def test_arpo_forks_with_probability_alpha_plus_beta_times_the_rise() -> None:
    tree, node = make_tree(0.3)
    plan = arpo(entropy_weight=0.5)
    after = [0.5 * UNIT] * 2  # a rise of 0.2: P = 0.5 + 0.5 * 0.2 = 0.6
    assert plan.fork_probability(tree, node, after) == pytest.approx(0.6)
    assert plan.on_fork_point(tree, node, after, Draws(0.59)) == 1
    assert plan.on_fork_point(tree, node, after, Draws(0.61)) == 0


def test_arpo_reads_only_the_mean_over_the_window() -> None:
    tree, node = make_tree(0.0)
    plan = arpo(entropy_weight=1.0, base_probability=0.0, entropy_window=2)
    assert plan.fork_probability(tree, node, [0.2 * UNIT, 0.4 * UNIT, 99.0]) == pytest.approx(0.3)


def test_arpo_threshold_mode_forks_above_tau_only() -> None:
    tree, node = make_tree(0.3)
    plan = arpo(fork_rule="threshold", beam_size=3)
    assert plan.on_fork_point(tree, node, [0.31 * UNIT], Random(0)) == 2
    assert plan.on_fork_point(tree, node, tree.nodes[1].entropies, Random(0)) == 0


def test_a_fork_inherits_the_baseline_of_its_root() -> None:
    tree, node = make_tree(0.1, 0.9)
    fork = tree.add(node, branch="0.2+1", entropies=[0.9 * UNIT], observation_ids=[3])
    plan = arpo(entropy_weight=1.0, base_probability=0.0)
    assert plan.fork_probability(tree, fork, [0.5 * UNIT]) == pytest.approx(0.4)


def test_forks_stop_at_the_budget_and_the_rest_starts_at_once() -> None:
    tree, node = make_tree(0.3, started=8)
    plan = arpo(base_probability=1.0)
    assert plan.on_fork_point(tree, node, [0.3], Random(0)) == 0
    tree.num_started, tree.num_live = 5, 1
    assert plan.on_leaf_end(tree, node) == 0
    tree.num_live = 0
    assert plan.on_leaf_end(tree, node) == 3


def test_a_relative_rise_is_scale_invariant() -> None:
    """It decides alike when training has made all entropies a hundred times smaller."""
    assert relative_rise(0.03, 0.01) == pytest.approx(0.5)
    assert relative_rise(0.0003, 0.0001) == pytest.approx(0.5)
    assert relative_rise(0.0, 0.2) == -1.0
    assert relative_rise(0.0, 0.0) == 0.0
    relative = arpo(fork_criterion="relative", entropy_weight=0.4)
    for base in (0.3, 0.003):
        tree, node = make_tree(base)
        assert relative.fork_probability(tree, node, [3 * base * UNIT]) == pytest.approx(0.7)
        assert relative.fork_probability(tree, node, [base / 3 * UNIT]) == pytest.approx(0.3)
        assert arpo().fork_probability(tree, node, [base * UNIT]) == pytest.approx(0.5)


def test_the_signal_of_the_paper_is_negligible_at_the_published_weight() -> None:
    """dH of 0.02 in ln V, as measured on the quick start."""
    tree, node = make_tree(0.3, 0.3)
    assert arpo().fork_probability(tree, node, [0.32 * UNIT] * 2) == pytest.approx(0.504)


def aepo(**keys: object) -> AEPOPlan:
    return AEPOPlan(AEPO(group_size=16, **keys), V)


@pytest.mark.parametrize(
    ("root", "tools", "num_roots"),
    [
        (0.2, (0.2, 0.2), 8),  # no difference: half of 16
        (0.4, (0.1, 0.3), 14),  # 16 * sigmoid(10 * 0.2) = 14.09
        (0.1, (0.2, 0.4), 2),  # 16 * sigmoid(10 * -0.2) = 1.91
        (0.5, (), 8),  # no tool turn: as configured
        (9.0, (0.0,), 16),
        (0.0, (9.0,), 1),
    ],
)
def test_aepo_splits_the_budget_by_the_probe(
    root: float, tools: tuple[float, ...], num_roots: int
) -> None:
    tree, leaf = make_tree(root, *tools)
    leaf.end = "terminated"
    plan = aepo()
    assert plan.on_start(tree) == 1
    assert plan.num_roots(tree, leaf) == num_roots
    assert plan.on_leaf_end(tree, leaf) == (num_roots - 1 or 15)  # after a lone root all the rest


def test_aepo_never_plans_more_roots_than_the_forks_of_the_probe_leave() -> None:
    tree, leaf = make_tree(0.9, 0.1, started=7)
    leaf.end = "terminated"
    assert aepo().num_roots(tree, leaf) == 10


def test_aepo_lets_the_probe_fork_on_a_provisional_budget() -> None:
    tree, node = make_tree(0.3, started=8)
    plan = aepo(base_probability=1.0)
    assert plan.on_fork_point(tree, node, [0.3 * UNIT], Random(0)) == 1
    tree.num_started = 9  # the probe and 16 - 8 forks
    assert plan.on_fork_point(tree, node, [0.3 * UNIT], Random(0)) == 0


def test_aepo_damps_runs_of_forks_on_a_path() -> None:
    tree, node = make_tree(0.3, 0.3, 0.3, roots=2)
    plan = aepo(branch_penalty=0.2)
    first, second = tree.nodes[1:3]
    first.num_forks, second.num_forks = 1, 1
    assert consecutive_forks(tree, node) == 2
    assert plan.fork_probability(tree, node, [0.3 * UNIT]) == pytest.approx(0.5 * 0.6)
    second.num_forks = 0
    assert consecutive_forks(tree, node) == 0
    assert plan.fork_probability(tree, node, [0.3 * UNIT]) == pytest.approx(0.5)


def test_aepo_without_its_parts_is_arpo() -> None:
    tree, node = make_tree(0.3, 0.3, started=2, roots=1)
    tree.nodes[1].num_forks = 1
    after = [0.5 * UNIT] * 2
    plain = aepo(budget_split=False, branch_penalty=0.0)
    same = ARPOPlan(ARPO(group_size=16), V)
    for plan in (plain, same):
        assert plan.on_start(tree) == 8
        assert plan.fork_budget(tree) == 14
        assert plan.fork_probability(tree, node, after) == pytest.approx(0.54)
        assert plan.on_leaf_end(tree, node) == 14
    assert aepo(budget_split=False).on_start(tree) == 8
    assert aepo(budget_split=False).fork_probability(tree, node, after) == pytest.approx(0.54 * 0.9)
    assert aepo(branch_penalty=0.0).on_start(tree) == 1


def test_penalty_falls_with_each_fork_in_a_row_and_never_below_zero() -> None:
    assert [penalty_factor(0.25, run) for run in range(6)] == [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
