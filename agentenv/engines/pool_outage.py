"""How long a pool has been without any server, and when that is too long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Outage:
    """A clock that runs while no server is there; `on_end` is called after `max_s` in one go."""

    def __init__(self, max_s: float, on_end: Callable[[], None]) -> None:
        self._max_s, self._on_end = max_s, on_end
        self._timer: asyncio.TimerHandle | None = None
        self._began = 0.0
        self._past_s = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of all outages so far."""
        if self._timer is None:
            return self._past_s
        return self._past_s + asyncio.get_running_loop().time() - self._began

    def watch(self, *, running: bool) -> None:
        """Start or stop the clock."""
        if running and self._timer is None:
            loop = asyncio.get_running_loop()
            self._began = loop.time()
            self._timer = loop.call_later(self._max_s, self._on_end)
        elif not running and self._timer is not None:
            self._timer.cancel()
            self._past_s, self._timer = self.total_s, None
