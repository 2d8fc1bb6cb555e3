"""Work of a client that no caller waits for: a cancelled one must end at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

LAST_S = 5.0  # for what is under way when the client is closed


class Background:
    """Keeps its tasks until they end."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Let them end; those that are slow are cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_S)
        for task in self._tasks:
            task.cancel()
