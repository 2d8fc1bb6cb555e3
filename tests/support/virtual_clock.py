"""A virtual clock: asyncio.run with a clock that jumps to the next timer.

A virtual clock cannot wait for events outside its loop. `replaced(Inline())` runs functions on the
loop at once, in no time of that clock, and refuses processes, threads and sockets. So a program
under it runs in an order that does not depend on its surroundings: it is repeatable, and hours of
waiting cost nothing. If every task waits and no timer is set, the program is deadlocked:
DeadlockError names the waiting tasks and their lines.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import threading
from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any, TypeVar

from agentenv.base.offload import Machine, replaced

T = TypeVar("T")


class Inline(Machine):
    """Functions run on the loop, at once; there are no processes and no threads. Nothing is polled:
    a timer that is always set would keep a clock running after the last event."""

    async def in_thread(self, function: Callable[..., T], /, *arguments: Any, **keys: Any) -> T:
        await asyncio.sleep(0)  # others have their turn, as they would
        return function(*arguments, **keys)

    async def start_process(self, *command: str, **options: Any) -> asyncio.subprocess.Process:
        self.check_outside(command[0])
        raise AssertionError

    def start_thread(self, function: Callable[..., None], name: str) -> threading.Thread:
        self.check_outside(f"the thread {name!r}")
        raise AssertionError

    def check_outside(self, what: str) -> None:
        raise RuntimeError(f"nothing runs beside a virtual clock, and {what} would")

    async def poll_pause(self, seconds: float) -> None:
        await asyncio.get_running_loop().create_future()


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


def run_virtual(main: Coroutine[Any, Any, T], machine: Machine | None = None) -> T:
    """asyncio.run under a virtual clock that starts at 0. Raises DeadlockError."""
    with replaced(machine or Inline()), asyncio.Runner(loop_factory=VirtualClockLoop) as runner:
        return runner.run(main)


def on_virtual_clock(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs under a virtual clock."""

    @wraps(test)
    def run(*arguments: Any, **keys: Any) -> None:
        run_virtual(test(*arguments, **keys))

    return run


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
