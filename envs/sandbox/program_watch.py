"""Inside the sandbox of a program: its use of CPU, memory, processes and disk, against its limits.
Needs only the standard library."""

from __future__ import annotations

import os
import resource
import signal
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentenv.envs.sandbox import process_table as table
else:  # inside the sandbox, only these files exist
    import process_table as table

DISK_EVERY_S = 1.0  # minimum interval; at most a tenth of the time is spent on it
TICKS_A_S = os.sysconf("SC_CLK_TCK")


class Watch:
    """Resource usage of all processes of a program, the descendants of this process."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._limits: dict[str, int] = settings["limits"]
        self._folders: list[str] = settings["watched"]
        self._seen: dict[int, float] = {}  # CPU seconds by process, also of ended ones
        self._disk_at = 0.0
        self.cpu_s = 0.0

    def ended(self, state: int | None) -> dict[str, Any]:
        """The report of the program's end, empty while it runs; `state` is its exit state."""
        if state is None:
            return {}
        self.look()
        code = os.waitstatus_to_exitcode(state)
        if code == -signal.SIGXCPU:
            return {"limit": "cpu"}
        return {"exit": code} if code >= 0 else {"signal": -code}

    def limit(self) -> dict[str, Any]:
        """The reached limit, empty if none."""
        found = self.look()
        taken = {
            "cpu": self.cpu_s,
            "memory": sum(memory for *_, memory in found.values()),
            "processes": len(found),
        }
        now = time.monotonic()
        if now >= self._disk_at:
            taken["disk"] = sum(map(_disk_bytes_of, self._folders))
            self._disk_at = now + max(DISK_EVERY_S, 10 * (time.monotonic() - now))
        for name, value in taken.items():
            if value > self._limits[name]:
                return {"limit": name}
        return {}

    def look(self) -> dict[int, tuple[float, float, int]]:
        """CPU seconds of each process, also with its ended children, and its bytes."""
        found = {pid: one for pid in descendants() if (one := _figures(pid)) is not None}
        self._seen |= {pid: seconds for pid, (seconds, *_) in found.items()}
        times = os.times()
        live = sum(seconds for _, seconds, _ in found.values())
        used = times.children_user + times.children_system + live
        self.cpu_s = max(self.cpu_s, used, sum(self._seen.values()))
        return found


def descendants() -> list[int]:
    """All descendants of this process: in its own namespace, all processes."""
    pids = table.processes()
    own = os.getpid()
    if own == 1:
        return [pid for pid in pids if pid != own]
    parents = {pid: parent for pid in pids if (parent := table.parent_of(pid)) is not None}
    found, known = list[int](), {own}
    while more := [pid for pid, parent in parents.items() if parent in known and pid not in known]:
        known.update(more)
        found += more
    return found


def _figures(pid: int) -> tuple[float, float, int] | None:
    fields = table.stat_of(pid)
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    if not fields:
        return None
    own, ended = (sum(map(int, fields[place : place + 2])) / TICKS_A_S for place in (11, 13))
    return own, own + ended, (resident - shared) * resource.getpagesize()


def _disk_bytes_of(folder: str) -> int:
    """Disk usage of all files below a folder, including directories; links are not followed, and
    mounts do not count."""
    total, folders = 0, [folder]
    device = os.stat(folder).st_dev
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    if found.st_dev != device:
                        continue
                    total += found.st_blocks * 512 + 256
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:
            continue
    return total
