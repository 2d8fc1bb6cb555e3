"""A recorded tree grows again as it was, or what is otherwise is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentenv.actor import Actor
from agentenv.engines.scripted import ScriptedEngine
from agentenv.frames import frames_of
from agentenv.learners.aepo import AEPO
from agentenv.learners.arpo import ARPO
from agentenv.offload import run_virtual
from agentenv.plan import Independent, RolloutPlan
from agentenv.replay import cannot_grow_again, differences
from agentenv.tree import TrajectoryTree, of_frame, to_frame
from agentenv.types import Chunk, Completion, Limit, Limits
from tests.support.toy import CountingEnv
from tests.test_actor import AlwaysFork
from tests.test_journal import TASK, Failing, cuts, make_actor, read
from tests.test_journal import grown as journaled

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


class Trained(ScriptedEngine):
    """As after an update: the same texts, of which it is surer or less sure."""

    async def generate(self, *arguments: Any, on_tokens: Any = None, **keys: Any) -> Completion:
        def moved(entropies: list[float]) -> list[float]:
            return [1.7 * one % 0.9 for one in entropies]

        def tell(chunk: Chunk) -> None:
            on_tokens(replace(chunk, entropies=moved(chunk.entropies)))

        told = tell if on_tokens else None
        done = await super().generate(*arguments, on_tokens=told, **keys)
        return replace(done, entropies=moved(done.entropies))


@pytest.mark.parametrize(
    ("name", "index"),
    [("forks", 2), pytest.param("arpo", 5, marks=pytest.mark.slow), ("aepo", 3)],
)
@pytest.mark.parametrize("engine", [ScriptedEngine, Trained])
def test_a_tree_that_goes_on_after_crashes_grows_again_as_it_was(
    tmp_path: Path, name: str, index: int, engine: type[ScriptedEngine]
) -> None:
    """After every crash that is possible, and after a second one."""
    plan, actor = PLANS[name], make_actor(engine)
    journaled(tmp_path / "whole", make_actor(), plan, index=index)
    num_forked = 0
    for number, cut in enumerate(cuts(tmp_path / "whole")):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "000001.frames").write_bytes(cut)
        recorded = read(folder, index=index)
        if recorded is None or recorded.is_finished:
            continue
        num_forked += any(node.num_forks for node in recorded.tree.nodes)
        once = journaled(folder, actor, plan, index=index, incarnation=2)
        last = max(path for path in folder.glob("*.frames") if path.stat().st_size)
        ends = [at + size for at, size, _ in frames_of(last.read_bytes())]
        last.write_bytes(last.read_bytes()[: ends[len(ends) // 2]])
        twice = journaled(folder, actor, plan, index=index, incarnation=3)
        again = read(folder, index=index)
        assert again is not None
        for tree in (once, twice, again.tree):
            assert cannot_grow_again(tree) == ""
            assert found(tree, plan) == []
    assert num_forked > 2


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
    assert "not recorded" in cannot_grow_again(tree)
    tree.events = events
    tree.leaves()[0].limit = Limit.SECONDS
    assert "time ran out" in cannot_grow_again(tree)
