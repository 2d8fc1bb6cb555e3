"""Work off the event loop: the single interface to threads and processes.

    await in_thread(read, path)             runs a short function, such as a disk access
    await OwnThread("journal")(write, frames)   the same, in a dedicated thread
    await start_process(*command, ...)      starts a program
    start_thread(serve, name="..")          starts a daemon thread
    result_of(in_new_thread(run, "..."))    runs a function with its own event loop
    check_outside("the sandbox")            raises where threads and processes are not allowed
    await poll_pause(0.02)                  sleeps between two polls
    await kill(process)                     kills a program and waits for its end

No wait is unbounded: a call that takes too long raises StallError. A thread that hangs cannot be
stopped; `hanging` lists it, so that the command can exit without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from io import IOBase
from typing import Any, TypeVar

from agentenv.base.deadline import uncancelled, within
from agentenv.base.errors import StallError

T = TypeVar("T")
logger = logging.getLogger(__name__)

NUM_THREADS = 32
LONGEST_S = 3600.0  # loading a large model from a slow disk takes minutes
START_S = 60.0
KILL_S = 10.0
SIGNAL_S = 0.2
HANGS_S = 30.0  # when the command exits, it does not wait for functions that have run longer


class Job:
    """A function that runs in a thread, and its start by the machine's clock."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = name_of(function)
        self.began = time.monotonic()  # threads use real time, even if the loop's clock is virtual

    def __str__(self) -> str:
        return f"{self.name} (in a thread for {time.monotonic() - self.began:.0f} s)"


def name_of(function: Callable[..., Any]) -> str:
    """The function's name for messages."""
    inner = getattr(function, "func", function)  # unwrap a partial
    return getattr(inner, "__qualname__", type(inner).__qualname__)


_jobs: set[Job] = set()  # each thread adds and removes its own job


def running(seconds: float) -> list[Job]:
    """Functions that have run in threads for more than this many seconds."""
    now = time.monotonic()
    return [job for job in list(_jobs) if now - job.began > seconds]


def hanging() -> list[Job]:
    """Functions in threads that probably hang: they have run for over HANGS_S seconds."""
    return running(HANGS_S)


class Machine:
    """Threads and processes of this machine. `threads` runs the functions: not those of the event
    loop, which also resolve names, and which functions that hang would hold up."""

    def __init__(self, threads: ThreadPoolExecutor | None = None) -> None:
        self._threads = threads or _threads()

    async def in_thread(self, function: Callable[..., T], /, *arguments: Any, **keys: Any) -> T:
        """The function's result; a file that comes after a cancellation is closed. Raises the
        function's error, and StallError after LONGEST_S seconds."""

        def run() -> T:
            job = Job(function)
            _jobs.add(job)
            try:
                return function(*arguments, **keys)
            finally:
                _jobs.discard(job)

        call = self._threads.submit(copy_context().run, run)
        try:
            return await within(LONGEST_S, name_of(function), asyncio.wrap_future(call))
        except (asyncio.CancelledError, StallError):
            call.add_done_callback(_close_file)
            raise

    async def start_process(self, *command: str, **options: Any) -> asyncio.subprocess.Process:
        """A running program; `options` are those of asyncio.create_subprocess_exec."""
        what = f"the start of {command[0]}"
        starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, **options))
        try:
            return await within(START_S, what, asyncio.shield(starting))
        except asyncio.CancelledError:  # otherwise the process would outlive the loop
            await uncancelled(_end_of(starting))
            raise
        except StallError:
            starting.cancel()
            raise

    def start_thread(self, function: Callable[..., None], name: str) -> threading.Thread:
        """Start a daemon thread, which does not keep the interpreter alive."""
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        return thread

    def check_outside(self, what: str) -> None:
        """Raise RuntimeError, naming `what`, if this machine allows no threads or processes."""

    async def poll_pause(self, seconds: float) -> None:
        """Sleep between two polls of something that is only observed."""
        await asyncio.sleep(seconds)


def _close_file(call: Future[Any]) -> None:
    if not call.cancelled() and call.exception() is None and isinstance(call.result(), IOBase):
        call.result().close()


_threads = partial(ThreadPoolExecutor, NUM_THREADS, "agentenv")
_shared = Machine()
_current = _shared
# a forked process has none of them
os.register_at_fork(after_in_child=lambda: setattr(_shared, "_threads", _threads()))


class OwnThread:
    """A dedicated thread for one kind of work, or `count` of them, created on first use. The shared
    threads may all be blocked, by tools or by a file server that hangs."""

    def __init__(self, name: str, count: int = 1) -> None:
        self._name, self._count = name, count
        self._threads: ThreadPoolExecutor | None = None

    async def __call__(self, function: Callable[..., T], /, *arguments: Any, **keys: Any) -> T:
        """The function's result, or its error; functions start in the order of the calls."""
        if _current is not _shared:
            return await _current.in_thread(function, *arguments, **keys)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._count, thread_name_prefix=self._name)
        return await Machine(self._threads).in_thread(function, *arguments, **keys)

    def close(self) -> None:
        """Stop the thread after its pending functions, without waiting for it. Idempotent."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)


@contextmanager
def replaced(by: Machine) -> Iterator[None]:
    """Within the block, offload to this machine. Tests use one with a virtual clock, which runs
    functions on the loop and refuses processes and threads."""
    global _current
    before, _current = _current, by
    try:
        yield
    finally:
        _current = before


async def in_thread(function: Callable[..., T], /, *arguments: Any, **keys: Any) -> T:
    """See the method of Machine."""
    return await _current.in_thread(function, *arguments, **keys)


async def start_process(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """See the method of Machine."""
    return await _current.start_process(*command, **options)


def start_thread(function: Callable[..., None], name: str) -> threading.Thread:
    """See the method of Machine."""
    return _current.start_thread(function, name)


def in_new_thread(function: Callable[[], T], name: str) -> Future[T]:
    """Run a function in a new thread, for instance one that runs an event loop; a future of its
    result."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    start_thread(run, name)
    return outcome


def result_of(outcome: Future[T]) -> T:
    """The result, once it is there; Ctrl-C ends the wait. The system may hand a signal to another
    thread, which does not wake the main one, whose turn it is to handle it: so the wait is in
    pieces."""
    while not outcome.done():
        wait([outcome], SIGNAL_S)
    return outcome.result()


def check_outside(what: str) -> None:
    """See the method of Machine."""
    _current.check_outside(what)


async def _end_of(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """Kill a program whose start is pending."""
    try:
        async with asyncio.timeout(KILL_S):
            process = await starting
    except (TimeoutError, OSError, ValueError):  # the start hangs, or it failed
        return
    await kill(process)


async def poll_pause(seconds: float) -> None:
    """See the method of Machine."""
    await _current.poll_pause(seconds)


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a program unless it has exited, and wait for its exit, KILL_S seconds at most."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        try:
            async with asyncio.timeout(KILL_S):
                await process.wait()
        except TimeoutError:
            text = (
                "process %d was killed but has not exited within %g s; it is blocked by a disk or "
                "a device that hangs"
            )
            logger.warning(text, process.pid, KILL_S)
