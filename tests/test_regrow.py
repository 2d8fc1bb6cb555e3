"""A recorded tree grows again as it was, or what is otherwise is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from agentenv.actor import Actor
from agentenv.plan import Independent, RolloutPlan
from agentenv.regrow import cannot_grow_again, differences
from agentenv.tree import TrajectoryTree, of_frame, to_frame
from agentenv.types import Limit, Limits
from agentenv.virtual_clock import run_virtual
from learners.aepo import AEPO
from learners.arpo import ARPO
from tests.support.toy import CountingEnv
from tests.test_actor import AlwaysFork
from tests.test_journal import TASK, Failing, make_actor

PLANS: dict[str, RolloutPlan] = {
    "independent": Independent(4),
    "forks": AlwaysFork(group_size=6),
    "arpo": ARPO(group_size=8, entropy_window=3).plan(60),
    "aepo": AEPO(group_size=6, entropy_window=3).plan(60),
}


@pytest.fixture(autouse=True)
def _no_env_left_open() -> Iterator[None]:
    CountingEnv.num_open = 0
    yield
    assert CountingEnv.num_open == 0


def grown(plan: RolloutPlan, actor: Actor | None = None, index: int = 3) -> TrajectoryTree:
    """As it is read from a file."""
    actor = actor or make_actor()
    return of_frame(to_frame(run_virtual(actor.rollout(TASK, plan, index=index))))


def found(tree: TrajectoryTree, plan: RolloutPlan, limits: Limits | None = None) -> list[str]:
    work = differences(tree, plan, limits or make_actor().limits, "7")
    return [str(one) for one in run_virtual(work)]


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize(
    "actor",
    [
        make_actor(),
        make_actor(Failing, faults={"finish": 0.3, "step": 0.1}),
        make_actor(fork_mode="none"),
    ],
    ids=["calm", "failing", "no copies"],
)
def test_a_tree_grows_again_as_it_was(name: str, actor: Actor) -> None:
    plan, num_compared = PLANS[name], 0
    for index in range(6):
        tree = grown(plan, actor, index)
        if not cannot_grow_again(tree):
            num_compared += 1
            assert found(tree, plan, actor.limits) == []
    assert num_compared >= 4


@pytest.mark.parametrize(
    "limits",
    [
        {"max_turns": 2},
        {"max_tool_calls": 1},
        {"max_turn_tokens": 40},
        {"max_response_tokens": 120},
    ],
    ids=str,
)
def test_limits_end_what_they_ended(limits: dict[str, Any]) -> None:
    actor = make_actor()
    actor.limits = replace(actor.limits, **limits)
    plan = AlwaysFork(group_size=5)
    trees = [grown(plan, actor, index) for index in range(4)]
    assert any(node.end == "truncated" for tree in trees for node in tree.nodes)
    for tree in trees:
        assert found(tree, plan, actor.limits) == []


def forked(plan: RolloutPlan) -> tuple[TrajectoryTree, Any]:
    """A tree with a fork, and a node at which it has one."""
    for index in range(20):
        tree = grown(plan, index=index)
        for node in tree.nodes:
            if node.num_forks:
                return tree, node
    raise AssertionError("no tree forks")


def test_forks_of_another_number_are_named() -> None:
    tree, node = forked(PLANS["forks"])
    node.num_forks += 1
    wanted = node.num_forks
    place = f"node {node.index} (branch {node.branch})"
    assert f"{place}: num_forks: recorded {wanted}, computed {wanted - 1}" in found(
        tree, PLANS["forks"]
    )


def test_another_plan_is_noticed() -> None:
    tree, _ = forked(PLANS["forks"])
    assert "goes on" in found(tree, Independent(7))[0]
    assert (
        "question to the plan: recorded there, computed missing" in found(tree, Independent(1))[0]
    )


def test_a_missing_branch_is_named() -> None:
    tree = grown(Independent(4))
    found_now = found(tree, Independent(3))
    assert any("recorded there, computed missing" in one for one in found_now)


def test_another_end_is_named() -> None:
    tree = grown(Independent(2))
    leaf = tree.leaves()[0]
    leaf.end, leaf.limit = "truncated", Limit.TURN_TOKENS
    assert "limit: recorded turn_tokens" in found(tree, Independent(2))[0]


def test_what_is_not_recorded_is_said() -> None:
    tree, _ = forked(PLANS["forks"])
    assert cannot_grow_again(tree) == ""
    events, tree.events = tree.events, tree.events[3:]
    assert "earlier process" in cannot_grow_again(tree)
    tree.events = events
    tree.leaves()[0].limit = Limit.SECONDS
    assert "time ran out" in cannot_grow_again(tree)
