"""What code leaves behind in a process: tasks, descriptors, child processes."""

from __future__ import annotations

import asyncio
import os
from typing import NamedTuple

import psutil


class Leftovers(NamedTuple):
    """What an episode could leave behind in this process."""

    tasks: int
    descriptors: int
    processes: int

    @classmethod
    def now(cls) -> Leftovers:
        """The state at this moment."""
        directory = "/proc/self/fd"
        descriptors = len(os.listdir(directory)) if os.path.isdir(directory) else 0
        children = psutil.Process().children(recursive=True)
        return cls(len(asyncio.all_tasks()), descriptors, len(children))

    @classmethod
    async def settled(cls, wanted: Leftovers | None, settle_s: float) -> Leftovers:
        """The state once it is no more than `wanted`, or no longer falls, or after settle_s."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + settle_s
        last = cls.now()
        while loop.time() < deadline:
            await asyncio.sleep(0.05)
            state = cls.now()
            if wanted is not None and not state.beyond(wanted):
                return state
            if wanted is None and state == last:
                return state
            last = state
        return last

    def beyond(self, before: Leftovers) -> str:
        """What there is more of than before, in words; "" for nothing."""
        found = zip(("asyncio tasks", "file descriptors", "processes"), self, before, strict=True)
        return ", ".join(f"{now - then} {what} left" for what, now, then in found if now > then)
