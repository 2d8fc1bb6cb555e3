"""The plans of the study: late forks where a call teaches most, and forecasts of that."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Task
from benchmarks.experiments.forecast import (
    FORECAST,
    NUM_FEATURES,
    Forecaster,
    Known,
    Places,
    remember,
)
from benchmarks.experiments.turnwise import Spread, Turnwise
from tests.test_actor import make_actor, rollout
from tests.test_late_forks import searches

TURNS = 5
AFTER_ERROR = 0.05


def chance(path: Sequence[Node]) -> float:
    """Success of a new trajectory after a path: an error is nearly fatal, nothing else matters.
    Another error may come with each turn that is left."""
    left = TURNS - 1 - (len(path) - 1)
    fine = 0.9 * 0.85**left + AFTER_ERROR * (1 - 0.85**left)
    return AFTER_ERROR if any(is_error(node) for node in path) else fine


def is_error(node: Node) -> bool:
    return any(not call["ok"] for call in node.info.get("tool_calls", ()))


def grow(tree: TrajectoryTree, node: Node, rng: Random, name: str) -> Node:
    """A new trajectory from a node; entropy is noise. Returns its leaf."""
    while len(tree.path(node)) < TURNS + 1:
        is_last = len(tree.path(node)) == TURNS
        node = tree.add(
            node,
            branch=name,
            action_ids=[rng.randrange(1000)],
            entropies=[rng.random()],
            observation_ids=[] if is_last else [rng.randrange(1000)],
            info={} if is_last else {"tool_calls": [{"name": "t", "ok": rng.random() < 0.85}]},
        )
    hit = rng.random() < (AFTER_ERROR if any(map(is_error, tree.path(node))) else 0.9)
    node.end, node.reward, node.info = "terminated", float(hit), {"success": hit}
    return node


def synthetic(index: int, seed: int, num_leaves: int = 8) -> TrajectoryTree:
    """Two trajectories from scratch, and forks at places drawn uniformly."""
    rng = Random(f"{seed}/{index}")
    tree = TrajectoryTree(Task(f"q{index % 7}", "toy", "?", ()), index=index)
    tree.add(None, observation_ids=[0])
    for number in range(num_leaves):
        free = [node for node in tree.nodes if node.end is None]
        grow(tree, tree.root if number < 2 else rng.choice(free), rng, str(number))
    return tree


@pytest.fixture(scope="module")
def taught() -> Forecaster:
    forecaster = Forecaster(Known())
    for step in range(20):
        forecaster.learn([synthetic(index, 1) for index in range(16 * step, 16 * step + 16)])
    return forecaster


def with_forecast(tree: TrajectoryTree, forecaster: Forecaster) -> TrajectoryTree:
    remember(tree, forecaster.forecast(tree.task.id))
    return tree


def auc(scores: Sequence[float], differ: Sequence[bool]) -> float:
    """The chance that a place whose siblings differ has a higher score than one whose do not."""
    one = np.array([s for s, d in zip(scores, differ, strict=True) if d])[:, None]
    other = np.array([s for s, d in zip(scores, differ, strict=True) if not d])
    return float((one > other).mean() + 0.5 * (one == other).mean())


def test_the_fit_finds_the_features_of_success(taught: Forecaster) -> None:
    """Held-out trees with three trajectories: its p is nearer to the truth than the tree's own."""
    rows = []
    for index in range(300):
        tree = with_forecast(synthetic(index, 2, 3), taught)
        places = Places(tree)
        estimates = places.estimates(3.0)
        for at, p in places.chances(3.0).items():
            node = tree.nodes[at]
            if node.end is None:
                rows.append((is_error(node), p, estimates[at], chance(tree.path(node))))
    after_error, p, estimate, truth = np.array(rows).T
    off, off_of_tree = (p - truth) ** 2, (estimate - truth) ** 2
    failed = after_error == 1
    assert off.mean() < off_of_tree.mean()
    assert off[failed].mean() < 0.4 * off_of_tree[failed].mean()
    assert p[failed].mean() < 0.15 < 0.2 < estimate[failed].mean()
    x = dict(enumerate(taught.known.weights))
    assert x[4] < -1, "a result that is an error"
    assert abs(x[3]) < 0.5, "entropy is noise"


