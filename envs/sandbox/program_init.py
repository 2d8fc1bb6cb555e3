"""Runs inside the sandbox of a program, as its process 1; needs nothing but the standard library.

    program_init.py CONTROL      the number of its control socket

It reads an object of JSON (`_settings` in program.py) from its control socket, sends a descriptor
of itself, starts the program, forwards one port of its loopback to one socket of the host, keeps
head and tail of its output, watches CPU time, memory, processes and disk of all that the program
starts, and reports once the program has ended or reached a limit. Its own end is the end of all: of
the namespace, where there is one, else of each descendant. It ends too when the host closes the
control socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentenv.envs.sandbox import confine
else:  # inside, these files are all there is
    import confine

LOOK_EVERY_S = 0.2
MAX_CONNECTIONS = 256  # at a time
DISK_EVERY_S = 1.0  # at most a tenth of the time goes into it
READ_BYTES = 1 << 16
MAX_SETTINGS_BYTES = 1 << 18
LAST_OUTPUT_S = 0.5  # of what a program wrote before its end
PR_SET_CHILD_SUBREAPER = 36
TICKS_A_S = os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Start the program, watch it to its end, report."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    settings = json.loads(control.recv(MAX_SETTINGS_BYTES))
    own = os.pidfd_open(os.getpid())
    socket.send_fds(control, [b"started"], [own])
    os.close(own)
    is_alone = os.getpid() == 1
    if not is_alone:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    listener = _listener(settings["port"]) if settings["socket"] else None
    reading, writing = os.pipe()
    woken, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    program = os.fork()
    if program == 0:
        _become(settings, writing)
    os.close(writing)
    confine.be_seen(False)  # nothing of the program may look into this process
    if listener is not None:
        _start(_forward, listener, settings["socket"])
    output = _Output(settings["max_output_chars"])
    drained = _start(output.read_all, reading)
    watch = _Watch(settings)
    sources: list[Any] = [control, woken]
    report: dict[str, Any] = {}
    while not report:
        ready = select.select(sources, [], [], LOOK_EVERY_S)[0]
        if woken in ready:
            os.read(woken, READ_BYTES)
        if control in ready:  # the host says nothing: it is gone, or wants an end
            _end_all(is_alone)
            os._exit(0)
        report = watch.ended(program) or watch.limit()
    if not is_alone:
        _end_all(is_alone)
    drained.join(LAST_OUTPUT_S)
    report |= {"cpu_s": watch.cpu_s, "output": output.text(), "num_left": watch.num_left}
    with contextlib.suppress(OSError):
        control.send(json.dumps(report).encode())
    os._exit(0)


def _become(settings: dict[str, Any], output: int) -> None:
    """In the child: the program, with its limits and without privileges."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        if not settings["confined"]:
            confine.die_with_parent()
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, place in ((null, 0), (output, 1), (output, 2)):
            os.dup2(fd, place)
        for name, value in settings["rlimits"].items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
        if settings["uid"] is not None:
            os.setgroups([])
            os.setresgid(settings["uid"], settings["uid"], settings["uid"])
            os.setresuid(settings["uid"], settings["uid"], settings["uid"])
        os.chdir(settings["folder"])
        if settings["confined"]:
            confine.drop_privileges(True)
            machine = platform.machine()
            confine.install(machine, confine.assembled(confine.program_filter(machine)))
        os.execvpe(settings["command"][0], settings["command"], settings["variables"])
    except BaseException as error:  # the boundary: it must not go on as its parent
        with contextlib.suppress(OSError):
            os.write(2, f"{settings['command'][0]}: {error}\n".encode())
        os._exit(127)


