"""How long the project waits for something, and what it waits for to the end.

    async with Deadline(when, clock, error): ...   raises `error` once the clock has passed `when`
    await uncancelled(env.close())                 ends it, however often the waiter is cancelled

The clock of a deadline may stand still. Rollouts are timed by `rollout_clock`, which stands still
while there is no engine to wait for: a server that dies and comes back, or sleeps during an update,
is not the policy's fault, and without this all trajectories that were running would end at their
limit of seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self, TypeVar

from agentenv.engine import Engine
from agentenv.errors import AgentEnvError

T = TypeVar("T")
Clock = Callable[[], float]  # seconds; must not run faster than the event loop's time

CLOSE_S = 1e-6  # a deadline as near as this has passed
LOOK_S = 0.01  # how often at most a deadline looks whether its clock runs again


def rollout_clock(engine: Engine) -> Clock:
    """Seconds of the event loop less those in which the engine was gone or asleep.

    Only engines that can be gone for a while have `outage_s`.
    """

    def clock() -> float:
        outage_s: float = getattr(engine, "outage_s", 0.0)
        return asyncio.get_running_loop().time() - outage_s

    return clock


class Deadline:
    """What is awaited inside is cancelled, and `error` raised, once `clock()` has passed `when`."""

    def __init__(self, when: float, clock: Clock, error: Exception) -> None:
        self._when, self._clock, self._error = when, clock, error
        self._timeout = asyncio.timeout(None)
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    def after(cls, seconds: float, what: str, error: type[AgentEnvError]) -> Self:
        """`seconds` from now on the event loop's clock; the error says that `what` took longer."""
        clock = asyncio.get_running_loop().time
        return cls(clock() + seconds, clock, error(f"{what} took over {seconds} s"))

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()
        self._look_in(self._when - self._clock())

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        try:
            await self._timeout.__aexit__(kind, error, trace)
        except TimeoutError as late:
            raise self._error from late

    def _look_in(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        left_s = self._when - self._clock()
        if left_s <= CLOSE_S:
            self._timeout.reschedule(asyncio.get_running_loop().time())
        else:
            self._look_in(max(left_s, LOOK_S))


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
