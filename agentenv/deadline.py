"""How long the project waits for something, and what it waits for to the end.

    async with Deadline(when, clock, error): ...   raises `error` once the clock has passed `when`
    with working(clock): ...                       the clock of what happens inside runs ...
    with waiting(): ...                            ... but not here: nobody works for it
    async with admitted(semaphore): ...               a place, waited for without the clock
    await uncancelled(env.close())                 ends it, however often the waiter is cancelled

A trajectory is timed by a `WorkClock`. Whoever makes it wait for a place, for a rate limit, or for
a server that is paused, asleep, updating or gone says so with `waiting`: load and outages are not
the policy's fault, and without this a busy engine would end every trajectory by its seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Self, TypeVar

from agentenv.errors import AgentEnvError

T = TypeVar("T")
Clock = Callable[[], float]  # seconds; must not run faster than the event loop's time

CLOSE_S = 1e-6  # a deadline as near as this has passed
LOOK_S = 0.01  # how often at most a deadline looks whether its clock runs again


class WorkClock:
    """Seconds in which somebody worked for a rollout, from `elapsed_s` on.

    It runs while it was told to `go` more often than to `stop`, and `outer` runs while any of the
    clocks inside it do.
    """

    def __init__(self, elapsed_s: float = 0.0, outer: WorkClock | None = None) -> None:
        self._elapsed_s = elapsed_s
        self._outer = outer
        self._count = 0  # above 0: it runs
        self._since = 0.0  # time of the loop when it began to run

    def __call__(self) -> float:
        if self._count <= 0:
            return self._elapsed_s
        return self._elapsed_s + asyncio.get_running_loop().time() - self._since

    def go(self) -> None:
        self._count += 1
        if self._count == 1:
            self._since = asyncio.get_running_loop().time()
            if self._outer is not None:
                self._outer.go()

    def stop(self) -> None:
        if self._count == 1:
            self._elapsed_s = self()
            if self._outer is not None:
                self._outer.stop()
        self._count -= 1


_current: ContextVar[WorkClock | None] = ContextVar("clock", default=None)


def work_clock() -> WorkClock | None:
    """The clock of the rollout that this is done for; None: of none."""
    return _current.get()


@contextmanager
def working(clock: WorkClock) -> Iterator[WorkClock]:
    """The clock runs, and is that of `waiting` inside, also in tasks that are started there."""
    token = _current.set(clock)
    clock.go()
    try:
        yield clock
    finally:
        clock.stop()
        _current.reset(token)


class Wait:
    """Time in which nobody works for the rollout that is current now: its clock stands still from
    `begin` to `end`, both of which may be called again."""

    def __init__(self) -> None:
        self._clock = _current.get()
        self._waits = False

    def begin(self) -> None:
        if self._clock is not None and not self._waits:
            self._clock.stop()
            self._waits = True

    def end(self) -> None:
        if self._clock is not None and self._waits:
            self._clock.go()
            self._waits = False


@contextmanager
def waiting() -> Iterator[Wait]:
    """What is awaited inside is no work; see Wait."""
    wait = Wait()
    wait.begin()
    try:
        yield wait
    finally:
        wait.end()


@asynccontextmanager
async def admitted(places: asyncio.Semaphore) -> AsyncIterator[None]:
    """A place, which nobody works for while it is waited for."""
    with waiting():
        await places.acquire()
    try:
        yield
    finally:
        places.release()


class Alarm:
    """Calls `ring` once, as soon as `clock()` has passed `when`."""

    def __init__(self, when: float, clock: Clock, ring: Callable[[], None]) -> None:
        self._when, self._clock, self._ring = when, clock, ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self) -> None:
        self._look_in(self._when - self._clock())

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        left_s = self._when - self._clock()
        if left_s <= CLOSE_S:
            self._ring()
        else:
            self._look_in(max(left_s, LOOK_S))


class Deadline:
    """What is awaited inside is cancelled, and `error` raised, once `clock()` has passed `when`."""

    def __init__(self, when: float, clock: Clock, error: Exception) -> None:
        self._alarm = Alarm(when, clock, self.expire)
        self._error = error
        self._timeout = asyncio.timeout(None)

    @classmethod
    def after(cls, seconds: float, what: str, error: type[AgentEnvError]) -> Self:
        """`seconds` from now on, less those that the rollout waits; the error says that `what`
        took longer."""
        clock = work_clock() or asyncio.get_running_loop().time
        return cls(clock() + seconds, clock, error(f"{what} took over {seconds} s"))

    def expire(self) -> None:
        """It has passed, whatever the clock says."""
        if not self._timeout.expired():
            self._timeout.reschedule(asyncio.get_running_loop().time())

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._alarm.set()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._alarm.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise self._error from late


async def uncancelled(work: Awaitable[T]) -> T:
    """Wait for `work` to its end in spite of any number of cancellations of the waiter.

    Then what `work` raised goes on, or else the cancellation.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result
