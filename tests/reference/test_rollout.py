"""The released code's rollout, and every place where the default differs from it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random

import pytest

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Task
from agentenv.learners.algorithms.aepo import AEPO, AEPOPlan, num_roots_of
from agentenv.learners.algorithms.arpo import ARPO, ARPOPlan
from agentenv.reference import algorithms
from tests.support.reference_loop import Recorded, ReferenceLoop, response_mask, truncated_entropy
from tests.support.rollout_checks import arpo_probability

FIXTURES = Path(__file__).parent.parent / "fixtures"
V = 100
UNIT = math.log(V)


def make_tree(*turns: float, started: int = 2) -> tuple[TrajectoryTree, Node]:
    """One branch; a turn has one token with the given entropy, in units of ln V."""
    tree = TrajectoryTree(Task("t", "toy", "q", ("a",)), num_started=started, num_roots=started)
    node = tree.add(None, observation_ids=[1])
    for entropy in turns:
        node = tree.add(
            node, branch="0", action_ids=[1], entropies=[entropy * UNIT], observation_ids=[3]
        )
    return tree, node


def reference(**keys: object) -> algorithms.ReleasedARPOPlan:
    return algorithms.ReleasedARPOPlan(algorithms.ReleasedARPO(group_size=8, **keys), V)


def reference_aepo(**keys: object) -> algorithms.ReleasedAEPOPlan:
    return algorithms.ReleasedAEPOPlan(algorithms.ReleasedAEPO(**keys), V)


def paper(**keys: object) -> ARPOPlan:
    return ARPOPlan(ARPO(group_size=8, **keys), V)


def traces() -> list[dict]:
    content = json.loads((FIXTURES / "rollout_traces.json").read_text())
    shared = {key: value for key, value in content.items() if key != "cases"}
    return [{**shared, **case} for case in content["cases"]]


class Observed(ReferenceLoop):
    """A loop that also queries the event-driven plan at each fork point."""

    def _fork(self, survivors):
        for one in survivors:
            rise = self.plan.entropy(one.cursor.entropies) - self.baselines[one.index]
            tree = self.trees[one.prompt]
            assert self.plan.rise(tree, one.cursor) == pytest.approx(rise, abs=1e-12)
            left = self.plan.group_size - tree.num_started
            draws_left = Recorded(self.draws.draws[len(self.draws.used) :])
            count = self.plan.on_fork_point(tree, one.cursor, [], draws_left)
            used, started = len(self.draws.used), len(self.everything)
            new = super()._fork([one])
            assert (count, draws_left.used) == (len(new), self.draws.used[used:])
            assert len(new) == len(self.everything) - started <= left
            yield from new


@pytest.mark.parametrize(
    "case",
    [c for c in traces() if c["algorithm"] == "arpo" and not c["stale_initial_entropy"]],
    ids=lambda case: case["name"],
)
def test_the_event_driven_plan_decides_like_the_recorded_loop(case: dict) -> None:
    """Baselines of this batch only and no counter: then trees alone hold all that is needed."""
    found = Observed(case, case["char_vocab"], case["eos"], case["pad"]).replay()
    assert not found["problems"]
    assert found["final_rows"] == case["final_rows"]


def test_a_replay_detects_a_different_decision() -> None:
    case = next(case for case in traces() if case["uniform_draws"])
    case["uniform_draws"] = [1.0 - draw for draw in case["uniform_draws"]]
    found = ReferenceLoop(case, case["char_vocab"], case["eos"], case["pad"]).replay()
    assert found["problems"] or found["final_rows"] != case["final_rows"]


def test_difference_sum_against_mean_over_the_window() -> None:
    entropies = [0.2 * UNIT] * 20
    assert algorithms.segment_entropy(entropies, V) == pytest.approx(20 * 0.2)
    assert paper().entropy(entropies) == pytest.approx(0.2)


def test_difference_truncated_entropy_against_that_of_the_engine() -> None:
    """Two of four equally likely symbols: half of the entropy is missing."""
    assert truncated_entropy([math.log(0.25)] * 2) == pytest.approx(math.log(4) / 2)


def test_difference_decides_on_the_segment_before_the_tool_result() -> None:
    tree, node = make_tree(0.1, 0.7)
    after = [0.3 * UNIT] * 20
    assert reference().rise(tree, node) == pytest.approx(0.6)
    assert paper(entropy_weight=1.0, base_probability=0.0).fork_probability(
        tree, node, after
    ) == pytest.approx(0.2)


def test_difference_the_first_decision_is_random() -> None:
    tree, node = make_tree(0.7)
    assert reference().rise(tree, node) == 0.0
    assert paper().rise_term(tree, node, [0.9 * UNIT]) == pytest.approx(0.2 * 0.2)


def test_difference_forks_compare_with_themselves_not_with_their_root() -> None:
    tree, node = make_tree(0.1)
    fork = tree.add(node, branch="0.1+1", entropies=[0.9 * UNIT], observation_ids=[3])
    assert reference().rise(tree, fork) == 0.0
    plan = paper(entropy_weight=1.0, base_probability=0.0)
    assert plan.fork_probability(tree, fork, [0.9 * UNIT]) == pytest.approx(0.8)


def test_difference_one_refill_at_a_time_against_all_at_once() -> None:
    tree, leaf = make_tree(0.1, started=5)
    assert reference().on_leaf_end(tree, leaf) == 1
    assert paper().on_leaf_end(tree, leaf) == 3
    tree.num_live = 1
    assert reference().on_leaf_end(tree, leaf) == 0


def test_difference_draws_until_the_budget_is_used_not_a_fixed_number() -> None:
    tree, node = make_tree(0.1, started=7)
    draws = Recorded([0.9, 0.1, 0.1])
    assert reference(beam_size=4).on_fork_point(tree, node, [], draws) == 1
    assert draws.used == [0.9, 0.1]
    draws = Recorded([0.9, 0.1, 0.1])
    assert paper(beam_size=4).on_fork_point(tree, node, [0.1 * UNIT], draws) == 0
    assert draws.used == [0.9]


def test_difference_aepo_rounds_its_split_up_and_reads_all_segments() -> None:
    assert algorithms.initial_rollouts(16, 0.5, 1.0, [1.0]) == 9
    assert num_roots_of(16, 0.5, 1.0, [1.0]) == 8
    # The first segment is among them.
    assert algorithms.initial_rollouts(16, 0.5, 0.4, [0.4, 0.1]) == 9
    assert num_roots_of(16, 10.0, 0.4, [0.1]) == 15


def test_difference_aepo_mirrors_the_base_probability_and_counts_by_prompt() -> None:
    plan = reference_aepo(base_probability=0.8)
    assert not plan.forks(0.5, 0.0, 0)
    assert plan.forks(0.9, 0.0, 0)
    assert not plan.forks(0.9, 0.0, 3)  # 0.9 * 0.85 < 0.8
    assert arpo_probability(0.8, 0.0, 0.2) == 0.8
    tree, node = make_tree(0.3, 0.3)
    tree.nodes[1].num_forks = 1
    other = tree.add(tree.root, branch="1", entropies=[0.3 * UNIT], observation_ids=[3])
    ours = AEPOPlan(AEPO(group_size=8, branch_penalty=0.2), V)
    assert ours.fork_probability(tree, node, [0.3 * UNIT]) == pytest.approx(0.4)
    assert ours.fork_probability(tree, other, [0.3 * UNIT]) == pytest.approx(0.5)


def test_compat_split_keeps_its_probe_without_forks() -> None:
    tree, leaf = make_tree(0.2, 0.2, started=1)
    plan = reference_aepo(group_size=16, base_probability=1.0)
    assert plan.on_start(tree) == 1
    assert plan.on_fork_point(tree, leaf, [], Random(0)) == 0
    leaf.end = "terminated"
    assert plan.on_leaf_end(tree, leaf) == 8


def test_mask_up_to_the_first_end_token() -> None:
    assert response_mask([5, 1, 7, 1, 0], [1]) == [1, 1, 0, 0, 0]
    assert response_mask([5, 7], [1]) == [1, 1]
