"""Process 1 inside the sandbox of a program; needs only the standard library.

    program_init.py CONTROL      the number of its control socket

It reads a JSON object (`program_settings` in program_launch.py) from its control socket, sends a
descriptor of itself, starts the program, forwards one port of its loopback to one socket of the
host, keeps head and tail of its output, monitors CPU time, memory, processes and disk of the
program's processes, and reports the end of the program or a reached limit. Its own end ends all
processes: with the namespace, if there is one, else by killing each descendant. It also ends when
the host closes the control socket. At the host's request it copies the program
(program_snapshot.py); a copy has its own control socket, output, limits and report, and the last
branch ends process 1.
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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentenv.envs.sandbox import confine, program_snapshot
    from agentenv.envs.sandbox.program_watch import Watch
    from agentenv.envs.sandbox.snapshot_hook import VARIABLE
else:  # inside the sandbox, only these files exist
    import confine
    import program_snapshot
    from program_watch import Watch
    from snapshot_hook import VARIABLE

LOOK_EVERY_S = 0.2
MAX_CONNECTIONS = 256  # concurrent ones
READ_BYTES = 1 << 16
MAX_SETTINGS_BYTES = 1 << 18
LAST_OUTPUT_S = 0.5  # for the output before the end of a program
PR_SET_CHILD_SUBREAPER = 36


class _Branch:
    """The program, or a copy."""

    def __init__(
        self, control: socket.socket, pid: int, output: _Output, watch: Watch, reading: int
    ) -> None:
        self.control, self.pid, self.output, self.watch = control, pid, output, watch
        self.reading = reading
        self.channel: program_snapshot.HookChannel | None = None
        self.listener: socket.socket | None = None  # of a copy
        self.folders: list[int] = []  # of a copy
        self.drained = _start(output.read_all, reading)

    def report(self, report: dict[str, Any]) -> None:
        """Report its end; for a copy with its folder."""
        self.drained.join(LAST_OUTPUT_S)
        watch = self.watch
        report |= {"cpu_s": watch.cpu_s, "output": self.output.text(), "num_left": watch.num_left}
        with contextlib.suppress(OSError):
            socket.send_fds(self.control, [json.dumps(report).encode()], self.folders[:1])

    def close(self) -> None:
        """Close its resources, after the end of its processes."""
        if self.listener is not None:
            with contextlib.suppress(OSError):
                self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
            self.listener.close()
        if self.channel is not None:
            self.channel.close()
        for fd in self.folders:
            os.close(fd)
        self.control.close()


def main() -> None:
    """Start the program, monitor it and its copies until their ends, and report."""
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
    channel = program_snapshot.HookChannel() if settings["snapshots"] else None
    program = os.fork()
    if program == 0:
        _become(settings, writing, channel)
    os.close(writing)
    snapshots = None
    if channel is not None:
        channel.theirs.close()
        _be(settings["uid"], saved=0)  # to inspect this user's processes; its parent may kill it
        confine.die_with_parent()
        snapshots = program_snapshot.Snapshots(
            channel, settings["port"], settings["limits"]["disk"]
        )
    confine.be_seen(False)  # the program must not inspect this process
    if listener is not None:
        _start(_forward, listener, settings["socket"])
    output = _Output(settings["max_output_chars"])
    first = _Branch(control, program, output, Watch(settings), reading)
    first.channel = channel
    branches, copies = [first], 0
    ended: dict[int, int] = {}  # states by process
    requests = [] if snapshots is None or snapshots.listener < 0 else [snapshots.listener]
    while branches:
        sources: list[Any] = [woken, *requests, *(branch.control for branch in branches)]
        ready = select.select(sources, [], [], LOOK_EVERY_S)[0]
        if woken in ready:
            os.read(woken, READ_BYTES)
        if snapshots is not None and requests and requests[0] in ready:
            snapshots.answer()
        _reap(ended)
        for branch in [*branches]:
            if branch.control in ready:
                _, fds, *_ = socket.recv_fds(branch.control, 16, 1)
                if fds and snapshots is not None:
                    copy = _copied(branch, socket.socket(fileno=fds[0]), snapshots, settings)
                    branches += [copy] if copy is not None else []
                    copies += copy is not None
                    continue
                report = None  # the host has ended, or requests the end
            elif not (report := branch.watch.ended(ended.get(branch.pid)) or branch.watch.limit()):
                continue
            if copies or not is_alone:  # otherwise the end of process 1 ends them
                _end_all(branch.watch.processes, ended)
            if report is not None:
                branch.report(report)
            if snapshots is not None and copies:
                snapshots.forget(branch.watch.space)
                branch.close()
            branches.remove(branch)
        ended = {branch.pid: ended[branch.pid] for branch in branches if branch.pid in ended}
    os._exit(0)


def _reap(ended: dict[int, int]) -> None:
    """Collect the exit states of processes."""
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            ended[one[0]] = one[1]


def _copied(
    branch: _Branch,
    control: socket.socket,
    snapshots: program_snapshot.Snapshots,
    settings: dict[str, Any],
) -> _Branch | None:
    """A copy of this branch, with its control socket `control`; None if it is refused."""
    assert branch.channel is not None
    control.set_inheritable(False)
    try:
        copy = snapshots.take(branch.pid, branch.channel, branch.reading)
    except program_snapshot.SnapshotRefusedError as error:
        with contextlib.suppress(OSError):
            control.send(json.dumps({"refused": str(error)}).encode())
        control.close()
        return None
    branch.watch.look()
    watch = Watch(settings, copy.space, copy.folders, branch.watch.cpu_s)
    new = _Branch(control, copy.pid, branch.output.copied(branch.reading), watch, copy.output)
    new.channel, new.listener, new.folders = copy.channel, copy.listener, copy.folders
    with contextlib.suppress(OSError):
        control.send(b"{}")
    _start(_hand_over, copy.listener, control)
    return new


def _be(uid: int | None, saved: int | None = None) -> None:
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid if saved is None else saved)


def _become(
    settings: dict[str, Any], output: int, channel: program_snapshot.HookChannel | None
) -> None:
    """In the child: become the program, with its limits and without privileges."""
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
        _be(settings["uid"])
        os.chdir(settings["folder"])
        if settings["confined"]:
            confine.drop_privileges(True)
            machine = platform.machine()
            if channel is None or not _listened(machine, channel):
                confine.install(machine, confine.assembled(confine.program_filter(machine)))
            else:
                settings["variables"][VARIABLE] = str(channel.theirs.fileno())
        os.execvpe(settings["command"][0], settings["command"], settings["variables"])
    except BaseException as error:  # the boundary: the child must not continue as its parent
        with contextlib.suppress(OSError):
            os.write(2, f"{settings['command'][0]}: {error}\n".encode())
        os._exit(127)


def _listened(machine: str, channel: program_snapshot.HookChannel) -> bool:
    """Apply a filter to the program and send its listener to process 1; False if unsupported."""
    code = confine.assembled(confine.program_filter(machine, snapshots=True))
    try:
        listener = confine.install(machine, code, listen=True)
    except OSError:
        channel.theirs.send(b"none")
        return False
    socket.send_fds(channel.theirs, [b"listener"], [listener])
    os.close(listener)
    channel.theirs.set_inheritable(True)
    return True


def _start(function: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


# the only outside address


def _listener(port: int) -> socket.socket:
    listener = socket.create_server(("127.0.0.1", port), backlog=128)
    listener.set_inheritable(False)
    return listener


def _forward(listener: socket.socket, path: str) -> None:
    """Forward each connection to the host's socket; close those beyond MAX_CONNECTIONS, which would
    exhaust the host's descriptors."""
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


