"""Deadlines and time budgets of waits, and sections that complete despite cancellation.

    with Deadline(when, clock, error): ...         raises `error` once the clock has passed `when`
    with working(clock): ...                       the clock of what happens inside runs ...
    with waiting("a place"): ...                   ... but not here: nobody works for it
    async with admitted(semaphore, "a place"): ...    a place, waited for without the clock
    with doing("the tool 'search'"): ...           what a rollout awaits, for those who watch it
    with doubting(look): ...                       what is worked may be lost: a deadline asks first
    await uncancelled(env.close())                 ends it, however often the waiter is cancelled
    await within(60.0, "..", reading)              what it gives, or StallError
    backoff_s(attempt, key, first_s=.., max_s=..)  how long to wait before another try

A trajectory is timed by a `WorkClock`. Whoever makes it wait for a place, for a rate limit, or for
a server that is paused, asleep, updating or gone says so with `waiting`: load and outages are not
the policy's fault, and without this a busy engine would end every trajectory by its seconds.
Work that is lost with a server is given back (`Work`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from random import Random
from types import TracebackType
from typing import Any, Self, TypeVar

from agentenv.errors import AgentEnvError, StallError

T = TypeVar("T")
Clock = Callable[[], float]  # seconds; must not run faster than the event loop's time

CLOSE_S = 1e-6  # a deadline as near as this has passed
SPAN_S = 1.0  # timers of so long share one
LOOK_S = 0.01  # how often at most a deadline looks whether its clock runs again


class WorkClock:
    """Working time of a rollout, in seconds, from `elapsed_s` on.

    It runs while `go` was called more often than `stop`, and `outer` runs while any of the
    clocks inside it do. `doing` says what the rollout awaits, and `since` from which time of the
    loop on.
    """

    def __init__(self, elapsed_s: float = 0.0, outer: WorkClock | None = None) -> None:
        self._elapsed_s = elapsed_s
        self._outer = outer
        self._count = 0  # above 0: it runs
        self._since = 0.0  # time of the loop when it began to run
        self._loop_time: Clock | None = None if outer is None else outer._loop_time
        self.doing = ""
        self.since = 0.0
        self.doubt: Callable[[], float] | None = None  # see `doubting`

    def __call__(self) -> float:
        if self._count <= 0:
            return self._elapsed_s
        return self._elapsed_s + self._now() - self._since

    def _now(self) -> float:
        """Time of the loop, which is looked up once: Python asks the system each time whether the
        process is still the same."""
        if self._loop_time is None:
            self._loop_time = asyncio.get_running_loop().time
        return self._loop_time()

    def at(self, now: float) -> float:
        """The reading at this time of the loop."""
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
        """The rollout awaits this from now on."""
        self.doing = what
        self.since = self._now()

    def marks(self, now: float) -> tuple[float, float]:
        """The reading at this loop time, and the outer clock's."""
        return self.at(now), 0.0 if self._outer is None else self._outer.at(now)

    def lose(self, seconds: float) -> None:
        """So much of what was worked last is lost and does not count."""
        at, outer = self.marks(asyncio.get_running_loop().time())
        self.give_back((at - seconds, outer - seconds))

    def give_back(self, marks: tuple[float, float]) -> None:
        """Discard the work since then. On the outer clock, shared time counts once."""
        self._elapsed_s -= max(0.0, self() - marks[0])
        if self._outer is not None:
            self._outer._elapsed_s -= max(0.0, self._outer() - marks[1])


class ReportingClock(WorkClock):
    """The clock of what is done for a rollout of another process, to which it reports when that
    one's clock has to stand, and how many seconds of work are lost."""

    def __init__(self, report: Callable[[bool, float], None]) -> None:
        super().__init__()
        self.report: Callable[[bool, float], None] | None = report
        self._stood = False

    def _look(self, lost_s: float = 0.0) -> None:
        stands = self._count <= 0
        if self.report is not None and (stands is not self._stood or lost_s):
            self.report(stands, lost_s)
            self._stood = stands

    def go(self) -> None:
        super().go()
        self._look()

    def stop(self) -> None:
        super().stop()
        self._look()

    def give_back(self, marks: tuple[float, float]) -> None:
        before = self()
        super().give_back(marks)
        self._look(before - self())


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


