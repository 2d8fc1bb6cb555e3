"""The process behind WorkerPool: imports once, then forks a child for each job at a time.

It runs no job itself, so it always answers. It reads frames (length, JSON) from its standard
input, a socket: first the handler, then jobs {"id", "payload"}, {"kill": id} and {"check": id},
which lowers the priority of a job that has used much CPU time. A child that has done its job
takes the next one, unless it was slow; a killed one is replaced by a fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import resource
import selectors
import signal
import socket
import struct
import sys
from collections.abc import Callable
from typing import Any

MAX_FRAME_BYTES = 1 << 26
SLOW_AFTER_CPU_S = 0.15
NICE = 5  # below the process that forks, so that a new job starts at once
_PR_SET_PDEATHSIG = 1

Handler = Callable[[Any], Any]


def read_frame(sock: socket.socket) -> Any:
    """One frame; EOFError when the other side is gone."""
    (size,) = struct.unpack("!I", _read(sock, 4))
    if size > MAX_FRAME_BYTES:
        raise EOFError
    return json.loads(_read(sock, size))


def write_frame(sock: socket.socket, message: Any) -> None:
    """Write one frame; values that JSON does not know become text."""
    data = json.dumps(message, default=str).encode("utf-8", "backslashreplace")
    sock.sendall(struct.pack("!I", len(data)) + data)


def _read(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = sock.recv(size - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data


class Child:
    """A forked process that runs one job at a time."""

    def __init__(self, handler: Handler, memory_bytes: int | None, others: list[socket.socket]):
        self.socket, inner = socket.socketpair()
        self.job: int | None = None
        self.slow = False
        self._cpu_before_s = 0.0
        self.pid = os.fork()
        if self.pid == 0:
            self.socket.close()
            for other in others:  # so that a hanging child keeps no one's socket open
                other.close()
            _serve(handler, inner, memory_bytes)
        inner.close()

    def take(self, job: int, payload: Any) -> None:
        """Begin a job."""
        self.job, self._cpu_before_s = job, self._cpu_s()
        write_frame(self.socket, payload)

    def slow_down(self) -> None:
        """Give way to younger jobs, once this one has used its share."""
        if self._cpu_s() - self._cpu_before_s > SLOW_AFTER_CPU_S:
            self.slow = True
            os.setpriority(os.PRIO_PROCESS, self.pid, 19)

    def _cpu_s(self) -> float:
        with open(f"/proc/{self.pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        self.socket.close()


def _serve(handler: Handler, sock: socket.socket, memory_bytes: int | None) -> None:
    """The life of a child; never returns."""
    die_with_parent()
    os.nice(NICE)
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    status = 1
    with contextlib.suppress(EOFError, OSError):
        while True:
            payload = read_frame(sock)
            try:
                outcome = {"result": handler(payload)}
            except Exception as error:  # a process boundary: the host gets it as text
                outcome = {"error": f"{type(error).__name__}: {error}"[:2000]}
            write_frame(sock, outcome)
            status = 0
    os._exit(status)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Zygote:
    """Passes jobs from the host to children."""

    def __init__(self, host: socket.socket, handler: Handler, memory_bytes: int | None) -> None:
        self.host = host
        self.handler = handler
        self.memory_bytes = memory_bytes
        self.selector = selectors.DefaultSelector()
        self.selector.register(host, selectors.EVENT_READ)
        self.children: dict[socket.socket, Child] = {}

    def run(self) -> None:
        """Until the host closes its end."""
        try:
            while True:
                for key, _ in self.selector.select():
                    if key.fileobj is self.host:
                        self._from_host(read_frame(self.host))
                    elif isinstance(key.fileobj, socket.socket) and key.fileobj in self.children:
                        self._from_child(self.children[key.fileobj])
        except (EOFError, OSError):
            for child in self.children.values():
                child.kill()

    def _from_host(self, message: dict[str, Any]) -> None:
        if "kill" in message:
            for child in [c for c in self.children.values() if c.job == message["kill"]]:
                self._drop(child)
            return
        if "check" in message:
            for child in [c for c in self.children.values() if c.job == message["check"]]:
                child.slow_down()
            return
        idle = [child for child in self.children.values() if child.job is None]
        child = idle[0] if idle else self._fork()
        try:
            child.take(message["id"], message["payload"])
        except OSError:
            self._died(child)

    def _fork(self) -> Child:
        self.selector.close()  # the child must not share it
        child = Child(self.handler, self.memory_bytes, [self.host, *self.children])
        self.children[child.socket] = child
        self.selector = selectors.DefaultSelector()
        for sock in [self.host, *self.children]:
            self.selector.register(sock, selectors.EVENT_READ)
        return child

    def _from_child(self, child: Child) -> None:
        try:
            outcome = read_frame(child.socket)
        except (EOFError, OSError, ValueError):
            self._died(child)
            return
        job, child.job = child.job, None
        if child.slow:  # its priority cannot be raised again
            self._drop(child)
        write_frame(self.host, {"id": job, **outcome})

    def _died(self, child: Child) -> None:
        job = child.job
        self._drop(child)
        if job is not None:
            write_frame(self.host, {"id": job, "died": True})

    def _drop(self, child: Child) -> None:
        del self.children[child.socket]
        self.selector.unregister(child.socket)
        child.kill()


def main() -> None:
    """Entry of the process; its first frame names the handler as module:function."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the host, which then closes
    host = socket.socket(fileno=os.dup(0))
    sys.set_int_max_str_digits(100_000)
    setup = read_frame(host)
    try:
        module, _, name = setup["handler"].partition(":")
        handler = getattr(importlib.import_module(module), name)
        if inspect.isclass(handler):
            handler = handler(**setup["arguments"])
    except Exception as error:  # a process boundary: the host reports it
        write_frame(host, {"failed": f"{type(error).__name__}: {error}"[:2000]})
        return
    gc.collect()
    gc.freeze()
    write_frame(host, {"ready": True})
    Zygote(host, handler, setup["memory_bytes"]).run()


if __name__ == "__main__":
    main()
