"""Rollouts that wait longer than expected are named: the cause, the rollout, and the start."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from agentenv.assembly.run.waits import LOOK_S, WaitWatch, expected_s
from agentenv.base.deadline import WaitKind, WorkClock, doing
from agentenv.base.types import Message
from agentenv.contract.env import StepResult
from agentenv.contract.plan import Independent
from agentenv.rollout.actor import Actor
from tests.support.toy import CountingEnv
from tests.support.virtual_clock import on_virtual_clock, run_virtual
from tests.test_actor import TASK, make_actor


class Slow(CountingEnv):
    """Its second step takes 500 s, in a tool."""

    async def step(self, action: Message) -> StepResult:
        if len(self.calls) == 1:
            with doing("the tool 'search'"):
                await asyncio.sleep(500.0)
        return await super().step(action)


async def check_waits(waits: WaitWatch) -> None:
    """As WaitWatch.run, by the clock of the test."""
    while True:
        await asyncio.sleep(LOOK_S)
        waits.poll()


def watched(actor: Actor, rest: Callable[[WaitWatch], Any]) -> list[str]:
    """The reports while the actor rolls out a tree of three; `rest` runs in parallel."""
    told: list[str] = []

    async def main() -> None:
        waits = WaitWatch(lambda: [actor], told.append)
        watching = asyncio.create_task(check_waits(waits))
        growing = asyncio.create_task(actor.rollout(TASK, Independent(3), index=5))
        await asyncio.sleep(1.0)
        rest(waits)
        await growing
        watching.cancel()
        assert waits.longest() == ""
        assert not actor.awaited()

    run_virtual(main())
    return told


def test_a_tool_that_hangs_is_named_once_and_again_after_a_longer_wait() -> None:
    actor = make_actor()
    actor.make_env = Slow
    first, second = watched(actor, lambda waits: None)
    start = "3 rollouts wait for the tool 'search', the first since "
    assert first.startswith(start)
    assert first.endswith("tree 5, branch 0")
    assert second.startswith(start)
    assert "(240 s)" in second
    assert LOOK_S <= 5.0


def test_a_busy_server_may_take_longer_than_a_tool() -> None:
    assert expected_s("the tool 'search'") < expected_s(WaitKind.SLOT) == expected_s(WaitKind.TURN)
    assert expected_s(WaitKind.PAUSED) == math.inf


def test_a_caller_awaiting_the_rollouts_gets_their_longest_wait() -> None:
    said: list[str] = []
    actor = make_actor()
    actor.make_env = Slow
    watched(actor, lambda waits: said.append(waits.longest()))
    assert "the tool 'search'" in said[0]
    assert "5, branch 0" in said[0]


def test_a_rollout_without_a_wait_is_not_named() -> None:
    actor = make_actor()
    found: list[str] = []

    async def main() -> None:
        growing = asyncio.create_task(actor.rollout(TASK, Independent(3), index=5))
        while not growing.done():
            found.extend(one.what for one in actor.awaited())
            await asyncio.sleep(0)

    asyncio.run(main())
    assert found
    assert "" not in found


@on_virtual_clock
async def test_a_finished_tree_waits_for_the_journal_only() -> None:
    class Record:
        def __init__(self) -> None:
            self.clock = WorkClock()

        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_: None

        async def finished(self) -> None:
            await asyncio.sleep(100.0)

    actor, told = make_actor(), []
    watching = asyncio.create_task(check_waits(WaitWatch(lambda: [actor], told.append)))
    await actor.rollout(TASK, Independent(3), index=5, record=Record())  # type: ignore[arg-type]
    watching.cancel()
    assert len(told) == 1
    assert "1 rollout waits" in told[0]
    assert told[0].endswith("task t, tree 5")


pytestmark = pytest.mark.usefixtures("no_env_left_open")
