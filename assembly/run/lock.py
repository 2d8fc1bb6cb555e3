"""The lock of the directory of a run or an evaluation: one process at a time writes there."""

from __future__ import annotations

import fcntl
import os
import socket
import time
import weakref
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from agentenv.base.errors import ConfigError

JOB_VARIABLE = "AGENTENV_JOB"  # a unique name of the process's job


class LockHolder(Struct, frozen=True):
    """The process that holds the lock of a run, `since` a local time. A job has one process at a
    time, and may restart it on another host."""

    pid: int
    host: str
    since: str = ""
    job: str = ""

    @classmethod
    def me(cls) -> LockHolder:
        job, since = os.environ.get(JOB_VARIABLE, ""), time.strftime("%Y-%m-%d %H:%M:%S")
        return cls(os.getpid(), socket.gethostname(), since, job)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host} since {self.since}"


class Lock:
    """The lock of a directory: one process at a time writes there. `close` releases it.

    The system releases the lock when the process dies. The file's content names the holder; it
    alone counts on file systems without locks, or without locks across machines.
    """

    def __init__(self, path: Path, remedy: str, *, takes_over: bool = False) -> None:
        """`path`: the lock's file. `takes_over`: a holder on another host that only the file names
        counts as ended. Raises ConfigError, with the remedy, if another process holds the lock."""
        self.path = path
        self._file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        self._release = weakref.finalize(self, os.close, self._file)
        try:
            self._take(remedy, takes_over)
        except BaseException:
            self._release()
            raise

    def _take(self, remedy: str, takes_over: bool) -> None:
        is_held, is_known, folder = False, True, self.path.parent
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            is_held = True
        except OSError:
            is_known = False
        try:
            before = msgspec.json.decode(os.pread(self._file, 4096, 0), type=LockHolder)
        except msgspec.DecodeError:  # an empty or truncated file
            before = None
        me = LockHolder.me()
        if before is not None and before.host == me.host and not is_known:
            is_held = before.pid != me.pid and psutil.pid_exists(before.pid)
        if is_held:
            raise ConfigError(
                f"{folder} is in use by {before or 'another process'}; wait until it ends, {remedy}"
            )
        is_same_job = before is not None and bool(me.job) and before.job == me.job
        if before is not None and before.host != me.host and not (is_same_job or takes_over):
            raise ConfigError(
                f"{folder} is in use by {before}, which {me.host} cannot check; if it no longer "
                f"runs there, remove {self.path}"
            )
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, msgspec.json.encode(me), 0)

    def close(self) -> None:
        """Release the lock; idempotent."""
        if self._release.alive:
            os.ftruncate(self._file, 0)
            self._release()
