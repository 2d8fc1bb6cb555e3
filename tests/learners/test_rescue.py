"""The plan `rescue` of the study: its posterior, its places, its credit."""

from __future__ import annotations

from itertools import product
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agentenv.base.tree import PLAN, TrajectoryTree
from benchmarks.experiments.posterior import Profile, Sketch, alive, learned, sketch
from benchmarks.experiments.rescue import NOISY, Rescue, Search
from tests.learners.test_turn_toy import TURNS, Toy

FATAL = Toy(is_fatal=True)


@st.composite
def sketches(draw: st.DrawFn) -> Sketch:
    """Small trees; their leaves have outcomes, or none as yet."""
    found = Sketch([-1], [0], [-1], [0.0])
    for _ in range(draw(st.integers(1, 6))):
        above = draw(st.integers(0, len(found.parents) - 1))
        found.parents.append(above)
        found.depths.append(found.depths[above] + 1)
        found.outcomes[above] = -1
        found.outcomes.append(draw(st.sampled_from([-1, 0, 1])))
        found.evidence.append(draw(st.floats(-2, 2)))
    inner = set(found.parents)
    outcomes = [-1 if n in inner else one for n, one in enumerate(found.outcomes)]
    return found._replace(outcomes=outcomes)


@given(sketches(), st.floats(0, 2), st.floats(0.01, 0.3))
def test_the_posterior_is_that_of_all_histories(tree: Sketch, weight: float, wrong: float) -> None:
    """Every way in which turns may have lost their paths, by its probability."""
    profile = Profile([0.2, 0.5, 0.3, 0.1], weight, centers=[0.1] * 9, scales=[1.3] * 9)
    number, total, lives = len(tree.parents), 0.0, np.zeros(len(tree.parents))
    for lost in product((False, True), repeat=number - 1):
        state, chance = [True], 1.0
        for node in range(1, number):
            depth = tree.depths[node] - 1
            hazard = profile.hazard(depth, profile.standard(depth, tree.evidence[node]))
            above = state[tree.parents[node]]
            if not above and lost[node - 1]:
                chance = 0.0  # it is lost already
            elif above:
                chance *= hazard if lost[node - 1] else 1 - hazard
            state.append(above and not lost[node - 1])
        for one, outcome in zip(state, tree.outcomes, strict=True):
            chance *= 1.0 if outcome < 0 else (1 - wrong if one == bool(outcome) else wrong)
        total += chance
        lives += chance * np.array(state)
    np.testing.assert_allclose(alive(tree, profile, wrong), lives / total, atol=1e-9)


def grown(
    rules: Rescue, known: dict[str, Any], number: int, toy: Toy = FATAL
) -> list[TrajectoryTree]:
    rng = Random(3)

    class Plan(Search):
        def on_start(self, tree: TrajectoryTree) -> int:
            tree.root.info[PLAN] = known
            return super().on_start(tree)

    return [toy.tree(Plan(rules), index, rng) for index in range(number)]


def wins(tree: TrajectoryTree) -> list[int]:
    return [path.leaf.index for path in tree.trajectories() if path.reward == 1.0]


def test_only_groups_that_failed_are_searched_until_the_first_success() -> None:
    trees = grown(Rescue(replay_cost=0.0), {}, 300)
    assert {tree.num_started for tree in trees} > {4, 5}
    for tree in trees:
        assert tree.num_started <= 16
        if tree.num_started > 4:
            own = [path.leaf.branch for path in tree.trajectories() if path.reward == 1.0]
            assert len(own) <= 1
            assert not any("+" not in name for name in own)
            assert wins(tree) in ([], [tree.leaves()[-1].index])
    assert any(wins(tree) for tree in trees if tree.num_started > 4)


@pytest.mark.parametrize(
    ("known", "rules"),
    [({"pays": False}, Rescue()), ({}, Rescue(false_rewards=NOISY))],
    ids=["too dear", "noisy"],
)
def test_forks_are_off_where_they_do_not_pay(known: dict[str, Any], rules: Rescue) -> None:
    searched = sum(tree.num_started > 4 for tree in grown(rules, known, 300)) / 300
    assert searched < 0.16, "some are, so that it is measured"
    always = grown(replace(rules, always=True), known, 300)
    assert sum(tree.num_started > 4 for tree in always) > 150


def test_forks_begin_where_the_profile_says_that_paths_live() -> None:
    """Where the first turns are the hard ones, a new trajectory; else after them."""
    late = {"profile": {"lost": [0.02, 0.02, 0.02, 0.5, 0.5], "turns": 5.0}}
    early = {"profile": {"lost": [0.7, 0.5, 0.02, 0.02, 0.02], "turns": 5.0}}
    depths = {}
    for name, known in (("late", late), ("early", early)):
        rules = Rescue(replay_cost=0.0, always=True)
        found = [
            len(tree.path(node)) - 1
            for tree in grown(rules, known, 100)
            for node in tree.nodes
            for _ in range(node.num_forks or 0)
        ]
        depths[name] = np.mean(found) if found else 0.0
    assert depths["late"] > 2.0
    assert depths["early"] < depths["late"]


def test_a_run_learns_the_chance_of_a_success() -> None:
    """The profile by depth is identified only where forks of living paths differ."""
    trees = [sketch(one, 0.5) for one in grown(Rescue(), {}, 400)]
    profile = learned([(1.0, one) for one in trees], Profile())
    assert profile.value(0, TURNS) == pytest.approx(0.55**TURNS, rel=0.35)
    assert profile.turns == TURNS


def test_the_unbiased_credit_has_the_true_gradient() -> None:
    """Of roots and forks that begin at the same place, each against the others."""
    true = FATAL.true_gradient().ravel()
    rules = Rescue(unbiased=True, normalize_by_std=False)
    found = np.zeros_like(true)
    for tree in grown(rules, {}, 3000):
        credit = rules.credit(tree)
        assert credit is not None
        gradient = np.zeros((TURNS, 2, 3))
        for node in tree.nodes[1:]:
            score = -FATAL.policy[node.info["turn"], node.info["seen"]]
            score[node.action_ids[0]] += 1
            advantage = credit.adv_pos[node.index] + credit.adv_neg[node.index]
            gradient[node.info["turn"], node.info["seen"]] += advantage * score
        found += gradient.ravel()
    cosine = found @ true / np.linalg.norm(found) / np.linalg.norm(true)
    assert cosine > 0.97
