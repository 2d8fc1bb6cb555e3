"""Runs one server and sees to it that none of its processes outlives the run.

    python -I -S server_guard.py GRACE_S COMMAND ...

It stops the server when its standard input ends, which happens however the process at the other
end dies, and when it is told to (SIGTERM). First it asks, after GRACE_S seconds it kills: all
descendants, since those that lose their parent become children of the guard. Needs nothing but
the standard library. The exit status is the server's, 128 + n if signal n ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
INTERVAL_S = 0.2


def main(argv: list[str]) -> int:
    grace_s, command = float(argv[0]), argv[1:]
    parent = os.getppid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    told = False

    def tell(*_: object) -> None:
        nonlocal told
        told = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, tell)
    if os.getppid() != parent:  # gone before the first prctl
        return 1
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while server.poll() is None and not told:
        ended, _, _ = select.select([sys.stdin], [], [], INTERVAL_S)
        told = told or bool(ended)
    if server.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        _await(server, grace_s)
    _kill_descendants(server)
    status = server.wait()
    return status if status >= 0 else 128 - status


def _await(server: subprocess.Popen[bytes], seconds: float) -> None:
    end = time.monotonic() + seconds
    while server.poll() is None and time.monotonic() < end:
        time.sleep(INTERVAL_S / 4)


def _kill_descendants(server: subprocess.Popen[bytes]) -> None:
    """Kill until there are none: a process that dies leaves its children to the guard."""
    for _ in range(100):
        found = _descendants(os.getpid())
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(INTERVAL_S / 20)
        server.poll()  # first, so that its status is kept
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _descendants(root: int) -> list[int]:
    """Living processes below `root`, from /proc (elsewhere: none, and killpg has to do)."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z" or int(parent) == root:
                children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def _prctl(option: int, value: int) -> None:
    """Linux only; elsewhere the end of standard input has to do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
