"""How long an engine could not sample, and when that is too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Outage:
    """A clock that runs while no server is there; `on_end` is called after `max_s` in one go,
    unless the outage is `wanted`."""

    def __init__(self, max_s: float = 0.0, on_end: Callable[[], None] = lambda: None) -> None:
        self._max_s, self._on_end = max_s, on_end
        self._running = False
        self._timer: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._past_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all outages so far."""
        if not self._running:
            return self._past_s
        return self._past_s + asyncio.get_running_loop().time() - self._began

    def watch(self, *, running: bool, wanted: bool = False) -> None:
        """Start or stop the clock. `wanted`: the servers sleep, for as long as it takes."""
        if running != self._running:
            self._past_s, self._running = self.total_s, running
            if running:
                self._began = asyncio.get_running_loop().time()
        limited = running and not wanted
        if limited and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._max_s, self._on_end)
        elif not limited and self._timer is not None:
            self._timer.cancel()
            self._timer = None
