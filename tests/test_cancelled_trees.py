"""A tree that is cancelled, and cancelled again at each await of any of its tasks, leaves nothing
open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agentenv.cluster.engines import LinkedEngine, Turns
from agentenv.cluster.messages import Quit, read_answer, read_request
from agentenv.contract.plan import Independent, RolloutPlan
from agentenv.learners.algorithms.late_forks import Uniform
from agentenv.rollout.actor import Actor
from tests.support.links import linked
from tests.support.toy import CountingEnv
from tests.support.virtual_clock import run_virtual
from tests.test_actor import TASK, AlwaysFork, make_actor


class SlowToEnd(CountingEnv):
    """Each of its methods takes a second to end when it is cancelled."""

    async def _maybe_fail(self, method: str) -> None:
        try:
            await super()._maybe_fail(method)
        except asyncio.CancelledError:
            await asyncio.sleep(1.0)
            raise

    async def close(self) -> None:
        await asyncio.sleep(0.5)
        await super().close()


def own() -> tuple[Actor, Any]:
    actor = make_actor(engine={"latency_s": 0.5}, latency_s=0.5)
    actor.make_env = lambda task: SlowToEnd(task, latency_s=0.5)

    async def nothing() -> None:
        pass

    return actor, nothing


def linked_one() -> tuple[Actor, Any]:
    """Its engine is at the other end of a link."""
    actor, _ = own()
    ours, theirs = linked()
    turns, engine = Turns(actor.engine, ours), LinkedEngine(theirs)
    actor.engine = engine

    async def receive_from_worker() -> None:
        while True:
            told = read_answer(await ours.receive())
            turns.quit(told.number) if isinstance(told, Quit) else turns.sample(told)  # type: ignore

    async def receive_from_controller() -> None:
        while True:
            engine.handle(read_request(await theirs.receive()))  # type: ignore[arg-type]

    receivers = [
        asyncio.create_task(one) for one in (receive_from_worker(), receive_from_controller())
    ]

    async def end() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        assert not engine._pending
        assert not turns._running
        for one in receivers:
            one.cancel()
        await asyncio.gather(*receivers, return_exceptions=True)

    return actor, end


async def one(make: Any, plan: RolloutPlan, *at: int) -> int:
    """A tree that is cancelled at the suspensions of these numbers; how many it had."""
    CountingEnv.num_open = 0
    actor, end = make()
    growing = asyncio.create_task(actor.rollout(TASK, plan))
    num = 0
    loop = asyncio.get_running_loop()

    def step() -> None:
        """Between any two rounds of the loop, each of which ends at awaits."""
        nonlocal num
        if growing.done():
            return
        num += 1
        if num in at:
            growing.cancel()
        loop.call_soon(step) if loop._ready else loop.call_at(  # type: ignore[attr-defined]
            min((one._when for one in loop._scheduled), default=loop.time()),  # type: ignore
            step,
        )

    step()
    await asyncio.gather(growing, return_exceptions=True)
    assert CountingEnv.num_open == 0
    assert actor.envs.count == 0
    assert not actor.rollouts
    await end()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    return num


@pytest.mark.parametrize("make", [own, linked_one])
@pytest.mark.parametrize("plan", [Independent(2), AlwaysFork(3), Uniform(3, 1)])
def test_a_tree_cancelled_twice_leaves_nothing_open(make: Any, plan: RolloutPlan) -> None:
    num = run_virtual(one(make, plan))
    assert num > 10
    for first in range(1, num, 3):
        last = run_virtual(one(make, plan, first))
        for second in range(first + 1, last + 1):
            run_virtual(one(make, plan, first, second))
