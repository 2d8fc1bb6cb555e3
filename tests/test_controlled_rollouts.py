"""Control of rollouts in flight: cancel them, pause them, inspect their waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from random import Random

from agentenv.base.deadline import WaitKind
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Limits, Task
from agentenv.contract.plan import Independent
from agentenv.learners.algorithms.credit import tree_credit
from agentenv.rollout.actor import Actor
from agentenv.rollout.metrics import failure_kind
from tests.support.toy import CountingEnv
from tests.support.virtual_clock import run_virtual
from tests.test_actor import TASK, make_actor


def controlled(actor: Actor, act: Callable[[], Awaitable[None]]) -> TrajectoryTree:
    """A rollout of four, in parallel to `act`."""

    async def main() -> TrajectoryTree:
        acting = asyncio.ensure_future(act())
        tree = await actor.rollout(TASK, Independent(4), index=3)
        await acting
        return tree

    return run_virtual(main())


def one_quick_env() -> Callable[[Task], CountingEnv]:
    """Envs of which the first takes no time, and the others a long one."""
    numbers = count()
    return lambda task: CountingEnv(task, 0.0 if next(numbers) == 0 else 1e3, rng=Random(1))


def test_a_cancelled_rollout_fails_as_cancelled_and_forms_no_group() -> None:
    actor = make_actor(make_env=one_quick_env())

    async def cancel() -> None:
        await asyncio.sleep(50.0)
        rollout = actor.growing(3)
        assert rollout is not None
        assert rollout.cancel("enough") == 3  # one has ended well, and stays so

    tree = controlled(actor, cancel)
    assert [leaf.error for leaf in tree.failures()] == ["cancelled: enough"] * 3
    assert len(list(tree.trajectories())) == 1
    assert tree.num_started == 4  # no root was replaced
    assert failure_kind(tree) == "cancelled"
    assert actor.growing(3) is None


def test_a_cancelled_tree_forms_no_group_even_with_enough_finished_leaves() -> None:
    tree = controlled(make_actor(latency_s=1.0), _nothing)
    assert tree_credit(tree, group_size=4) is not None
    leaf = next(iter(tree.leaves()))
    leaf.end, leaf.error = "failed", "EnvError: broken"
    assert tree_credit(tree, group_size=4) is not None
    leaf.error = "cancelled: enough"
    assert tree_credit(tree, group_size=4) is None


async def _nothing() -> None:
    pass


def test_the_clock_of_a_paused_rollout_stops() -> None:
    actor = make_actor(engine={"latency_s": 1.0}, limits=Limits(max_seconds=20.0))
    seen: list[str] = []

    async def pause() -> None:
        await asyncio.sleep(0.5)
        actor.pause()
        await asyncio.sleep(1000.0)
        seen.extend(one.what for one in actor.awaited())
        actor.resume()

    tree = controlled(actor, pause)
    assert seen == [WaitKind.PAUSED] * 4
    assert [leaf.end for leaf in tree.leaves()] == ["terminated"] * 4


def test_each_branch_reports_its_current_wait_and_its_resource_use() -> None:
    actor = make_actor(engine={"latency_s": 3.0})

    async def look() -> None:
        await asyncio.sleep(1.0)
        rollout = actor.growing(3)
        assert rollout is not None
        now = rollout.now()
        assert {one.branch for one in now} == {"0", "1", "2", "3"}
        assert {one.what for one in now} == {WaitKind.TURN}
        assert {one.for_s for one in now} == {1.0}
        assert {one.worked_s for one in now} == {1.0}
        await asyncio.sleep(2.5)
        now = rollout.now()
        assert {one.for_s for one in now} == {0.5}
        assert {one.worked_s for one in now} == {3.5}
        assert all(one.num_turns == one.num_tool_calls == 1 for one in now)
        assert all(one.num_response_tokens > 0 for one in now)

    controlled(actor, look)