def _start(function: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


# the one address of the outside


def _listener(port: int) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    listener.set_inheritable(False)
    return listener


def _forward(listener: socket.socket, path: str) -> None:
    """Each connection to the listener goes on to the socket of the host; those over
    MAX_CONNECTIONS, which would take the host's descriptors, are closed."""
    pumps: list[threading.Thread] = []
    while True:
        try:
            inside, _ = listener.accept()
        except OSError:
            time.sleep(LOOK_EVERY_S)
            continue
        pumps = [one for one in pumps if one.is_alive()]
        if len(pumps) >= 2 * MAX_CONNECTIONS:
            inside.close()
            continue
        outside = socket.socket(socket.AF_UNIX)
        try:
            outside.connect(path)
        except OSError:
            inside.close()
            outside.close()
            continue
        for source, target in ((inside, outside), (outside, inside)):
            pumps.append(_start(_pump, source, target))


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Until one side ends, which ends that direction, or breaks, which ends both."""
    try:
        while data := source.recv(READ_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


# what it says and takes


class _Output:
    """Head and tail of an output, whatever its size."""

    def __init__(self, max_chars: int) -> None:
        self._half = max_chars // 2
        self._head = b""
        self._tail: deque[bytes] = deque()
        self._num_tail = self.num_bytes = 0

    def read_all(self, fd: int) -> None:
        """To its end."""
        while True:
            try:
                data = os.read(fd, READ_BYTES)
            except OSError:
                return
            if not data:
                return
            self.num_bytes += len(data)
            room = self._half - len(self._head)
            self._head += data[:room]
            if data[room:]:
                self._tail.append(data[room:])
                self._num_tail += len(data[room:])
            while self._tail and self._num_tail - len(self._tail[0]) >= self._half:
                self._num_tail -= len(self._tail.popleft())

    def text(self) -> str:
        """Head and tail, and between them how much is missing."""
        tail = b"".join(self._tail)[-self._half :]
        num_cut = self.num_bytes - len(self._head) - len(tail)
        gap = f"\n... {num_cut} bytes ...\n".encode() if num_cut > 0 else b""
        return (self._head + gap + tail).decode(errors="replace")


class _Watch:
    """What all processes below this one take together."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._limits: dict[str, int] = settings["limits"]
        self._folders: list[str] = settings["watched"]
        self._seen: dict[int, float] = {}  # CPU seconds by process, also of those that are gone
        self._disk_at = 0.0
        self.cpu_s = 0.0
        self.num_left = 0

    def ended(self, program: int) -> dict[str, Any]:
        """Reap; how the program ended, empty while it has not."""
        found: dict[str, Any] = {}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            if pid == program:
                code = os.waitstatus_to_exitcode(status)
                found = {"exit": code} if code >= 0 else {"signal": -code}
        if found:
            self.num_left = len(self._look())
        return found

    def limit(self) -> dict[str, Any]:
        """The limit that is reached, empty if none is."""
        found = self._look()
        taken = {
            "cpu": self.cpu_s,
            "memory": sum(memory for _, memory in found.values()),
            "processes": len(found),
        }
        now = time.monotonic()
        if now >= self._disk_at:
            taken["disk"] = sum(map(_disk_bytes, self._folders))
            self._disk_at = now + max(DISK_EVERY_S, 10 * (time.monotonic() - now))
        for name, value in taken.items():
            if value > self._limits[name]:
                return {"limit": name}
        return {}

    def _look(self) -> dict[int, tuple[float, int]]:
        """CPU seconds and bytes of each process below this one."""
        found = {pid: one for pid in _descendants() if (one := _figures(pid)) is not None}
        self._seen |= {pid: seconds for pid, (seconds, _) in found.items()}
        times = os.times()
        reaped = times.children_user + times.children_system
        live = sum(seconds for seconds, _ in found.values())
        self.cpu_s = max(self.cpu_s, reaped + live, sum(self._seen.values()))
        return found


def _descendants() -> list[int]:
    """All processes below this one: in a namespace of its own, all that are there."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    own = os.getpid()
    if own == 1:
        return [pid for pid in pids if pid != own]
    parents = {pid: parent for pid in pids if (parent := _parent(pid)) is not None}
    found, known = list[int](), {own}
    while more := [pid for pid, parent in parents.items() if parent in known and pid not in known]:
        known.update(more)
        found += more
    return found


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _stat(pid: int) -> list[str]:
    """The fields behind the name, from the state on."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _figures(pid: int) -> tuple[float, int] | None:
    fields = _stat(pid)
    try:
        with open(f"/proc/{pid}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
    except (OSError, ValueError):
        return None
    if not fields:
        return None
    seconds = (int(fields[11]) + int(fields[12])) / TICKS_A_S
    return seconds, (resident - shared) * resource.getpagesize()


def _disk_bytes(folder: str) -> int:
    """Blocks of all files below, sizes of names included; links are not followed, and what is
    mounted there does not count."""
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


def _end_all(is_alone: bool) -> None:
    """Kill all below this process; the end of process 1 does it where there is a namespace."""
    if is_alone:
        return
    while found := _descendants():
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.001)


if __name__ == "__main__":
    main()
