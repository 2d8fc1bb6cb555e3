"""An event loop whose clock jumps to the next timer, so that hours of waiting cost nothing.

    run_virtual(training.run_all())      asyncio.run, from time 0 on

What a program does on it happens in an order that nothing outside decides, so that the same program
does the same again. Functions that are taken off the loop (`agentenv/offload.py`) run on it, in no
time; processes, threads and sockets are refused, since this clock cannot wait for them. Where every
task waits and no timer is set, nothing can ever happen again: DeadlockError names who waits where.
"""

from __future__ import annotations

import asyncio
import os
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from agentenv.offload import Inline, replaced

T = TypeVar("T")
LIBRARY = os.path.dirname(asyncio.__file__)


class DeadlockError(RuntimeError):
    """Every task waits for another one, and no timer is set."""


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: where a real selector would sleep, it moves the loop's clock instead."""

    loop: VirtualClockLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise DeadlockError(f"deadlock: {waiting_tasks(self.loop)}, and no timer is set")
        if not ready and timeout:
            self.loop.now += timeout
        return ready


class VirtualClockLoop(asyncio.SelectorEventLoop):
    """`now` is the time, which a test may move on."""

    def __init__(self) -> None:
        self.now = 0.0
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self.now


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """asyncio.run under a virtual clock that starts at 0. Raises DeadlockError."""
    with replaced(Inline()), asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


def waiting_tasks(loop: asyncio.AbstractEventLoop) -> str:
    """How many tasks wait, and in which line of which coroutine."""
    places = sorted(_place(task) for task in asyncio.all_tasks(loop))
    return f"{len(places)} tasks wait ({'; '.join(dict.fromkeys(places))})"


def _place(task: asyncio.Task[Any]) -> str:
    """The innermost line that is not asyncio's own."""
    awaited: Any = task.get_coro()
    found = None
    while (frame := getattr(awaited, "cr_frame", None)) is not None:
        if found is None or not frame.f_code.co_filename.startswith(LIBRARY):
            found = frame
        awaited = awaited.cr_await
    if found is None:
        return "a task that has ended"
    return f"{found.f_code.co_qualname} in {found.f_code.co_filename}:{found.f_lineno}"
