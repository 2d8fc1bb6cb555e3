"""Deadlines that do not count the time in which no engine was there to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from agentenv.engine import Engine

MARGIN_S = 1e-3  # how long before a deadline it is looked whether it moves


class Patience:
    """Moves an entered asyncio.timeout by the outages of the engine (its `outage_s`).

    A server that dies and comes back is not the policy's fault: without this, all trajectories
    that were running would end at their limit of seconds. `on_move` is told the new deadline.
    """

    def __init__(
        self,
        engine: Engine,
        timeout: asyncio.Timeout,
        on_move: Callable[[float], None] = lambda when: None,
    ) -> None:
        self._engine, self._timeout, self._on_move = engine, timeout, on_move
        self._counted_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self._counted_s = self._outage_s()
        self._arm()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        when = self._timeout.when()
        if when is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(when - MARGIN_S, self._look)

    def _look(self) -> None:
        outage_s = self._outage_s()
        lost_s, self._counted_s = outage_s - self._counted_s, outage_s
        when = self._timeout.when()
        if lost_s > MARGIN_S and when is not None:
            self._timeout.reschedule(when + lost_s)
            self._on_move(when + lost_s)
            self._arm()

    def _outage_s(self) -> float:
        # Only engines that can be gone for a while have it.
        found: float = getattr(self._engine, "outage_s", 0.0)
        return found
