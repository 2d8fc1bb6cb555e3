"""Work off the event loop: the single interface to threads and processes.

    await in_thread(read, path)             a function that waits for a disk, or computes a little
    await OwnThread("journal")(write, frames)   the same, in a thread that nothing else can hold up
    await start_process(*command, ...)      a program
    start_thread(serve, name="..")          a thread that lives on its own
    apart(run, name="..").result()          a function with an event loop of its own
    check_outside("the sandbox")            before threads and processes that it cannot start
    await look_again(0.02)                  between two looks of a part that only watches
    await kill(process)                     ends a program

Each of them ends: a call without an answer within its time raises StallError. A thread that hangs
cannot be ended; `hanging` names it, so that the command can end without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from agentenv.deadline import uncancelled, within
from agentenv.errors import StallError

T = TypeVar("T")
logger = logging.getLogger(__name__)

LONGEST_S = 3600.0  # loading a large model from a slow disk takes minutes
START_S = 60.0
KILL_S = 10.0
HANGS_S = 30.0  # a function that runs longer while the command ends is not waited for


class Job:
    """A function that runs in a thread, and since when by the clock of the machine."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.name = name_of(function)
        self.began = time.monotonic()  # threads are of the machine, whatever clock the loop has

    def __str__(self) -> str:
        return f"{self.name} (in a thread for {time.monotonic() - self.began:.0f} s)"


def name_of(function: Callable[..., Any]) -> str:
    """For people."""
    inner = getattr(function, "func", function)  # of a partial
    return getattr(inner, "__qualname__", type(inner).__qualname__)


_jobs: set[Job] = set()  # changed by the threads, each its own


def running(seconds: float) -> list[Job]:
    """Functions that have run in threads for so long."""
    now = time.monotonic()
    return [job for job in list(_jobs) if now - job.began > seconds]


def hanging() -> list[Job]:
    """Functions that have run in threads for so long that they will hardly end."""
    return running(HANGS_S)


class Machine:
    """Threads and processes of this machine. `threads` run the functions, None: those that the loop
    shares among all work."""

    def __init__(self, threads: ThreadPoolExecutor | None = None) -> None:
        self._threads = threads

    async def in_thread(self, function: Callable[..., T], /, *arguments: Any, **keys: Any) -> T:
        """The function's result, or the error that it raises."""

        def run() -> T:
            job = Job(function)
            _jobs.add(job)
            try:
                return function(*arguments, **keys)
            finally:
                _jobs.discard(job)

        loop, call = asyncio.get_running_loop(), partial(copy_context().run, run)
        what = name_of(function)
        return await within(LONGEST_S, what, loop.run_in_executor(self._threads, call))

    async def start_process(self, *command: str, **options: Any) -> asyncio.subprocess.Process:
        """A running program; `options` are those of asyncio.create_subprocess_exec."""
        what = f"the start of {command[0]}"
        starting = asyncio.ensure_future(asyncio.create_subprocess_exec(*command, **options))
        try:
            return await within(START_S, what, asyncio.shield(starting))
        except asyncio.CancelledError:  # else it would live on, and end after the loop
            await uncancelled(_end_of(starting))
            raise
        except StallError:
            starting.cancel()
            raise

    def start_thread(self, function: Callable[..., None], name: str) -> threading.Thread:
        """A running thread that does not keep the interpreter from ending."""
        thread = threading.Thread(target=function, name=name, daemon=True)
        thread.start()
        return thread

    def check_outside(self, what: str) -> None:
        """Raises RuntimeError where nothing can be outside of the loop."""

    async def look_again(self, seconds: float) -> None:
        """Returns when a part that only watches may look again."""
        await asyncio.sleep(seconds)


_shared = Machine()
_current = _shared


class OwnThread:
    """One thread for one kind of work, made when it is first wanted: the shared ones may all be
    held up, by tools or by files of a server that hangs."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: ThreadPoolExecutor | None = None

    async def __call__(self, function: Callable[..., T], /, *arguments: Any) -> T:
        """The function's result, or its error, after the functions before it."""
        if _current is not _shared:
            return await _current.in_thread(function, *arguments)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(1, thread_name_prefix=self._name)
        return await Machine(self._threads).in_thread(function, *arguments)

    def close(self) -> None:
        """Let the thread end once its work has; idempotent."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)


@contextmanager
def replaced(by: Machine) -> Iterator[None]:
    """Everything that is offloaded inside goes there: in tests to a machine of a virtual clock,
    which runs functions on the loop and refuses processes and threads."""
    global _current
    before, _current = _current, by
    try:
        yield
    finally:
        _current = before


async def in_thread(function: Callable[..., T], /, *arguments: Any, **keys: Any) -> T:
    """See Machine."""
    return await _current.in_thread(function, *arguments, **keys)


async def start_process(*command: str, **options: Any) -> asyncio.subprocess.Process:
    """See Machine."""
    return await _current.start_process(*command, **options)


def start_thread(function: Callable[..., None], name: str) -> threading.Thread:
    """See Machine."""
    return _current.start_thread(function, name)


def apart(function: Callable[[], T], name: str) -> Future[T]:
    """The outcome of a function in a thread of its own, such as one that runs an event loop."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(function())
        except BaseException as error:
            outcome.set_exception(error)

    start_thread(run, name)
    return outcome


def check_outside(what: str) -> None:
    """See Machine."""
    _current.check_outside(what)


async def _end_of(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """End a program that is being started."""
    try:
        async with asyncio.timeout(KILL_S):
            process = await starting
    except (TimeoutError, OSError, ValueError):  # it hangs, or there is none
        return
    await kill(process)


async def look_again(seconds: float) -> None:
    """See Machine."""
    await _current.look_again(seconds)


async def kill(process: asyncio.subprocess.Process) -> None:
    """End a program now, if it has not ended, and wait until the system has done so."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        try:
            async with asyncio.timeout(KILL_S):
                await process.wait()
        except TimeoutError:
            logger.warning(
                "process %d was killed but has not exited within %g s; it waits for a disk or a "
                "device that hangs",
                *(process.pid, KILL_S),
            )
