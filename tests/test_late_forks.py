"""Forks at earlier tool results of paths that have ended: a fresh env is led there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from agentenv.env import StepResult
from agentenv.errors import EnvError
from agentenv.metrics import rollout_metrics
from agentenv.plan import Independent, Place, Spread, Uniform
from agentenv.tree import LED, Node, TrajectoryTree
from agentenv.types import Limits, Message, Task
from tests.support.toy import CharTokenizer, CountingEnv
from tests.test_actor import make_actor, rollout

PLAN = Uniform(group_size=8, num_roots=2)


@pytest.fixture(autouse=True)
def _no_env_left_open() -> Iterator[None]:
    CountingEnv.num_open = 0
    yield
    assert CountingEnv.num_open == 0


def searches(prompt: str, rng: Random) -> str:
    if prompt.count("<result>") < 3 + rng.randrange(3):
        return f"<think>{rng.random()}</think><search>q{rng.randrange(9)}</search>"
    return "<think>done</think><answer>2</answer>"


def turn_of(tree: TrajectoryTree, leaf: Node) -> int:
    """The turn after which the branch of a leaf left the path that it forked from."""
    return sum(node.branch != leaf.branch for node in tree.path(leaf)[1:])


@pytest.mark.parametrize("at_once", [False, True])
def test_forks_are_taken_at_any_depth_until_the_group_is_complete(at_once: bool) -> None:
    plan = Uniform(group_size=8, num_roots=2, at_once=at_once)
    trees = [rollout(make_actor(searches), plan, index) for index in range(30)]
    depths: Counter[int] = Counter()
    for tree in trees:
        assert len(list(tree.trajectories())) == tree.num_started == 8
        assert (tree.num_roots, tree.num_live, tree.num_forks) == (2, 0, 6)
        names = [leaf.branch for leaf in tree.leaves()]
        assert len(names) == len(set(names))
        for node in tree.nodes[1:]:
            begun = sum(other.parent == node.index for other in tree.nodes)
            assert node.end or 1 <= begun == 1 + (node.num_forks or 0) <= plan.max_children
        depths.update(turn_of(tree, leaf) for leaf in tree.leaves() if "+" in leaf.branch)
    assert set(depths) >= {1, 2, 3}
    assert max(depths.values()) < 3 * min(depths[one] for one in (1, 2, 3)), "no depth is favored"


def test_a_fork_continues_from_the_tokens_and_the_state_of_its_place() -> None:
    """The env counts its searches and returns the number: after a replay it continues with the
    next."""
    tree = rollout(make_actor(searches), PLAN)
    for path in tree.trajectories():
        text = CharTokenizer().decode(path.token_ids)
        numbers = [int(part.split(":")[0]) for part in text.split("<result>\n")[1:]]
        assert numbers == list(range(1, len(numbers) + 1))


def test_replayed_calls_are_counted_once_and_not_as_calls_of_the_policy() -> None:
    tree = rollout(make_actor(searches), PLAN)
    led = {node.branch: node.info[LED] for node in tree.nodes if LED in node.info}
    forks = [leaf for leaf in tree.leaves() if "+" in leaf.branch]
    assert led == {leaf.branch: turn_of(tree, leaf) for leaf in forks}
    metrics = rollout_metrics([tree], 0)
    assert metrics["rollout/led_calls"] == sum(led.values()) > 0
    calls = sum(len(node.info.get("tool_calls", ())) for node in tree.nodes)
    assert metrics["rollout/tool_calls"] == calls


def test_kept_copies_avoid_replays_and_change_nothing_else() -> None:
    led = rollout(make_actor(searches), PLAN)
    kept = rollout(make_actor(searches), replace(PLAN, keep_forks=99))
    few = rollout(make_actor(searches), replace(PLAN, keep_forks=2))
    counts = [rollout_metrics([tree], 0)["rollout/led_calls"] for tree in (kept, few, led)]
    assert 0 == counts[0] < counts[1] < counts[2]
    texts = [sorted((n.branch, bytes(n.action_ids), bytes(n.observation_ids)) for n in tree.nodes)
             for tree in (kept, few, led)]  # fmt: skip
    assert texts[0] == texts[1] == texts[2]


def test_a_failed_copy_is_replaced_by_a_replay() -> None:
    class Uncopied(CountingEnv):
        async def fork(self) -> Uncopied:
            raise EnvError("no copy")

    actor = make_actor(searches)
    actor.make_env = Uncopied
    tree = rollout(actor, replace(PLAN, keep_forks=8))
    assert len(list(tree.trajectories())) == 8
    assert not tree.failures()
    assert rollout_metrics([tree], 0)["rollout/led_calls"] > 0


class Interrupted(Uniform):
    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> list[Place]:
        raise RuntimeError("the plan has a bug")


def test_copies_are_closed_if_the_tree_raises() -> None:
    with pytest.raises(Exception, match=r"bug|TaskGroup"):
        rollout(make_actor(searches), Interrupted(8, 2, keep_forks=8))
    assert CountingEnv.num_open == 0


def test_an_env_that_cannot_be_replayed_gets_roots_only() -> None:
    tree = rollout(make_actor(searches, fork_mode="none"), PLAN)
    assert (tree.num_roots, tree.num_forks) == (8, 0)
    assert len(list(tree.trajectories())) == 8


class Drifting(CountingEnv):
    """Each env answers otherwise than the one before."""

    async def step(self, action: Message) -> StepResult:
        messages, *rest = await super().step(action)
        return [Message("tool", f"{one.content} {id(self)}") for one in messages], *rest


def test_an_env_with_other_replies_fails_the_fork_which_a_root_replaces() -> None:
    actor = make_actor(searches, Limits(max_failures=3))
    actor.make_env = Drifting
    tree = rollout(actor, Uniform(group_size=4, num_roots=2))
    failed = tree.failures()
    assert failed
    assert all("answers differently" in str(leaf.error) for leaf in failed)
    assert tree.num_roots == len(list(tree.trajectories())) >= 3


class Chosen(Independent):
    """Forks at explicitly chosen places."""

    def on_start(self, tree: TrajectoryTree) -> int:
        return 1

    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> list[Place]:
        first = tree.path(leaf)[1]
        return [(first, 2), (tree.root, 1)] if tree.num_started == 1 else []


def test_a_plan_may_fork_at_several_places_including_the_root() -> None:
    tree = rollout(make_actor(searches), Chosen(4))
    assert sorted(leaf.branch for leaf in tree.leaves()) == ["0", "0.1+1", "0.1+2", "1"]


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
    tree = rollout(make_actor(searches, fork_mode="none"), plan)
    assert (tree.num_roots, tree.num_forks) == (8, 0)