class Work:
    """Work for the current rollout, from `begin` on; can be marked as lost."""

    def __init__(self) -> None:
        self._clock = _current.get()
        self.begin()

    def begin(self) -> None:
        """Keep the work so far."""
        if self._clock is not None:
            self._clock.since = now = self._clock._now()
            self._marks = self._clock.marks(now)

    def give_back(self) -> None:
        """It is lost: its seconds are the rollout's again."""
        if self._clock is not None:
            self._clock.give_back(self._marks)
            self.begin()


class doing:  # a context manager, named as those of contextlib
    """The rollout that is current now awaits `what`, inside."""

    __slots__ = ("_before", "_clock", "_what")

    def __init__(self, what: str) -> None:
        self._what = what
        self._clock = _current.get()

    def __enter__(self) -> None:
        if self._clock is not None:
            self._before = self._clock.doing
            self._clock.now(self._what)

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.now(self._before)


class doubting:
    """What is worked inside for the rollout that is current now may turn out to be lost, so that a
    deadline which is due asks `look` after how many seconds it is to look again; 0: it has
    passed."""

    __slots__ = ("_before", "_clock", "_look")

    def __init__(self, look: Callable[[], float]) -> None:
        self._look = look
        self._clock = _current.get()

    def __enter__(self) -> None:
        if self._clock is not None:
            self._before, self._clock.doubt = self._clock.doubt, self._look

    def __exit__(self, *_: object) -> None:
        if self._clock is not None:
            self._clock.doubt = self._before


class waiting:
    """Waits inside do not count as work; see Wait."""

    __slots__ = ("_doing", "_wait")

    def __init__(self, what: str) -> None:
        self._wait, self._doing = Wait(), doing(what)

    def __enter__(self) -> Wait:
        self._wait.begin()
        self._doing.__enter__()
        return self._wait

    def __exit__(self, *_: object) -> None:
        self._doing.__exit__()
        self._wait.end()


@asynccontextmanager
async def admitted(places: asyncio.Semaphore, what: str) -> AsyncIterator[None]:
    """A place, which nobody works for while it is waited for."""
    with waiting(what):
        await places.acquire()
    try:
        yield
    finally:
        places.release()


class Timers:
    """Timers of one event loop, nearly all of which are cancelled long before they are due: those
    of one span share a timer of the loop, which gives each of them its own when the span begins.

    One of the loop's costs a place in its heap, and there would be several for each turn.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._spans: dict[int, dict[_Timed, None]] = {}  # in the order they were set

    def add(self, alarm: _Timed, seconds: float) -> None:
        """Let the alarm look at its clock in so many seconds."""
        now = self.loop.time()
        when = now + seconds
        span = int(when // SPAN_S)
        if span * SPAN_S <= now:
            alarm.timer, alarm.span = self.loop.call_at(when, alarm.look), None
            return
        if span not in self._spans:
            self._spans[span] = {}
            self.loop.call_at(span * SPAN_S, self._begin, span)
        alarm.timer, alarm.span, alarm.look_at = None, self._spans[span], when
        alarm.span[alarm] = None

    def _begin(self, span: int) -> None:
        for alarm in sorted(self._spans.pop(span), key=lambda alarm: alarm.look_at):
            alarm.timer, alarm.span = self.loop.call_at(alarm.look_at, alarm.look), None


_timers: Timers | None = None  # of the loop that set an alarm last


class _Timed:
    """A callback as soon as `clock()` has passed `when`; see `ring`."""

    __slots__ = ("_clock", "_when", "look_at", "span", "timer")

    def __init__(self, when: float, clock: Clock) -> None:
        self._when, self._clock = when, clock
        self.timer: asyncio.TimerHandle | None = None
        self.span: dict[_Timed, None] | None = None  # where it waits without a timer of its own
        self.look_at = 0.0

    def ring(self) -> None:
        """It is time; called once."""
        raise NotImplementedError

    def set(self) -> None:
        self._look_in(self._when - self._clock(), asyncio.get_running_loop())

    def cancel(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        elif self.span is not None:
            self.span.pop(self, None)

    def _look_in(self, seconds: float, loop: asyncio.AbstractEventLoop) -> None:
        global _timers
        if _timers is None or _timers.loop is not loop:
            _timers = Timers(loop)
        _timers.add(self, seconds)

    def look(self) -> None:
        """Ring if it is time, else look again later."""
        left_s = self._when - self._clock()
        if left_s <= CLOSE_S and isinstance(self._clock, WorkClock) and self._clock.doubt:
            left_s = self._clock.doubt()
        if left_s <= CLOSE_S:
            self.ring()
        else:
            self._look_in(max(left_s, LOOK_S), asyncio.get_running_loop())


class Alarm(_Timed):
    """Calls `ring` once, as soon as `clock()` has passed `when`."""

    __slots__ = ("_call",)

    def __init__(self, when: float, clock: Clock, ring: Callable[[], None]) -> None:
        super().__init__(when, clock)
        self._call = ring

    def ring(self) -> None:
        self._call()


class Deadline(_Timed):
    """What is awaited inside is cancelled, and `error`, or what it makes, is raised, once `clock()`
    has passed `when`."""

    # No Alarm: one that knows its deadline would be a cycle for each call of a tool, and those are
    # what the garbage collector would have to find among the tokens of all rollouts.
    __slots__ = ("_error", "_is_over", "_num_cancelled", "_task")

    def __init__(
        self, when: float, clock: Clock, error: Exception | Callable[[], Exception]
    ) -> None:
        super().__init__(when, clock)
        self._error = error
        self._task: asyncio.Task[Any] | None = None  # that is inside
        self._num_cancelled = 0  # cancellations of the task before it came in
        self._is_over = False

    @classmethod
    def after(cls, seconds: float, what: str, error: type[AgentEnvError]) -> Self:
        """`seconds` from now on, less those that the rollout waits; the error says that `what`
        took longer."""
        clock = work_clock() or asyncio.get_running_loop().time
        return cls(clock() + seconds, clock, lambda: error(f"{what} took over {seconds} s"))

    def ring(self) -> None:
        self.expire()

    def expire(self) -> None:
        """It has passed, whatever the clock says."""
        if self._task is not None and not self._is_over:
            self._is_over = True
            self._task.cancel()

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        self._task = asyncio.current_task(loop)
        assert self._task is not None
        self._num_cancelled = self._task.cancelling()
        self._look_in(self._when - self._clock(), loop)

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
    """What `work` gives; StallError says that `what` took longer, by the time of the loop."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await work
    except TimeoutError as error:
        if not limit.expired():  # it is what `work` raised
            raise
        raise StallError(
            f"{what} did not finish within {seconds:g} s: a disk, or the server that provides it, "
            "hangs"
        ) from error


