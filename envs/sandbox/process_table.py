"""Inside a sandbox: its processes, as /proc shows them, and their ends. Needs only the standard
library."""

from __future__ import annotations

import os
import signal


def processes() -> list[int]:
    """All processes, roughly in the order of their start."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat_of(pid: int) -> list[str]:
    """The fields of a process's stat after its name, beginning with the state; none if it has
    ended."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def parent_of(pid: int) -> int | None:
    """The parent; None if the process has ended."""
    fields = stat_of(pid)
    return int(fields[1]) if fields else None


def is_child(pid: int) -> bool:
    """Whether it is a child of this process."""
    return parent_of(pid) == os.getpid()


def has_capabilities(pid: int) -> bool:
    """Whether a process has any capability. Raises OSError."""
    with open(f"/proc/{pid}/status") as file:
        status = dict(line.split(":\t", 1) for line in file if ":\t" in line)
    return any(int(status[f"Cap{name}"], 16) for name in ("Inh", "Prm", "Eff", "Amb"))


def open_files(pid: int) -> dict[str, str]:
    """The targets of a process's descriptors, by number. Raises OSError."""
    folder = f"/proc/{pid}/fd"
    return {fd: os.readlink(f"{folder}/{fd}") for fd in os.listdir(folder)}


def end(pid: int) -> None:
    """Kill a child without the system call kill, which the filter would pass to the broker."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return
    try:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
