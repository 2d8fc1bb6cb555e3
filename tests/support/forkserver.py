"""Processes for tests, forked by one that has imported their modules.

A rank, a command and an engine server import for 4 to 20 CPU seconds before they begin, and tests
start over a hundred. Here each is a fork; its behavior and its end are the same.

    fork server, one process --- minder of each: waits for it and tells how it ended --- the process
                         --- guard of assembly/serving, where it is a server ---

Processes that a launcher starts, not the test, get a program that replaces Python:

    launcher --- the stand-in, alive as long as the process --- minder --- the process

The fork server runs in any Python, also an engine's, and needs nothing but the standard library.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1
POLL_S = 0.01
MAX_REQUEST = 1 << 20  # bytes
TICKS = os.sysconf("SC_CLK_TCK")
PYTHON = "AGENTENV_TESTS_PYTHON"  # in an environment: sys.executable of a fork
STAND_IN = """\
#!{python} -IS
import sys
sys.path.insert(0, {folder!r})
import forkserver
forkserver.stand_in({python!r}, {address!r}, {modules!r})
"""

_open: dict[tuple[str, ...], ForkServer] = {}


def fork_server(python: str, modules: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
    """The one of this process that has imported `modules` under `environment`."""
    key = (python, *modules)
    if key not in _open:
        _open[key] = ForkServer(python, modules, environment)
    return _open[key]


def pids() -> set[int]:
    """Of the fork servers of this process."""
    return {one.pid for one in _open.values()}


def cpu_seconds(*, with_servers: bool) -> float:
    """Of forks that have ended; with the fork servers, which import."""
    total = 0.0
    for one in _open.values():
        with suppress(OSError):
            words = Path(f"/proc/{one.pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(map(int, words[11 if with_servers else 13 : 15])) / TICKS
    return total


def close_all() -> None:
    """End the fork servers and whatever still runs below them."""
    while _open:
        _open.popitem()[1].close()


class ForkServer:
    """The process that imports and forks; it starts at once, its first fork waits for it. Of
    "module:function" it also calls the function, which caches its findings."""

    def __init__(self, python: str, modules: Sequence[str], environment: Mapping[str, str]) -> None:
        self._python = python
        self._control, inner = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST)
        self._folder = Path(tempfile.mkdtemp(prefix="fork-server-"))
        with inner, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(str(self._folder / "socket"))
            listener.listen()
            self._process = subprocess.Popen(
                [python, str(Path(__file__).resolve()), str(listener.fileno()), *modules],
                stdin=inner.fileno(),
                pass_fds=[listener.fileno()],
                cwd="/",
                env=dict(environment),
            )
        self.pid = self._process.pid

    def stand_in(self, *modules: str) -> Path:
        """A program in place of Python: `-m` one of `modules` is a fork, all else Python itself
        runs. A fork ends with the program, however that ends, and the program with the fork."""
        path = self._folder / "-".join(modules)
        if not path.is_file():
            address, folder = str(self._folder / "socket"), str(Path(__file__).resolve().parent)
            path.write_text(
                STAND_IN.format(
                    python=self._python, folder=folder, address=address, modules=modules
                )
            )
            path.chmod(0o755)
        return path

    def fork(
        self,
        arguments: Sequence[str],
        *,
        environment: Mapping[str, str],
        folder: Path,
        output: int,
        guard: Sequence[str] = (),
        stdin: int | None = None,
    ) -> socket.socket:
        """Run `arguments` as `python *arguments` does: a file or "-m module", and the rest of its
        command line. Its output goes to the file `output`. With `guard`, the path of `guard.py` and
        its seconds, that one guards it, whose input is `stdin`. Returns the end of a connection,
        for a `Forked`."""
        with open(os.devnull, "rb") as null:
            fds = [output, null.fileno() if stdin is None else stdin]
            return send_request(self._control, fds, arguments, environment, str(folder), guard)

    def close(self) -> None:
        """Idempotent."""
        self._control.close()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def send_request(
    control: socket.socket,
    fds: Sequence[int],
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: str,
    guard: Sequence[str] = (),
) -> socket.socket:
    request = {"arguments": arguments, "environment": {**environment}, "folder": folder}
    data = json.dumps(request | {"guard": guard}).encode()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        socket.send_fds(control, [data], [theirs.fileno(), *fds])
    return ours


class Forked:
    """The interface of a `subprocess.Popen` that is used; `pid` is that of the guard, if it has
    one."""

    def __init__(self, minder: socket.socket) -> None:
        self._minder = minder
        report = minder.recv(16)  # blocks for the imports, the first time, and for a fork
        assert report, "the fork server has ended"
        self.pid = int(report)
        self.returncode: int | None = None
        self._reported = -signal.SIGKILL
        minder.setblocking(False)

    def poll(self) -> int | None:
        """It has ended when the fork server has waited for its minder, which reports first."""
        if self.returncode is None:
            with suppress(BlockingIOError):
                while report := self._minder.recv(16):
                    self._reported = int(report)
                self._minder.close()
                self.returncode = self._reported
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(POLL_S)
        assert self.returncode is not None
        return self.returncode

    def watch(self) -> None:
        """Until its end is reported."""
        select.select([self._minder], [], [])

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it ended, and its minder reports that soon
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


# below: in the process that replaces Python


def stand_in(python: str, address: str, modules: Sequence[str]) -> NoReturn:
    arguments = sys.argv[1:]
    if arguments[:1] == ["-u"]:  # output is not read before the end
        del arguments[0]
    if arguments[:1] != ["-m"] or arguments[1] not in modules:
        os.execv(python, [python, *sys.argv[1:]])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
        control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, MAX_REQUEST)
        control.connect(address)
        process = Forked(send_request(control, [1, 0], arguments, os.environ, os.getcwd()))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda number, _: process.send_signal(number))
    process.watch()
    status = process.wait()
    if status < 0:
        with suppress(OSError):  # SIGKILL has no other meaning
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


# below: in the fork server


def main(listening: str, *modules: str) -> NoReturn:
    die_with_parent(os.getppid())
    del sys.path[0]  # the folder of this file
    for name in modules:
        module = importlib.import_module(name.partition(":")[0])
        if function := name.partition(":")[2]:
            getattr(module, function)()
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    gc.collect()
    gc.freeze()  # a collection would write to every page
    reports: dict[int, int] = {}  # by minder, closed when it was waited for

    def reap(*_: object) -> None:
        with suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                os.close(reports.pop(pid))

    signal.signal(signal.SIGCHLD, reap)
    control, listener = socket.socket(fileno=os.dup(0)), socket.socket(fileno=int(listening))
    while True:
        connection = control
        if control not in select.select([control, listener], [], [])[0]:
            connection, _ = listener.accept()
        request, fds, _, _ = socket.recv_fds(connection, MAX_REQUEST, 3)
        if connection is not control:
            connection.close()
        if not fds:
            if connection is control:
                os._exit(0)
            continue
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if pid == 0:
            for fd in (*reports.values(), control.fileno(), listener.fileno()):
                os.close(fd)
            run_minder(json.loads(request), *fds)
        reports[pid] = fds[0]
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for fd in fds[1:]:
            os.close(fd)


def run_minder(request: dict[str, Any], report: int, output: int, stdin: int) -> NoReturn:
    """In the minder or guard: start the process, wait for it, report how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for fd, number in ((stdin, 0), (output, 1), (output, 2)):
        os.dup2(fd, number)
    for fd in (stdin, output):
        os.close(fd)
    status = 1
    try:
        if request["guard"]:
            status = guarded(request, report)
        else:
            die_with_parent(os.getppid())
            minder = os.getpid()
            process = Fork(lambda: run(request, report, minder))
            os.write(report, b"%16d" % process.pid)
            watch(process, report)
            status = process.wait()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        with suppress(BrokenPipeError):
            os.write(report, b"%16d" % status)
        os._exit(0)


