"""How long is waited: deadlines whose clock may stand still, and work that no cancellation cuts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentenv.deadline import Deadline, rollout_clock, uncancelled
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.errors import EnvError
from agentenv.types import Completion, Limits
from tests.support.toy import CharTokenizer
from tests.support.virtual_clock import run_virtual
from tests.test_actor import AlwaysFork, make_actor, rollout, two_searches


class Absent:
    """An engine that is away from second 2 to second 12."""

    @property
    def outage_s(self) -> float:
        return min(10.0, max(0.0, asyncio.get_running_loop().time() - 2.0))


@pytest.mark.parametrize(("engine", "ends_at"), [(Absent(), 15.0), (Path(), 5.0)])
def test_a_deadline_waits_for_the_engine_but_no_longer(engine: Any, ends_at: float) -> None:
    """A limit of 5 s; an engine that is never away has no outage_s."""

    async def main() -> float:
        clock = rollout_clock(engine)
        with pytest.raises(EnvError, match="late"):
            async with Deadline(clock() + 5.0, clock, EnvError("late")):
                await asyncio.sleep(100)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(ends_at, abs=0.01)


class AwayEngine(ScriptedEngine):
    """Sampling takes 2 s a turn, but the engine is away from second 3 to second 13."""

    @property
    def outage_s(self) -> float:
        return min(10.0, max(0.0, asyncio.get_running_loop().time() - 3.0))

    async def generate(self, *rest: Any, **keys: Any) -> Completion:
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(2.0 if now < 1.0 or now >= 13.0 else 15.0 - now)
        return await super().generate(*rest, **keys)


def test_forks_have_the_time_that_their_parent_was_given_for_an_outage() -> None:
    """Turns of 2 s within a limit of 12 s that does not count the 10 s of the outage."""
    actor = make_actor(limits=Limits(max_seconds=12.0))
    actor.engine = AwayEngine(
        ScriptedConfig(max_model_len=9000), CharTokenizer(), script=two_searches
    )
    tree = rollout(actor, AlwaysFork(group_size=4))
    assert [leaf.end for leaf in tree.leaves()] == ["terminated"] * 4
    assert tree.num_forks


def test_what_ends_in_time_or_times_out_by_itself_is_left_alone() -> None:
    async def main() -> None:
        async with Deadline.after(5.0, "the wait", EnvError):
            await asyncio.sleep(4.9)
        with pytest.raises(TimeoutError):
            async with Deadline.after(5.0, "the wait", EnvError):
                raise TimeoutError
        with pytest.raises(EnvError, match=r"^the wait took over 5\.0 s$"):
            async with Deadline.after(5.0, "the wait", EnvError):
                await asyncio.sleep(5.1)
        await asyncio.sleep(10)  # no deadline that is over cancels anything

    run_virtual(main())


def test_of_two_deadlines_the_nearer_one_ends_the_wait() -> None:
    async def main() -> None:
        clock = asyncio.get_running_loop().time
        with pytest.raises(LookupError):
            async with Deadline(1.0, clock, LookupError()), Deadline(2.0, clock, KeyError()):
                await asyncio.sleep(5)
        assert clock() == pytest.approx(1.0)

    run_virtual(main())


@pytest.mark.parametrize("fails", [False, True])
def test_work_ends_in_spite_of_three_cancellations(fails: bool) -> None:
    """Then what it raised goes on, or else the cancellation."""
    ended: list[float] = []

    async def work() -> None:
        await asyncio.sleep(10)
        ended.append(asyncio.get_running_loop().time())
        if fails:
            raise EnvError("broken")

    async def main() -> None:
        waiter = asyncio.create_task(uncancelled(work()))
        for _ in range(3):
            await asyncio.sleep(1)
            waiter.cancel()
        with pytest.raises(EnvError if fails else asyncio.CancelledError):
            await waiter

    run_virtual(main())
    assert ended == [10.0]


async def test_the_result_of_uninterrupted_work_is_given_back() -> None:
    assert await uncancelled(asyncio.sleep(0, "done")) == "done"