def _hand_over(listener: socket.socket, control: socket.socket) -> None:
    """Send each connection of a copy's loopback to the host."""
    with contextlib.suppress(OSError):
        while True:
            inside, _ = listener.accept()
            with inside:
                socket.send_fds(control, [b"connection"], [inside.fileno()])


def _pump(source: socket.socket, target: socket.socket) -> None:
    """Copy until one side ends, which ends this direction, or breaks, which ends both."""
    try:
        while data := source.recv(READ_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        for one in (source, target):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


# output


class _Output:
    """Head and tail of an output of any size."""

    def __init__(self, max_chars: int) -> None:
        self._half = max_chars // 2
        self._head = b""
        self._tail: deque[bytes] = deque()
        self._num_tail = self.num_bytes = 0
        self._lock = threading.Lock()

    def read_all(self, fd: int) -> None:
        """Read to the end."""
        os.set_blocking(fd, False)
        with contextlib.suppress(OSError):
            while True:
                select.select([fd], [], [])
                if not self._read(fd):
                    return

    def _read(self, fd: int) -> bool:
        """Read available data; False at the end."""
        with self._lock:
            try:
                data = os.read(fd, READ_BYTES)
            except BlockingIOError:
                return True
            self.num_bytes += len(data)
            room = self._half - len(self._head)
            self._head += data[:room]
            if data[room:]:
                self._tail.append(data[room:])
                self._num_tail += len(data[room:])
            while self._tail and self._num_tail - len(self._tail[0]) >= self._half:
                self._num_tail -= len(self._tail.popleft())
            return bool(data)

    def copied(self, fd: int) -> _Output:
        """A copy with all data written to the pipe so far."""
        while select.select([fd], [], [], 0)[0] and self._read(fd):
            pass
        other = _Output(2 * self._half)
        with self._lock:
            other._head, other._tail = self._head, self._tail.copy()
            other._num_tail, other.num_bytes = self._num_tail, self.num_bytes
        return other

    def text(self) -> str:
        """Head and tail, with the number of missing bytes between them."""
        tail = b"".join(self._tail)[-self._half :]
        num_cut = self.num_bytes - len(self._head) - len(tail)
        gap = f"\n... {num_cut} bytes ...\n".encode() if num_cut > 0 else b""
        return (self._head + gap + tail).decode(errors="replace")


def _end_all(processes: Callable[[], list[int]], ended: dict[int, int]) -> None:
    """Kill these processes, and those that they start meanwhile."""
    while found := processes():
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _reap(ended)
        time.sleep(0.001)


if __name__ == "__main__":
    main()