def test_the_forecast_finds_mixed_places_better_than_entropy(
    taught: Forecaster,
) -> None:
    learned, of_tree, entropy, differ = [], [], [], []
    for index in range(300):
        rng = Random(f"siblings/{index}")
        tree = with_forecast(synthetic(index, 3, 3), taught)
        places = Places(tree)
        chances, estimates = places.chances(3.0), places.estimates(3.0)
        for at in [at for at in chances if tree.nodes[at].end is None and at]:
            turns = [node for node in tree.nodes if node.parent == at]
            learned.append(chances[at] * (1 - chances[at]))
            of_tree.append(estimates[at] * (1 - estimates[at]))
            entropy.append(float(np.mean([node.entropies[0] for node in turns])))
            size = len(tree.nodes)
            first, second = (grow(tree, tree.nodes[at], rng, "new") for _ in range(2))
            differ.append(first.reward != second.reward)
            del tree.nodes[size:]
    assert auc(learned, differ) > auc(entropy, differ) + 0.1
    assert auc(learned, differ) > auc(of_tree, differ)


def test_before_anything_is_learned_the_score_is_that_of_the_tree() -> None:
    untaught = Forecaster(Known())
    for index in range(20):
        tree = synthetic(index, 5)
        own = Spread(8, 2).scores(tree)
        assert Spread(8, 2).scores(with_forecast(tree, untaught)) == pytest.approx(own)


def test_a_tree_is_grown_by_its_forecast_and_teaches_later_ones() -> None:
    """The forecast is on the root from the start; each group of four trees is learned from."""
    plan = Turnwise(group_size=8, initial_rollouts=2, plan_name="learned").plan(9)
    trees = [rollout(make_actor(searches), plan, index) for index in range(12)]
    for tree in trees:
        assert len(list(tree.trajectories())) == 8
    weights = [tree.root.info[FORECAST]["weights"] for tree in trees]
    assert weights[:4] == [[0.0] * NUM_FEATURES] * 4
    assert weights[4] == weights[7] != weights[8] == weights[11]
    assert sum(tree.num_forks for tree in trees) > 10


# where a call teaches most


def graded(*paths: tuple[tuple[int, ...], float]) -> TrajectoryTree:
    """A tree of these paths, named by the turns that they share, with their returns."""
    tree = TrajectoryTree(Task("t", "toy", "?", ()))
    tree.add(None, observation_ids=[0])
    known: dict[tuple[int, ...], Node] = {(): tree.root}
    for path, reward in paths:
        for size in range(1, len(path) + 1):
            if path[:size] not in known:
                above = known[path[: size - 1]]
                name = "".join(map(str, path))
                known[path[:size]] = tree.add(
                    above, branch=name, action_ids=[1], observation_ids=[0]
                )
        leaf = known[path]
        leaf.observation_ids, leaf.end, leaf.reward = leaf.observation_ids[:0], "terminated", reward
    tree.num_started = len(paths)
    return tree


def test_a_prefix_with_mixed_outcomes_scores_above_one_that_always_fails() -> None:
    tree = graded(
        *(((1, 1, 1), 1.0), ((1, 1, 2), 0.0), ((1, 1, 3), 1.0), ((1, 1, 4), 0.0)),
        *(((2, 1, 1), 0.0), ((2, 1, 2), 0.0), ((2, 1, 3), 0.0), ((2, 1, 4), 0.0)),
    )
    scores = Spread(group_size=16, num_roots=2).scores(tree)
    mixed, failed = (next(n for n in tree.nodes if n.branch[:1] == one) for one in "12")
    assert scores[mixed.index] > 1.2 * scores[failed.index]


def test_a_place_with_many_leaves_scores_below_one_with_few() -> None:
    many = ((1, 1, n) for n in range(6))
    tree = graded(
        *((path, float(path[2] % 2)) for path in many), ((2, 1, 0), 1.0), ((2, 1, 1), 0.0)
    )
    scores = Spread(group_size=16, num_roots=2).scores(tree)
    first, second = (next(n for n in tree.nodes if n.branch[:1] == one) for one in "12")
    assert scores[first.index] < scores[second.index]


def test_replayed_calls_have_the_configured_cost() -> None:
    tree = graded(((1, 1, 1, 1), 1.0), ((2, 1, 1, 1), 0.0))
    free, dear = (Spread(16, 2, led_cost=cost).scores(tree) for cost in (0.0, 1.0))
    path = [node.index for node in tree.path(tree.leaves()[0])]
    assert free[path[3]] > 2 * free[path[1]], "few turns are left"
    assert dear[path[3]] < 1.5 * dear[path[1]], "as many turns in all"


def test_the_plan_spreads_a_group_or_uses_roots_only_without_replays() -> None:
    plan = Spread(group_size=8, num_roots=2, led_cost=0.0)
    trees = [rollout(make_actor(searches), plan, index) for index in range(20)]
    for tree in trees:
        assert len(list(tree.trajectories())) == tree.num_started == 8
        assert tree.num_live == 0
        for node in tree.nodes[1:]:
            assert 1 + (node.num_forks or 0) <= plan.max_children
    assert sum(tree.num_forks for tree in trees) > 20
