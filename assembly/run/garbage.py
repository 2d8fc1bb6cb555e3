"""Garbage collection and the heap of a process in which thousands of rollouts grow."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from agentenv.base.offload import poll_pause

FREEZE_S, FULL_S = 1.0, 300.0  # between freezes; between full collections
RARELY = 1000  # a full collection may take at most 1/RARELY of the time
MUCH_BYTES = 1 << 30
SWITCH_S = 0.001
# Parameters of glibc's `mallopt`.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
TRIM_BYTES, MMAP_BYTES = 1 << 20, 1 << 16


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Inside, while rollouts grow, collect garbage seldom; existing objects are exempt (frozen).

    Python's default collections walk the tokens of every rollout, which takes a third of the
    controller's time and causes stalls of over a second. Reference counts free the trees at once;
    only reference cycles wait longer.
    """
    collecting: asyncio.Task[None] | None = None
    if "torch" not in sys.modules:  # else each CPU tensor would be a new memory mapping
        _set_malloc({M_TRIM_THRESHOLD: TRIM_BYTES, M_MMAP_THRESHOLD: MMAP_BYTES})
    before, switch_s = gc.get_threshold(), sys.getswitchinterval()
    # Each write to a file or a socket releases the GIL; the loop then waits this long to get it
    # back from a busy thread.
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
    with suppress(RuntimeError):  # no loop runs
        collecting = asyncio.get_running_loop().create_task(_collect())
    try:
        yield
    finally:
        if collecting is not None:
            collecting.cancel()
        sys.setswitchinterval(switch_s)
        gc.set_threshold(*before)
        gc.unfreeze()


async def _collect() -> None:
    """Freeze new objects every FREEZE_S, and run a full collection every FULL_S, or when the
    process has grown by MUCH_BYTES. The interval grows after a collection that took long (RARELY).
    Runs until cancelled.

    A collection costs time for each object that it visits, and 10,000 rollouts create many objects
    in a moment: five collections per second took 100 us of each env step, and Python's own
    generational collections stalled the loop for 360 ms.
    """
    collected, peak, pause_s = time.monotonic(), _peak_bytes(), FULL_S
    while True:
        await poll_pause(FREEZE_S)
        began = time.monotonic()
        if began - collected > pause_s or _peak_bytes() - peak > MUCH_BYTES:
            gc.unfreeze()
            gc.collect()
            collected, peak = time.monotonic(), _peak_bytes()
            pause_s = max(FULL_S, RARELY * (collected - began))
        gc.freeze()


def _peak_bytes() -> int:
    """The peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def share_heap() -> None:
    """Let all threads of this process allocate from one heap (malloc arena). With an arena per
    thread, memory freed by one thread does not serve the next; a tenth of the CPU at 10,000
    rollouts."""
    _set_malloc({M_ARENA_MAX: 1})


def _set_malloc(options: dict[int, int]) -> None:
    """Set parameters of glibc's malloc; does nothing for other C libraries."""
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        for option, value in options.items():
            mallopt(option, value)
