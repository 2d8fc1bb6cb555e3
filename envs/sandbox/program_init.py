"""Process 1 inside the sandbox of a program; needs only the standard library.

    program_init.py CONTROL      the number of its control socket

It reads a JSON object (`program_settings` in program_launch.py) from its control socket, sends a
descriptor of itself, starts the program, forwards one port of its loopback to one socket of the
host, keeps head and tail of its output, monitors CPU time, memory, processes and disk of the
program's processes, and reports the end of the program or a reached limit. Its own end ends all
processes: with the namespace, if there is one, else by killing each descendant. It also ends when
the host closes the control socket.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import select
import signal
import socket
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentenv.envs.sandbox import confine
    from agentenv.envs.sandbox.program_watch import Watch, descendants
else:  # inside the sandbox, only these files exist
    import confine
    from program_watch import Watch, descendants

LOOK_EVERY_S = 0.2
MAX_CONNECTIONS = 256  # concurrent ones
READ_BYTES = 1 << 16
MAX_SETTINGS_BYTES = 1 << 18
LAST_OUTPUT_S = 0.5  # for the output before the end of a program
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Start the program, monitor it until its end, and report."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    settings = json.loads(control.recv(MAX_SETTINGS_BYTES))
    own = os.pidfd_open(os.getpid())
    socket.send_fds(control, [b"started"], [own])
    os.close(own)
    is_alone = os.getpid() == 1
    if not is_alone:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    listener = None
    if settings["socket"]:
        listener = socket.create_server(("127.0.0.1", settings["port"]), backlog=128)
        listener.set_inheritable(False)
    reading, writing = os.pipe()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # if it is ignored, no end can be collected
    program = os.fork()
    if program == 0:
        _become(settings, writing)
    os.close(writing)
    sources: list[Any] = [os.pidfd_open(program), control]
    confine.be_seen(False)  # the program must not inspect this process
    if listener is not None:
        _start(_forward, listener, settings["socket"])
    output = _Output(settings["max_output_chars"])
    drained = _start(output.read_all, reading)
    watch = Watch(settings)
    ended: dict[int, int] = {}  # states by process
    report: dict[str, Any] = {}
    while not report:
        ready = select.select(sources, [], [], LOOK_EVERY_S)[0]
        if control in ready:  # the host has ended, or requests the end
            break
        _reap(ended)
        report = watch.ended(ended.get(program)) or watch.limit()
    if not is_alone:  # otherwise the end of process 1 ends them
        _end_all(ended)
    if report:
        drained.join(LAST_OUTPUT_S)
        report |= {"cpu_s": watch.cpu_s, "output": output.text()}
        with contextlib.suppress(OSError):
            control.send(json.dumps(report).encode())
    os._exit(0)


def _reap(ended: dict[int, int]) -> None:
    """Collect the exit states of processes."""
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            ended[one[0]] = one[1]


def _become(settings: dict[str, Any], output: int) -> None:
    """In the child: become the program, with its limits and without privileges."""
    try:
        os.setsid()
        if not settings["confined"]:
            confine.die_with_parent()
        null = os.open(os.devnull, os.O_RDONLY)
        for fd, place in ((null, 0), (output, 1), (output, 2)):
            os.dup2(fd, place)
        for name, value in settings["rlimits"].items():
            confine.set_limit(name, value)
        confine.become(settings["uid"])
        os.chdir(settings["folder"])
        if settings["confined"]:
            confine.drop_privileges(True)
            machine = platform.machine()
            confine.install(machine, confine.assembled(confine.program_filter(machine)))
        os.execvpe(settings["command"][0], settings["command"], settings["variables"])
    except BaseException as error:  # the boundary: the child must not continue as its parent
        seen = "; it sees /usr, the run's interpreter, its folder and read_only"
        hint = seen if isinstance(error, FileNotFoundError) and settings["confined"] else ""
        with contextlib.suppress(OSError):
            os.write(2, f"{settings['command'][0]}: {error}{hint}\n".encode())
        os._exit(127)


def _start(function: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


# the only outside address


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
        self._head = self._tail = b""
        self.num_bytes = 0

    def read_all(self, fd: int) -> None:
        """Read to the end."""
        with contextlib.suppress(OSError):
            while data := os.read(fd, READ_BYTES):
                self.num_bytes += len(data)
                room = self._half - len(self._head)
                self._head += data[:room]
                self._tail = (self._tail + data[room:])[-self._half :]

    def text(self) -> str:
        """Head and tail, with the number of missing bytes between them."""
        num_cut = self.num_bytes - len(self._head) - len(self._tail)
        gap = f"\n... {num_cut} bytes ...\n".encode() if num_cut > 0 else b""
        return (self._head + gap + self._tail).decode(errors="replace")


def _end_all(ended: dict[int, int]) -> None:
    """Kill all descendants, and those that they start meanwhile."""
    while found := descendants():
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        _reap(ended)
        time.sleep(0.001)


if __name__ == "__main__":
    main()
