"""Cancelling an awaitable exactly where it waits for the n-th time, for conformance checks."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Generator
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Ending = Literal["cancelled", "finished before", "went on", "stuck"]


async def cancel_at(awaitable: Awaitable[Any], suspension: int, timeout_s: float) -> Ending:
    """Run it, cancel where it waits for the n-th time, and say how it ended: "went on" returned a
    result all the same, "stuck" did not end within `timeout_s`."""
    task = asyncio.ensure_future(_cancelling(awaitable, suspension))
    await asyncio.wait({task}, timeout=timeout_s)
    if not task.done():
        task.cancel()
        return "stuck"
    if task.cancelled():
        return "cancelled"
    return "went on" if task.result()[0] else "finished before"


@types.coroutine
def _cancelling(awaitable: Awaitable[T], suspension: int) -> Generator[Any, Any, tuple[bool, T]]:
    """Passes every wait on to the event loop, and has this task cancelled in the n-th."""
    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    iterator = awaitable.__await__()
    error: BaseException | None = None
    count = 0
    while True:
        try:
            waiting = next(iterator) if error is None else iterator.throw(error)
        except StopIteration as stop:
            return count >= suspension, stop.value
        count += 1
        if count == suspension:
            loop.call_soon(task.cancel)
        try:
            yield waiting
            error = None
        except BaseException as raised:  # a cancellation, above all: the awaitable must see it
            error = raised
