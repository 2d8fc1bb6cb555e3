"""How long is waited: deadlines whose clock may stand still, and work that no cancellation cuts."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from agentenv.base.deadline import (
    Alarm,
    Deadline,
    Work,
    WorkClock,
    deferring,
    doing,
    uncancelled,
    waiting,
    within,
    working,
)
from agentenv.base.errors import EnvError, StallError
from agentenv.base.retries import Backoff
from agentenv.base.types import Completion, Limits
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from tests.support.toy import CharTokenizer
from tests.support.virtual_clock import on_virtual_clock, run_virtual
from tests.test_actor import AlwaysFork, make_actor, rollout, two_searches


async def for_two_seconds_in_five() -> None:
    """Waits for 3 s, works for 2 s, and so on."""
    for _ in range(100):
        with waiting("it"):
            await asyncio.sleep(3.0)
        await asyncio.sleep(2.0)


@on_virtual_clock
async def test_a_deadline_on_a_work_clock_does_not_count_waits() -> None:
    """5 s of work take 3 + 2 + 3 + 2 + 3 + 1."""
    clock = WorkClock()
    with (
        pytest.raises(EnvError, match="late"),
        working(clock),
        Deadline(5.0, clock, EnvError("late")),
    ):
        await for_two_seconds_in_five()
    assert clock() == pytest.approx(5.0, abs=0.01)
    assert asyncio.get_running_loop().time() == pytest.approx(14.0, abs=0.02)


@on_virtual_clock
async def test_an_outer_clock_runs_while_any_inner_one_runs_and_nested_waits_end_once() -> None:
    async def work(clock: WorkClock, waits_s: float) -> None:
        with working(clock):
            with waiting("it") as outer, waiting("it"):
                await asyncio.sleep(waits_s)
                outer.end()
                outer.end()
                await asyncio.sleep(1.0)  # the inner wait continues
            await asyncio.sleep(1.0)

    outer = WorkClock()
    clocks = [WorkClock(10.0, outer), WorkClock(0.0, outer)]
    await asyncio.gather(work(clocks[0], 2.0), work(clocks[1], 2.5))
    assert [clock() for clock in (*clocks, outer)] == pytest.approx([11.0, 1.0, 1.5])


class AwayEngine(ScriptedEngine):
    """Sampling takes 2 s a turn, but the engine is away from second 3 to second 13."""

    async def generate(self, *rest: Any, **keys: Any) -> Completion:
        now = asyncio.get_running_loop().time()
        if 1.0 <= now < 13.0:
            await asyncio.sleep(max(0.0, 3.0 - now))
            with waiting("it"):
                await asyncio.sleep(13.0 - asyncio.get_running_loop().time())
            await asyncio.sleep(now + 2.0 - 3.0 if now < 3.0 else 2.0)
        else:
            await asyncio.sleep(2.0)
        return await super().generate(*rest, **keys)


def test_forks_inherit_the_time_granted_to_their_parent_for_an_outage() -> None:
    """Turns of 2 s within a limit of 12 s that does not count the 10 s of the outage."""
    actor = make_actor(limits=Limits(max_seconds=12.0))
    actor.engine = AwayEngine(
        ScriptedConfig(max_model_len=9000), CharTokenizer(), script=two_searches
    )
    tree = rollout(actor, AlwaysFork(group_size=4))
    assert [leaf.end for leaf in tree.leaves()] == ["terminated"] * 4
    assert tree.num_forks


@on_virtual_clock
async def test_work_that_ends_in_time_or_times_out_by_itself_is_not_interrupted() -> None:
    with Deadline.after(5.0, "the wait", EnvError):
        await asyncio.sleep(4.9)
    with pytest.raises(TimeoutError), Deadline.after(5.0, "the wait", EnvError):
        raise TimeoutError
    with pytest.raises(EnvError, match=r"over 5\.0 s$"), Deadline.after(5.0, "the wait", EnvError):
        await asyncio.sleep(5.1)
    await asyncio.sleep(10)  # no deadline that is over cancels anything


@on_virtual_clock
async def test_the_nearer_of_two_deadlines_ends_the_wait() -> None:
    clock = asyncio.get_running_loop().time
    with (
        pytest.raises(LookupError),
        Deadline(1.0, clock, LookupError()),
        Deadline(2.0, clock, KeyError()),
    ):
        await asyncio.sleep(5)
    assert clock() == pytest.approx(1.0)


@pytest.mark.parametrize("fails", [False, True])
@on_virtual_clock
async def test_uncancelled_work_survives_three_cancellations(fails: bool) -> None:
    """Then its exception propagates, or else the cancellation."""
    ended: list[float] = []

    async def work() -> None:
        await asyncio.sleep(10)
        ended.append(asyncio.get_running_loop().time())
        if fails:
            raise EnvError("broken")

    waiter = asyncio.create_task(uncancelled(work()))
    for _ in range(3):
        await asyncio.sleep(1)
        waiter.cancel()
    with pytest.raises(EnvError if fails else asyncio.CancelledError):
        await waiter
    assert ended == [10.0]


async def test_the_result_of_uncancelled_work_is_returned() -> None:
    assert await uncancelled(asyncio.sleep(0, "done")) == "done"


@on_virtual_clock
async def test_alarms_of_one_span_share_a_timer_and_fire_in_order() -> None:
    rung: list[tuple[int, float]] = []
    loop = asyncio.get_running_loop()
    timers = []
    loop.call_at, call_at = (  # type: ignore[method-assign]
        lambda when, *rest, **keys: timers.append(when) or call_at(when, *rest, **keys),
        loop.call_at,
    )
    alarms = [
        Alarm(60.0 + 0.001 * i, loop.time, lambda i=i: rung.append((i, loop.time())))
        for i in reversed(range(900))
    ]
    for alarm in alarms:
        alarm.set()
    for alarm in alarms[10:]:
        alarm.cancel()
    set_so_far = len(timers)
    await asyncio.sleep(100.0)
    assert set_so_far == 1
    assert [number for number, _ in rung] == list(range(890, 900))
    assert all(when == pytest.approx(60.0 + 0.001 * i) for i, when in rung)


@pytest.mark.parametrize(("lost", "ends_s"), [(True, 35.0), (False, 26.0)])
@on_virtual_clock
async def test_a_deadline_is_deferred_until_the_fate_of_the_work_is_known(
    lost: bool, ends_s: float
) -> None:
    """It is due after 20 s; from second 10 to second 25 the fate of the work is unknown, and the
    work is refunded then if it is lost. The state is polled every two seconds."""

    async def work_on() -> None:
        await asyncio.sleep(10.0)
        work = Work()
        with deferring(lambda: 2.0):
            await asyncio.sleep(15.0)
        if lost:
            work.discard()
        await asyncio.sleep(100.0)

    clock = WorkClock()
    with pytest.raises(EnvError), working(clock), Deadline(20.0, clock, EnvError("late")):
        await work_on()
    assert asyncio.get_running_loop().time() == pytest.approx(ends_s)


@on_virtual_clock
async def test_an_explicitly_expired_deadline_is_not_deferred() -> None:
    clock = WorkClock()
    deadline = Deadline(20.0, clock, EnvError("late"))
    asyncio.get_running_loop().call_later(5.0, deadline.expire)
    with pytest.raises(EnvError), working(clock), deadline, deferring(lambda: 2.0):
        await asyncio.sleep(100.0)
    assert asyncio.get_running_loop().time() == 5.0


@on_virtual_clock
async def test_lost_work_is_refunded_and_only_once_to_a_tree() -> None:
    """Two branches lose the same 30 s, one of them 10 s more before; a third works on."""

    async def lose(clock: WorkClock, starts_s: float, heard_s: float) -> None:
        await asyncio.sleep(starts_s)
        with working(clock):
            work = Work()
            await asyncio.sleep(heard_s - starts_s)
            work.begin()
            await asyncio.sleep(40.0 - heard_s)
            work.discard()
            await asyncio.sleep(5.0)

    tree = WorkClock()
    clocks = [WorkClock(outer=tree), WorkClock(outer=tree)]
    await asyncio.gather(lose(clocks[0], 0.0, 10.0), lose(clocks[1], 0.0, 0.0))
    assert [clock() for clock in (*clocks, tree)] == pytest.approx([15.0, 5.0, 5.0])


@on_virtual_clock
async def test_a_clock_reports_the_current_wait_and_its_start() -> None:
    with working(WorkClock()) as clock:
        clock.now("a turn")
        await asyncio.sleep(2.0)
        with doing("the server"):
            await asyncio.sleep(1.0)
            with waiting("a place"):
                await asyncio.sleep(1.0)
                assert (clock.doing, clock.since) == ("a place", 3.0)
            assert (clock.doing, clock.since) == ("the server", 4.0)
        assert (clock.doing, clock.since) == ("a turn", 4.0)


def test_an_expired_deadline_is_freed_without_the_garbage_collector() -> None:
    class Seen(Deadline):
        __slots__ = ("__weakref__",)

    async def main() -> list[object]:
        clock = asyncio.get_running_loop().time
        deadlines: list[weakref.ref[Seen]] = []
        for _ in range(100):
            deadline = Seen(clock() + 5.0, clock, TimeoutError)
            deadlines.append(weakref.ref(deadline))
            with deadline:
                pass
            del deadline
        return [found() for found in deadlines]

    gc.disable()
    try:
        assert run_virtual(main()) == [None] * 100
    finally:
        gc.enable()


@on_virtual_clock
async def test_work_that_exceeds_its_time_is_named() -> None:
    async def fails() -> None:
        await asyncio.sleep(1.0)
        raise TimeoutError("its own")

    with pytest.raises(StallError, match="finish within 5"):
        await within(5.0, "reading", asyncio.sleep(100.0))
    with pytest.raises(TimeoutError, match="its own"):
        await within(5.0, "reading", fails())
    assert await within(5.0, "reading", asyncio.sleep(1.0, "done")) == "done"


def test_a_backoff_doubles_is_bounded_and_differs_by_key() -> None:
    backoff = Backoff(0.5, 30.0)
    waits = [backoff.seconds(0, f"call {n}", 7.0) for n in range(20)]
    assert all(7 <= wait <= 10.5 for wait in waits)  # never shorter than requested
    assert len(set(waits)) > 10
    assert waits[3] == backoff.seconds(0, "call 3", 7.0)
    assert 2 <= backoff.seconds(2, "call") <= 3
    for attempt in (12, 2000):
        assert 30 <= backoff.seconds(attempt, "call") <= 45
