"""One process: its start below a guard, its log, its end, its restarts; and where processes run.

A guard (agentenv/guard.py) ends a process of this machine with all its descendants when this
process ends, however that happens.
"""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Protocol

from msgspec import Struct

from agentenv.deadline import backoff_s
from agentenv.errors import PACKAGES
from agentenv.guard import guarded
from agentenv.offload import in_thread, kill, start_process

GRACE_S = 10.0  # from SIGTERM to SIGKILL
TAIL_BYTES = 2000


class ProcessSpec(Struct, array_like=True, frozen=True):
    """A process to start: its name, its command, variables on top of the machine's, its log file,
    its resources as Ray counts them ({"CPU": 1}), its working directory, and variables of this
    process that it does not get."""

    name: str
    command: list[str]
    env: dict[str, str]
    log: str
    resources: dict[str, float] = {}
    cwd: str | None = None
    unset: list[str] = []


class LocalProcess:
    """A process of this machine below a guard, which ends it when this process ends."""

    def __init__(self, spec: ProcessSpec, grace_s: float = GRACE_S) -> None:
        self.spec, self._grace_s = spec, grace_s
        self._guard: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """Of the guard, whose child the process is."""
        assert self._guard is not None
        return self._guard.pid

    @property
    def status(self) -> int | None:
        """Exit status; None while it runs."""
        return None if self._guard is None else self._guard.returncode

    async def start(self) -> None:
        env = {name: text for name, text in os.environ.items() if name not in self.spec.unset}
        opening = asyncio.ensure_future(in_thread(open_log, Path(self.spec.log)))
        try:
            log = await asyncio.shield(opening)
            self._guard = await start_process(
                *guarded(self.spec.command, self._grace_s),
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=env | self.spec.env,
                cwd=self.spec.cwd,
                start_new_session=True,
            )
        finally:  # a cancellation leaves the thread at work, which opens the log all the same
            opening.add_done_callback(_close_log)
            await asyncio.wait([opening], timeout=self._grace_s)

    async def ended(self) -> str:
        """Wait for the end of the process; how it ended."""
        assert self._guard is not None
        return how_it_ended(await self._guard.wait())

    async def stop(self) -> None:
        """End the process with its descendants. Idempotent."""
        guard = self._guard
        if guard is None:
            return
        if guard.stdin is not None:
            guard.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._grace_s + 5.0):
                await guard.wait()
        await kill(guard)


def how_it_ended(status: int) -> str:
    """An exit status in words; that of a guard is 128 + n for signal n."""
    if status < 0 or status > 128:
        with suppress(ValueError):
            name = signal.Signals(abs(status) % 128).name
            hint = " (the system does that when memory runs out: see dmesg)"
            return f"was killed by {name}{hint if name == 'SIGKILL' else ''}"
    return f"ended with status {status}"


def python_path() -> str:
    """PYTHONPATH of a process that runs a module of this project."""
    return os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")]))


def _close_log(opening: asyncio.Future[BinaryIO]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to; its folder is created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab", buffering=0)


def log_tail(path: Path, max_bytes: int = TAIL_BYTES) -> str:
    """The end of a log; empty if there is none."""
    with suppress(OSError), path.open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - max_bytes))
        return log.read().decode(errors="replace").strip()
    return ""


class Restarts:
    """The restarts of one process: how long to wait before the next, and when to stop trying."""

    def __init__(self, limit: int, key: str, *, first_s: float, max_s: float) -> None:
        self.num = 0  # losses in a row
        self._limit, self._key = limit, key
        self._first_s, self._max_s = first_s, max_s

    def progressed(self) -> None:
        """The process worked before it was lost."""
        self.num = 0

    def lost(self) -> float | None:
        """Count a loss. Seconds to wait before the next start; None: there is no next one."""
        self.num += 1
        if self.num > self._limit:
            return None
        return backoff_s(self.num - 1, self._key, first_s=self._first_s, max_s=self._max_s)


class Placement(Protocol):
    """Where processes run. `host` is the address of this process for them. `is_patient`: a process
    may have to wait for room, without a bound."""

    is_patient: bool

    @property
    def host(self) -> str: ...

    async def start(self, spec: ProcessSpec) -> None:
        """Return when the process runs, or is expected. Raises WorkerError where it cannot run."""
        ...

    async def ended(self, name: str) -> str:
        """Wait for the end of the process; how it ended."""
        ...

    async def stop(self, name: str) -> None:
        """End the process, if there is one."""
        ...


class LocalPlacement:
    """This machine."""

    host = "127.0.0.1"
    is_patient = False

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._processes: dict[str, LocalProcess] = {}

    async def start(self, spec: ProcessSpec) -> None:
        process = self._processes[spec.name] = LocalProcess(spec, self._grace_s)
        await process.start()

    async def ended(self, name: str) -> str:
        return await self._processes[name].ended()

    async def stop(self, name: str) -> None:
        if name in self._processes:
            await self._processes[name].stop()


class ExternalPlacement:
    """Machines on which others start the processes: Slurm, Kubernetes, or a person."""

    is_patient = True

    def __init__(self, host: str) -> None:
        self.host = host

    async def start(self, spec: ProcessSpec) -> None:
        """Expected from now on."""

    async def ended(self, name: str) -> str:
        """Only its link shows its end."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    async def stop(self, name: str) -> None:
        """It ends with its link."""
