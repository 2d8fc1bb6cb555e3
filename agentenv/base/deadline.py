"""Deadlines and time budgets of waits, and sections that complete despite cancellation.

    with Deadline(when, clock, error): ...         raises `error` once the clock passes `when`
    with working(clock): ...                       runs the clock during the block ...
    with waiting("a place"): ...                   ... and pauses it during this one
    async with admitted(semaphore, "a place"): ...    acquires a semaphore, with the clock paused
    with doing("the tool 'search'"): ...           names the rollout's current wait, for monitoring
    with deferring(defer_s): ...                   the work may be lost: deadlines can be deferred
    await uncancelled(env.close())                 completes the call despite cancellations
    await at_most(5.0, process.wait())             waits, and goes on after 5 seconds in any case
    await cancel_all(tasks)                        ends tasks
    await within(60.0, "..", reading)              its result, or StallError

A `WorkClock` times a trajectory. Code that waits for a slot, for a rate limit, or for a server that
is paused, asleep, updating or lost does so inside `waiting`: load and outages are not the policy's
fault, and otherwise a busy engine would end every trajectory by its time limit. Work that is lost
with a server does not count (`Work`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from enum import StrEnum
from types import TracebackType
from typing import Any, Self, TypeVar

from agentenv.base.errors import AgentEnvError, StallError

T = TypeVar("T")
Clock = Callable[[], float]  # seconds; must not run faster than the event loop's time

CLOSE_S = 1e-6  # a deadline that is nearer than this counts as passed
SPAN_S = 1.0  # deadlines within such an interval share a timer
CHECK_S = 0.01  # minimum interval between checks of a deadline whose clock may be paused


class WaitKind(StrEnum):
    """Waits of a rollout whose usual length differs from that of others."""

    PAUSED = "the paused run to resume"
    SLOT = "a slot on a server"
    TURN = "a turn of the engine"


class WorkClock:
    """Working time of a rollout, in seconds, from `elapsed_s` on.

    It runs while `go` was called more often than `stop`; `outer` runs while any of its inner clocks
    runs. `doing` names the rollout's current wait, and `since` is the start of that wait (loop
    time, seconds).
    """

    def __init__(self, elapsed_s: float = 0.0, outer: WorkClock | None = None) -> None:
        self._elapsed_s = elapsed_s
        self._outer = outer
        self._count = 0  # running if above 0
        self._since = 0.0  # loop time of the last start
        self._loop_time: Clock | None = None if outer is None else outer._loop_time
        self.doing = ""
        self.since = 0.0
        self.deferral: Callable[[], float] | None = None  # see `deferring`

    def __call__(self) -> float:
        return self.at(self._now()) if self._count > 0 else self._elapsed_s

    def _now(self) -> float:
        """The loop's time. The loop is looked up only once, since each lookup makes a system call
        to check the process."""
        if self._loop_time is None:
            self._loop_time = asyncio.get_running_loop().time
        return self._loop_time()

    def at(self, now: float) -> float:
        """The reading at this loop time."""
        return self._elapsed_s + (now - self._since if self._count > 0 else 0.0)

    def go(self) -> None:
        self._count += 1
        if self._count == 1:
            self._since = self._now()
            if self._outer is not None:
                self._outer.go()

    def stop(self) -> None:
        if self._count == 1:
            self._elapsed_s = self()
            if self._outer is not None:
                self._outer.stop()
        self._count -= 1

    def now(self, what: str) -> None:
        """Record that the rollout now waits for `what`."""
        self.doing = what
        self.since = self._now()

    def waited_s(self, now: float) -> float:
        """The duration of the current wait at this loop time; 0 without one."""
        return now - self.since if self.doing else 0.0

    def marks(self, now: float) -> tuple[float, float]:
        """The readings of this clock and of the outer one at this loop time."""
        return self.at(now), 0.0 if self._outer is None else self._outer.at(now)

    def discard_last(self, seconds: float) -> None:
        """Discard the last `seconds` of work, which was lost."""
        at, outer = self.marks(asyncio.get_running_loop().time())
        self.discard((at - seconds, outer - seconds))

    def discard(self, marks: tuple[float, float]) -> None:
        """Discard the work since these `marks`. On the outer clock, shared time counts once."""
        self._elapsed_s -= max(0.0, self() - marks[0])
        if self._outer is not None:
            self._outer._elapsed_s -= max(0.0, self._outer() - marks[1])


class ReportingClock(WorkClock):
    """The clock of work for a rollout in another process. It calls `report` with (whether that
    rollout's clock must pause, seconds of lost work)."""

    def __init__(self, report: Callable[[bool, float], None]) -> None:
        super().__init__()
        self.report: Callable[[bool, float], None] | None = report
        self._was_paused = False

    def _report_change(self, lost_s: float = 0.0) -> None:
        is_paused = self._count <= 0
        if self.report is not None and (is_paused is not self._was_paused or lost_s):
            self.report(is_paused, lost_s)
            self._was_paused = is_paused

    def go(self) -> None:
        super().go()
        self._report_change()

    def stop(self) -> None:
        super().stop()
        self._report_change()

    def discard(self, marks: tuple[float, float]) -> None:
        before = self()
        super().discard(marks)
        self._report_change(before - self())


_current: ContextVar[WorkClock | None] = ContextVar("clock", default=None)


def work_clock() -> WorkClock | None:
    """The clock of the current rollout; None outside of rollouts."""
    return _current.get()


@contextmanager
def working(clock: WorkClock) -> Iterator[WorkClock]:
    """Run the clock within the block, and make it the current one, also in tasks that are created
    there."""
    token = _current.set(clock)
    clock.go()
    try:
        yield clock
    finally:
        clock.stop()
        _current.reset(token)


class doing:  # a context manager, in lower case like those of contextlib
    """Within the block, the current rollout waits for `what`."""

    __slots__ = ("_before", "_clock", "_what")

    def __init__(self, what: str) -> None:
        self._clock, self._what = _current.get(), what

    def __enter__(self) -> Self:
        if self._clock is not None:
            self._before = self._clock.doing
            self._clock.now(self._what)
        return self

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.now(self._before)


class waiting(doing):
    """Within the block, or from `begin` to `end`, which are idempotent, the current rollout waits,
    in the block for `what`, and its time does not count as work."""

    __slots__ = ("_waits",)

    def __init__(self, what: str = "") -> None:
        super().__init__(what)
        self._waits = False

    def begin(self) -> None:
        if self._clock is not None and not self._waits:
            self._clock.stop()
            self._waits = True

    def end(self) -> None:
        if self._clock is not None and self._waits:
            self._clock.go()
            self._waits = False

    def __enter__(self) -> Self:
        self.begin()
        return super().__enter__()

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self.end()


class Work:
    """Work for the current rollout since `begin`; can be discarded if it is lost."""

    def __init__(self) -> None:
        self._clock = _current.get()
        self.begin()

    def begin(self) -> None:
        """Keep the work so far."""
        if self._clock is not None:
            self._clock.since = now = self._clock._now()
            self._marks = self._clock.marks(now)

    def discard(self) -> None:
        """Do not count the seconds of this work, which was lost."""
        if self._clock is not None:
            self._clock.discard(self._marks)
            self.begin()


@contextmanager
def deferring(check: Callable[[], float]) -> Iterator[None]:
    """Within the block, the work for the current rollout may turn out to be lost. A deadline that
    is due therefore calls `check`, and is deferred by the returned seconds; 0: it expires."""
    clock = _current.get() or WorkClock()
    before, clock.deferral = clock.deferral, check
    try:
        yield
    finally:
        clock.deferral = before


@asynccontextmanager
async def admitted(places: asyncio.Semaphore, what: str) -> AsyncIterator[None]:
    """Acquire one of `places`; the wait for it does not count as work."""
    with waiting(what):
        await places.acquire()
    try:
        yield
    finally:
        places.release()


class Timers:
    """Timers of one event loop, nearly all of which are cancelled long before they are due. Those
    of one span share a loop timer, which creates their own timers when the span begins.

    Otherwise each turn would add several timers to the loop's heap.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._spans: dict[int, dict[_Timed, None]] = {}  # in insertion order

    def add(self, alarm: _Timed, seconds: float) -> None:
        """Let the alarm check its clock in so many seconds."""
        now = self.loop.time()
        when = now + seconds
        span = int(when // SPAN_S)
        if span * SPAN_S <= now:
            alarm.timer, alarm.span = self.loop.call_at(when, alarm.check), None
            return
        if span not in self._spans:
            self._spans[span] = {}
            self.loop.call_at(span * SPAN_S, self._begin, span)
        alarm.timer, alarm.span, alarm.check_at = None, self._spans[span], when
        alarm.span[alarm] = None

    def _begin(self, span: int) -> None:
        for alarm in sorted(self._spans.pop(span), key=lambda alarm: alarm.check_at):
            alarm.timer, alarm.span = self.loop.call_at(alarm.check_at, alarm.check), None


_timers: Timers | None = None  # of the loop that last set an alarm


class _Timed:
    """Calls `expire` as soon as `clock()` has passed `when`."""

    __slots__ = ("_clock", "_when", "check_at", "span", "timer")

    def __init__(self, when: float, clock: Clock) -> None:
        self._when, self._clock = when, clock
        self.timer: asyncio.TimerHandle | None = None
        self.span: dict[_Timed, None] | None = None  # its span, while it has no own timer
        self.check_at = 0.0

    def expire(self) -> None:
        """Called once, when it is due."""
        raise NotImplementedError

    def set(self) -> None:
        self._check_in(self._when - self._clock(), asyncio.get_running_loop())

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        elif self.span is not None:
            self.span.pop(self, None)

    def _check_in(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        global _timers
        if _timers is None or _timers.loop is not loop:
            _timers = Timers(loop)
        _timers.add(self, seconds)

    def check(self) -> None:
        """Expire if it is due, else check again later."""
        left_s = self._when - self._clock()
        if left_s <= CLOSE_S and isinstance(self._clock, WorkClock) and self._clock.deferral:
            left_s = self._clock.deferral()
        if left_s <= CLOSE_S:
            self.expire()
        else:
            self._check_in(max(left_s, CHECK_S), asyncio.get_running_loop())


class Alarm(_Timed):
    """Calls `ring` once, as soon as `clock()` has passed `when`."""

    __slots__ = ("_call",)

    def __init__(self, when: float, clock: Clock, ring: Callable[[], None]) -> None:
        super().__init__(when, clock)
        self._call = ring

    def expire(self) -> None:
        self._call()


class Deadline(_Timed):
    """Once `clock()` has passed `when`, cancels the block and raises `error`, or the error that the
    function `error` returns."""

    # Not an Alarm: an alarm that refers to its deadline would be a reference cycle per tool call,
    # and the garbage collector would have to find it among the tokens of all rollouts.
    __slots__ = ("_error", "_is_over", "_num_cancelled", "_task")

    def __init__(
        self, when: float, clock: Clock, error: Exception | Callable[[], Exception]
    ) -> None:
        super().__init__(when, clock)
        self._error = error
        self._task: asyncio.Task[Any] | None = None  # the task in the block
        self._num_cancelled = 0  # cancellations of the task before it entered
        self._is_over = False

    @classmethod
    def after(cls, seconds: float, what: str, error: type[AgentEnvError]) -> Self:
        """A deadline in `seconds` of the current rollout's clock; the error says that
        `what` took longer."""
        clock = work_clock() or asyncio.get_running_loop().time
        return cls(clock() + seconds, clock, lambda: error(f"{what} took over {seconds} s"))

    def expire(self) -> None:
        """Expire now, independently of the clock."""
        if self._task is not None and not self._is_over:
            self._is_over = True
            self._task.cancel()

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(loop)
        assert self._task is not None
        self._num_cancelled = self._task.cancelling()
        self._check_in(self._when - self._clock(), loop)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
        task, self._task = self._task, None
        if self._is_over and task is not None:
            is_alone = task.uncancel() <= self._num_cancelled
            if is_alone and kind is asyncio.CancelledError:
                late = self._error
                raise late if isinstance(late, Exception) else late() from error


async def within(seconds: float, what: str, work: Awaitable[T]) -> T:
    """The result of `work`. Raises StallError, naming `what`, after `seconds` of loop time."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():  # `work` raised it
            raise
        raise StallError(
            f"{what} did not finish within {seconds:g} s: a disk or its file server hangs"
        ) from error


async def at_most(seconds: float, work: Awaitable[object]) -> None:
    """Wait for `work`, and cancel it after `seconds` of loop time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await work


def end(waited_for: asyncio.Future[None], work: object = None) -> None:
    """Complete the future; idempotent."""
    if not waited_for.done():
        waited_for.set_result(None)


def retrieve_exception(done: asyncio.Future[Any]) -> None:
    """Mark the future's exception as retrieved, since there may be no waiter left; for
    `add_done_callback`."""
    if not done.cancelled():
        done.exception()


async def cancel_all(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Cancel the tasks and wait for their end, regardless of their errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def uncancelled(work: Awaitable[T]) -> T:
    """Wait until `work` is done, despite any number of cancellations of the waiter.

    Then raises the error of `work`, if any, else the cancellation.
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
