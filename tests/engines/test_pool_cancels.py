"""A turn that is cancelled, and again at each of its awaits, leaves nothing behind: no request on a
server, no occupied slot, no running clock of its rollout."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Generator
from pathlib import Path
from types import coroutine
from typing import Any

import pytest

from agentenv.base.deadline import Deadline, WorkClock, working
from agentenv.base.errors import EngineError
from agentenv.cluster.engines import LeasedEngine
from agentenv.engines.pool.server import PooledServer
from tests.engines.pool_bench import Bench, bench, virtual
from tests.support.virtual_clock import run_virtual

ABORT_S = 1.0  # that a server takes to end a request


class Suspensions:
    """Cancels a task at its suspensions of these numbers."""

    def __init__(self, *at: int) -> None:
        self.at, self.num = at, 0

    @coroutine
    def of(self, work: Coroutine[Any, Any, Any]) -> Generator[Any, Any, Any]:
        value, error = None, None
        while True:
            try:
                awaited = work.send(value) if error is None else work.throw(error)
            except StopIteration as stop:
                return stop.value
            self.num += 1
            if self.num in self.at:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            value, error = None, None
            try:
                value = yield awaited
            except BaseException as raised:
                error = raised


def abort_slowly(b: Bench) -> None:
    for server in b.servers:
        fast = server.generate

        async def generate(*given: Any, fast: Any = fast) -> Any:
            try:
                return await fast(*given)
            except asyncio.CancelledError:
                await asyncio.sleep(ABORT_S)
                raise

        server.generate = generate  # type: ignore[method-assign]


def quiet(b: Bench) -> None:
    pass


def lost(b: Bench) -> None:
    b.servers[0].die_after = 3


def broken(b: Bench) -> None:
    for server in b.servers:
        server.breaks = [2]


def full(b: Bench) -> None:
    for server in b.servers:
        server.capacity = 0

    def drain() -> None:
        for server in b.servers:
            server.capacity = None

    asyncio.get_running_loop().call_later(0.5, drain)


def updated(b: Bench) -> None:
    async def load() -> None:
        await asyncio.sleep(0.7)
        await b.load(1)

    b.loading = asyncio.create_task(load())  # type: ignore[attr-defined]


def asleep(b: Bench) -> None:
    async def sleep() -> None:
        await asyncio.sleep(0.7)
        await b.pool.sleep()
        await b.pool.wake()

    b.loading = asyncio.create_task(sleep())  # type: ignore[attr-defined]


def assert_nothing_is_left(b: Bench) -> None:
    for member in b.pool.servers:
        assert member.running == {}, member.name
        assert member.in_flight == 0, member.name
        assert not member.guests
    assert b.pool.queue.num_waiting == 0
    if isinstance(b.engine, LeasedEngine):
        assert not b.engine._waiting
        assert not b.engine._held
    for server in b.servers:
        assert server.num_running == 0


async def one(folder: Path, happens: Callable[[Bench], None], is_leased: bool, *at: int) -> int:
    """A turn that is cancelled at these suspensions; the number of those that it had."""
    async with bench(folder, 2, is_leased=is_leased) as b:
        abort_slowly(b)
        happens(b)
        steps, clock = Suspensions(*at), WorkClock()

        async def turn() -> None:
            with working(clock):
                await b.generate()
                clock_runs()

        def clock_runs() -> None:
            assert clock._count == 1

        task = asyncio.ensure_future(steps.of(turn()))
        await asyncio.wait({task}, timeout=30)
        assert task.done()
        if not at:
            task.result()
        if (loading := getattr(b, "loading", None)) is not None:
            await loading
        await asyncio.sleep(10)
        assert clock._count == 0
        assert_nothing_is_left(b)
        name = b.servers[0].name
        (keeper,) = [k.task for m, k in b.pool._keepers.items() if m.name == name]
        b.pool.remove_server(name)
        await asyncio.wait({keeper}, timeout=30)
        assert keeper.done()
        assert not keeper.cancelled()
        assert keeper.exception() is None
    return steps.num


@pytest.mark.parametrize("is_leased", [False, True], ids=["own", "leased"])
@pytest.mark.parametrize("happens", [quiet, lost, broken, full, updated, asleep])
def test_a_turn_cancelled_again_at_each_await_leaves_nothing(
    folder: Path, happens: Callable[[Bench], None], is_leased: bool
) -> None:
    num = run_virtual(one(folder, happens, is_leased))
    assert num > 1
    for first in range(1, num + 1):
        last = run_virtual(one(folder, happens, is_leased, first))
        for second in range(first + 1, last + 1):
            run_virtual(one(folder, happens, is_leased, first, second))


@virtual(2, is_leased=False)
async def test_a_turn_whose_deadline_precedes_its_cancellation_leaves_nothing(b: Bench) -> None:
    """The same by the clock: its abort takes longer than it is until the second cancellation."""
    abort_slowly(b)
    loop = asyncio.get_running_loop()

    async def branch() -> None:
        with Deadline(loop.time() + 0.3, loop.time, EngineError("late")):
            await b.generate()

    async def tree() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(branch())

    growing = asyncio.create_task(tree())
    await asyncio.sleep(0.6)
    growing.cancel()
    await asyncio.sleep(0.1)
    assert sum(member.in_flight for member in b.pool.servers) == 1  # it still runs
    await asyncio.gather(growing, return_exceptions=True)
    assert growing.cancelled()
    assert_nothing_is_left(b)


@virtual(2, is_leased=False)
async def test_a_keeper_does_not_wait_for_a_finished_request(b: Bench) -> None:
    """A request that has ended, but is still registered, does not block it."""
    member = b.pool.servers[0]
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    done.set_result(None)
    member.running[done] = None  # type: ignore[assignment]
    b.pool.remove_server(member.client.url)
    await asyncio.sleep(10)
    assert member not in b.pool._keepers
    del member.running[done]


def resting(member: PooledServer, check: Callable[[], Awaitable[None]]) -> Any:
    async def timed() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        await check()
        return loop.time() - began

    return timed()


@virtual(1, is_leased=False)
async def test_a_check_requested_while_the_keeper_works_is_made(b: Bench) -> None:
    (member,) = b.pool.servers
    await asyncio.sleep(1.0)
    keeping = b.pool._keepers[member].task
    assert keeping is not None
    keeping.cancel()
    await asyncio.sleep(1.0)
    member.check_due.set()
    assert await resting(member, lambda: member.rest(7.0)) == 0.0
    assert await resting(member, lambda: member.rest(7.0)) == 7.0
    asyncio.get_running_loop().call_later(2.0, member.check_due.set)
    assert await resting(member, lambda: member.rest(7.0)) == 2.0
