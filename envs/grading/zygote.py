"""The process behind WorkerPool: imports once, then forks a child for each job at a time.

It runs no job itself, so it always answers. It reads frames (length, JSON) from its standard
input, a socket: first the handler, then jobs {"id", "payload"} and {"kill": id}. A child that has
done its job takes the next one; a killed one is replaced by a fork.

With `share_cores`, of more jobs than cores only those run that have used the least CPU time; the
others are stopped until it is their turn. So a quick job is done at once, however many slow ones
there are.
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
TICK_S = 0.02  # of CPU time that a job gets before it is another one's turn
NICE = 1  # below the process that forks, so that a new job starts at once
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
        self.running = True
        self._cpu_before_s = 0.0
        self.pid = os.fork()
        if self.pid == 0:
            self.socket.close()
            for other in others:  # so that a hanging child keeps no one's socket open
                other.close()
            _serve(handler, inner, memory_bytes)
        inner.close()

    def take(self, job: int, payload: Any) -> None:
        """Begin a job; it must run, since a stopped child would read nothing."""
        self.let_run(True)
        self.job, self._cpu_before_s = job, self._cpu_s()
        write_frame(self.socket, payload)

    def let_run(self, running: bool) -> None:
        """Have it run, or stop until further notice."""
        if running != self.running:
            self.running = running
            os.kill(self.pid, signal.SIGCONT if running else signal.SIGSTOP)

    def used_s(self) -> float:
        """CPU time of the present job."""
        return self._cpu_s() - self._cpu_before_s

    def _cpu_s(self) -> float:
        with open(f"/proc/{self.pid}/schedstat") as file:  # stat counts in steps of 10 ms
            return int(file.read().split()[0]) * 1e-9

    def kill(self) -> None:
        """Kill it; that it is gone, which may take a while, is seen by `gone`."""
        os.kill(self.pid, signal.SIGKILL)
        self.socket.close()

    def gone(self) -> bool:
        """Whether it has ended, after `kill`."""
        return os.waitpid(self.pid, os.WNOHANG)[0] != 0


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

    def __init__(
        self, host: socket.socket, handler: Handler, memory_bytes: int | None, share_cores: bool
    ) -> None:
        self.host = host
        self.handler = handler
        self.memory_bytes = memory_bytes
        self.num_cores = len(os.sched_getaffinity(0)) if share_cores else sys.maxsize
        self.selector = selectors.DefaultSelector()
        self.selector.register(host, selectors.EVENT_READ)
        self.children: dict[socket.socket, Child] = {}
        self.killed: list[Child] = []

    def run(self) -> None:
        """Until the host closes its end."""
        try:
            while True:
                crowded = self._share()
                self.killed = [child for child in self.killed if not child.gone()]
                pause_s = TICK_S if crowded or self.killed else None
                for key, _ in self.selector.select(pause_s):
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
                write_frame(self.host, {"id": child.job, "cpu_s": child.used_s()})
                self._drop(child)
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
        write_frame(self.host, {"id": job, **outcome})

    def _share(self) -> bool:
        """Let the jobs run that have used the least; whether there are more than cores."""
        busy = [child for child in self.children.values() if child.job is not None]
        crowded = len(busy) > self.num_cores
        if crowded:
            busy.sort(key=Child.used_s)
        for place, child in enumerate(busy):
            child.let_run(place < self.num_cores)
        return crowded

    def _died(self, child: Child) -> None:
        job = child.job
        self._drop(child)
        if job is not None:
            write_frame(self.host, {"id": job, "died": True})

    def _drop(self, child: Child) -> None:
        del self.children[child.socket]
        self.selector.unregister(child.socket)
        child.kill()
        self.killed.append(child)


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
    Zygote(host, handler, setup["memory_bytes"], setup["share_cores"]).run()


if __name__ == "__main__":
    main()