def watch(process: Fork, report: int) -> None:
    """Until it ends, which it also does when its receiver is gone."""
    pidfd = os.pidfd_open(process.pid)
    if pidfd not in select.select([pidfd, report], [], [])[0]:
        for kill in (os.killpg, os.kill):  # it may not lead its group yet
            with suppress(ProcessLookupError):
                kill(process.pid, signal.SIGKILL)


def guarded(request: dict[str, Any], report: int) -> int:
    """As `python guard.py GRACE_S COMMAND`, whose command is a fork."""
    path, grace_s = request["guard"]
    guard = runpy.run_path(path)["main"]

    def start(*_: object, env: dict[str, str], **__: object) -> Fork:
        return Fork(lambda: run(request | {"environment": env}, report))

    guard.__globals__["subprocess"] = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.setsid()
    os.write(report, b"%16d" % os.getpid())
    return int(guard([grace_s, ""]))


class Fork:
    """A child that calls a function, as far as minder and guard know a `Popen`."""

    def __init__(self, call: Callable[[], NoReturn]) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            call()

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, flags)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self) -> int:
        found = self.poll(0)
        assert found is not None
        return found


def run(request: dict[str, Any], report: int, minder: int = 0) -> NoReturn:
    """In the process itself: run like `python *arguments`, until it ends."""
    code: object = 1
    try:
        os.close(report)
        os.setsid()
        if minder:
            die_with_parent(minder)
        become(request)
        sys.argv = request["arguments"]
        if sys.argv[0] == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
            runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = 0 if end.code is None else end.code
        if not isinstance(code, int):
            sys.stderr.write(f"{code}\n")
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


def become(request: dict[str, Any]) -> None:
    """Take the environment of the request, and apply the variables that Python reads at its
    start."""
    environment = request["environment"]
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    os.chdir(request["folder"])
    sys.path.insert(0, request["folder"])
    path = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [folder for folder in path if folder and folder not in sys.path]
    sys.executable = environment.get(PYTHON, sys.executable)
    if "torch" in sys.modules:
        threads = environment.get("OMP_NUM_THREADS") or os.cpu_count()
        sys.modules["torch"].set_num_threads(int(threads))


def die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # ended before
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