def end(waited_for: asyncio.Future[None], work: object = None) -> None:
    """The awaited event happened; idempotent."""
    if not waited_for.done():
        waited_for.set_result(None)


def heed(done: asyncio.Future[Any]) -> None:
    """Nobody may be left to hear what it has raised; for `add_done_callback`."""
    if not done.cancelled():
        done.exception()


async def uncancelled(work: Awaitable[T]) -> T:
    """Wait for `work` to its end in spite of any number of cancellations of the waiter.

    Then what `work` raised goes on, or else the cancellation.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        ended: asyncio.Future[None] = task.get_loop().create_future()
        task.add_done_callback(partial(end, ended))
        try:
            await ended
        except asyncio.CancelledError as error:
            cancelled = error
    result = task.result()
    if cancelled is not None:
        raise cancelled
    return result


def backoff_s(
    attempt: int, key: str, *, first_s: float, max_s: float, at_least_s: float = 0.0
) -> float:
    """Seconds to wait after try number `attempt`, from 0, has failed.

    `first_s`, doubled with each try, or what the other side asks for by `at_least_s` if that is
    more; at most `max_s`; and then up to half as long again, so that those who failed together do
    not come back together. The spread is drawn from `key` and `attempt` alone: equal runs wait
    equally long.
    """
    delay = min(max_s, max(first_s * 2.0 ** min(attempt, 64), at_least_s))
    return delay * Random(f"{key}/{attempt}").uniform(1.0, 1.5)


class Restarts:
    """The restarts of one process: how long to wait before the next, and when to stop trying."""

    def __init__(self, limit: int, key: str, *, first_s: float, max_s: float) -> None:
        self.num = 0  # losses in a row
        self._limit, self._key = limit, key
        self._first_s, self._max_s = first_s, max_s

    def progressed(self) -> None:
        """The process worked before it was lost."""
        self.num = 0

    def lost(self) -> float | None:
        """Count a loss. Seconds to wait before the next start; None: there is no next one."""
        self.num += 1
        if self.num > self._limit:
            return None
        return backoff_s(self.num - 1, self._key, first_s=self._first_s, max_s=self._max_s)
