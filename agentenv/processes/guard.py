"""Runs one process ("the server") and ends all its descendants with the starting process.

    python -I -S guard.py GRACE_S COMMAND ...
    python -I -S guard.py --stdin GRACE_S COMMAND ...      the command inherits standard input
    python -I -S guard.py --alone GRACE_S COMMAND ...      ends only by SIGTERM or by itself

It stops the server when its standard input ends (which happens no matter how the process at the
other end dies), when the process that started it dies, and on SIGTERM. It sends SIGTERM and, after
GRACE_S seconds, SIGKILL to all descendants, since orphans become children of the guard. Then it
removes the sockets and the shared memory that killed engines leave; for this, the server has its
own temporary folder. If the guard is killed too, the next guard of the same user removes them: the
folder has a list of the shared memory, and a lock that guard and server hold. Needs only the
standard library. The exit status is the server's; 128 + n if signal n ended it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
INTERVAL_S = 0.2
LOOK_EVERY_S = 5.0
# Files that engines map and leave when they are killed: load statistics, semaphores, queues.
SHARED = ("/dev/shm/sglang_loads_", "/dev/shm/sem.mp-", "/dev/shm/psm_")
PREFIX, LIST = "agentenv-server-", ".shared-memory"  # folder prefix; file of lines "INODE PATH"
GUARD = Path(__file__).resolve()


def guarded(
    command: Sequence[str], grace_s: float, *, stdin: bool = False, alone: bool = False
) -> list[str]:
    """The command line of a guard that runs `command`; see above."""
    mode = ["--stdin"] if stdin else ["--alone"] if alone else []
    return [sys.executable, "-I", "-S", str(GUARD), *mode, str(grace_s), *command]


def main(argv: list[str]) -> int:
    passes_on, is_alone = argv[0] == "--stdin", argv[0] == "--alone"
    grace_s, *command = argv[1:] if passes_on or is_alone else argv
    parent = os.getppid()
    if not is_alone:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    is_requested = False

    def request_stop(*_: object) -> None:
        nonlocal is_requested
        is_requested = True

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, request_stop)
    if os.getppid() != parent and not is_alone:  # the parent died before the first prctl
        return 1
    # torch's compile cache survives restarts, although the temporary folder does not
    compiled = f"{tempfile.gettempdir()}/torchinductor_{os.environ.get('USER') or os.getuid()}"
    _remove_left()
    own, lock = _own_folder()
    env = {"TORCHINDUCTOR_CACHE_DIR": compiled, **os.environ, "TMPDIR": own}
    stdin = None if passes_on else subprocess.DEVNULL
    try:
        server = subprocess.Popen(
            command, stdin=stdin, start_new_session=True, env=env, pass_fds=[lock]
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]}: {error.strerror}\n")
        shutil.rmtree(own, ignore_errors=True)
        return 127
    inputs = [] if passes_on or is_alone else [sys.stdin.fileno()]
    shared = _watch(server, inputs, own, lambda: is_requested) | _shared_memory()
    if server.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(float(grace_s))
    _kill_descendants(server)
    for path in shared:
        with contextlib.suppress(OSError):
            path.unlink()
    shutil.rmtree(own, ignore_errors=True)
    status = server.wait()
    return status if status >= 0 else 128 - status


def _watch(
    server: subprocess.Popen[bytes], inputs: list[int], own: str, is_requested: Callable[[], bool]
) -> set[Path]:
    """Wait for the end of the server, of an input, or a requested end; returns the shared memory
    seen so far."""
    shared: set[Path] = set()
    look = 0.0
    with contextlib.suppress(OSError, AttributeError):  # where the system supports it
        inputs = [*inputs, os.pidfd_open(server.pid)]
    while server.poll() is None and not is_requested():
        if time.monotonic() > look:  # before it can be killed
            shared |= _listed(_shared_memory() - shared, own)
            look = time.monotonic() + LOOK_EVERY_S
        if select.select(inputs, [], [], INTERVAL_S)[0]:
            server.poll()  # it may be its end
            break
    return shared


def _shared_memory() -> set[Path]:
    """Shared-memory files of engines, which remain if they are killed. Their names are random and
    appear only in the mappings of the server's processes."""
    found = set()
    for pid in _descendants(os.getpid()):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {
                Path(line[line.index("/") :])
                for line in lines
                if any(f" {one}" in line for one in SHARED)
            }
    return found


def _own_folder() -> tuple[str, int]:
    """A folder, and its lock, which child processes inherit."""
    own = tempfile.mkdtemp(prefix=PREFIX)
    lock = os.open(own, os.O_RDONLY)
    with contextlib.suppress(OSError):  # a file system without locks, or a full one
        fcntl.flock(lock, fcntl.LOCK_EX)
        Path(own, LIST).touch()  # from now on it is a leftover unless a process holds its lock
    return own, lock


def _listed(found: set[Path], own: str) -> set[Path]:
    """These files, after recording them for the next guard."""
    with contextlib.suppress(OSError), Path(own, LIST).open("r+") as file:
        file.seek(0, os.SEEK_END)
        for path in found:
            with contextlib.suppress(FileNotFoundError):
                file.write(f"{path.stat().st_ino} {path}\n")
    return found


def _remove_left() -> None:
    """Remove the leftovers of guards that were killed with their servers: our folders without a
    lock, and the shared memory on their lists, unless its inode has changed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            opened.callback(os.close, lock)
            if os.fstat(lock).st_uid != os.getuid():
                continue
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            for line in (folder / LIST).read_text(errors="replace").splitlines():
                inode, _, path = line.partition(" ")
                with contextlib.suppress(OSError, ValueError):  # gone; damaged
                    if path.startswith(SHARED) and str(os.stat(path).st_ino) == inode:
                        os.unlink(path)
            shutil.rmtree(folder, ignore_errors=True)


def _kill_descendants(server: subprocess.Popen[bytes]) -> None:
    """Kill until none is left: the guard inherits the children of a process that dies."""
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
    """Live processes below `root`, from /proc; without /proc none, so that killpg must suffice."""
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


def prctl(option: int, value: int) -> None:
    """Set an option of this process."""
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
