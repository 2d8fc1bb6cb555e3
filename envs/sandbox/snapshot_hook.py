"""Runs in a Python program before its first line, and forks it on request of process 1.

The program's main thread, interrupted in its wait for a reply, copies itself, memory
included, without notice to interpreter hooks and random generators. Process 1 gives the copy its
own namespaces, files and loopback (program_snapshot.py). Then the copy reopens its files and its
connection under their old numbers: the reply to its call arrives there.
"""

from __future__ import annotations

import _socket
import ctypes
import json
import os
import select
import signal
import socket
import stat
import struct
from contextlib import suppress
from typing import Any

VARIABLE = "AGENTENV_SNAPSHOTS"  # the number of the socket that leads to process 1
SIGNAL = 63
PATIENCE_S = 60.0  # with process 1
CAPABILITY_VERSION_3 = 0x20080522
WAITS = "POST /v1/resume HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Length: 0\r\n\r\n"

_python = ctypes.PyDLL(None)


class _Hook:
    """Answers the requests of process 1."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._is_busy = False

    def on_signal(self, *_: Any) -> None:
        """Fork, if process 1 still requests it. Never raises in the program."""
        with suppress(OSError, ValueError):
            while not self._is_busy and select.select([self._channel], [], [], 0)[0]:
                self._is_busy = True  # a signal that comes now finds its request read below
                try:
                    if not self._read():
                        break
                finally:
                    self._is_busy = False

    def _read(self) -> bool:
        """Read the pending requests, of which the last counts; False at the end."""
        data, fds = b"", list[int]()
        while select.select([self._channel], [], [], 0)[0]:
            for fd in fds:
                os.close(fd)
            data, fds, *_ = socket.recv_fds(self._channel, 4096, 2)
            if not data:
                return False
        if len(fds) == 2:
            _fork(self._channel, json.loads(data), *fds)
        return True


def _fork(channel: socket.socket, request: dict[str, Any], output: int, gate: int) -> None:
    folder, ids, zero = os.getcwd(), (os.getuid(), os.getgid()), ctypes.c_long(0)
    channel.send(b"forks")
    flags = ctypes.c_long(request["flags"])
    pid = int(_python.syscall(ctypes.c_long(request["clone"]), flags, zero, zero, zero, zero))
    if pid == 0:
        try:
            _become(channel, request, output, gate, folder, *ids)
        except BaseException as error:  # the boundary: the child must not continue as its parent
            with suppress(OSError):
                channel.send(f"{type(error).__name__}: {error}".encode())
            os._exit(1)
        return
    os.close(output)
    os.close(gate)
    if pid < 0:
        channel.send(b"refused")
    elif select.select([channel], [], [], PATIENCE_S)[0]:  # its files stay as they are until then
        channel.recv(16)


def _become(
    channel: socket.socket, request: dict[str, Any], output: int, gate: int, folder: str, *ids: int
) -> None:
    """In the copy."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{ids[0]} {ids[0]} 1"),
        ("gid_map", f"{ids[1]} {ids[1]} 1"),
    ):
        fd = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(fd, text.encode())
        os.close(fd)
    _python.capset(struct.pack("Ii", CAPABILITY_VERSION_3, 0), bytes(24))
    os.setsid()
    os.dup2(gate, channel.fileno(), inheritable=False)
    os.close(gate)
    _report(channel, b"born")
    os.chdir(folder)  # the one of this name among its own files
    for name in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):
            _replace(int(name), os.readlink(f"/proc/self/fd/{name}"), request, output)
    os.close(output)
    _report(channel, b"ready")


def _report(channel: socket.socket, text: bytes) -> None:
    """Raises OSError without an answer."""
    channel.send(text)
    if not select.select([channel], [], [], PATIENCE_S)[0] or not channel.recv(16):
        raise OSError("process 1 is gone")


def _replace(fd: int, link: str, request: dict[str, Any], output: int) -> None:
    """Put the copy's own file, output or connection in the place of the shared one."""
    if link == request["output"]:
        os.dup2(output, fd, inheritable=os.get_inheritable(fd))
    elif link == request["connection"]:
        new = _socket.socket(_socket.AF_INET, _socket.SOCK_STREAM)
        new.connect(("127.0.0.1", request["port"]))
        new.setsockopt(_socket.IPPROTO_TCP, _socket.TCP_NODELAY, 1)
        new.send(WAITS.format(port=request["port"]).encode())
        os.set_blocking(new.fileno(), os.get_blocking(fd))
        os.dup2(new.fileno(), fd, inheritable=os.get_inheritable(fd))
        new.close()
    elif link.startswith("/") and stat.S_ISREG(os.fstat(fd).st_mode):
        new_file = os.open(link, os.O_RDONLY)
        os.lseek(new_file, os.lseek(fd, 0, os.SEEK_CUR), os.SEEK_SET)
        os.dup2(new_file, fd, inheritable=os.get_inheritable(fd))
        os.close(new_file)


def install() -> None:
    """In the first process of the program alone."""
    number = int(os.environ.pop(VARIABLE))
    os.set_inheritable(number, False)
    signal.signal(SIGNAL, _Hook(socket.socket(fileno=number)).on_signal)
