"""Forks at earlier tool results of paths that have ended: a fresh env is led there."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from agentenv.base.tree import LED, Node, TrajectoryTree
from agentenv.base.types import Limits, Message
from agentenv.contract.env import StepResult
from agentenv.contract.plan import Independent, Place
from agentenv.learners.algorithms.late_forks import Uniform
from agentenv.rollout.metrics import rollout_metrics
from tests.support.toy import CharTokenizer, CountingEnv
from tests.test_actor import make_actor, rollout

PLAN = Uniform(group_size=8, num_roots=2)


pytestmark = pytest.mark.usefixtures("no_env_left_open")


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
    actor = make_actor(searches, Limits(max_failures=3), make_env=Drifting)
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
