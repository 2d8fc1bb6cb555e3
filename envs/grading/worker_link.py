"""The host's end of the socket to the process behind a WorkerPool."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from typing import Any

from agentenv.errors import GraderError
from envs.grading.zygote import MAX_FRAME_BYTES


class WorkerLink:
    """One zygote process and the socket to it."""

    def __init__(self, environment: dict[str, str]) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket, inner = socket.socketpair()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with inner:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "envs.grading.zygote"],
                stdin=inner.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={**environment, "PYTHONPATH": path},
            )
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._readable)
        self._input = bytearray()
        self._output = bytearray()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self.first: asyncio.Future[Any] = self._loop.create_future()
        self.closed = False

    def expect(self, number: int) -> asyncio.Future[Any]:
        """The answer to come for a job."""
        self._waiting[number] = self._loop.create_future()
        return self._waiting[number]

    def forget(self, number: int) -> None:
        """Give a job up and have its worker killed."""
        self._waiting.pop(number, None)
        self.send({"kill": number})

    def send(self, message: Any) -> None:
        """Send a frame, in the background. Raises GraderError for one that is too long."""
        data = json.dumps(message).encode("utf-8", "backslashreplace")
        if self.closed:
            return
        if len(data) > MAX_FRAME_BYTES:
            raise GraderError(f"a job of {len(data)} bytes; at most {MAX_FRAME_BYTES} can be sent")
        self._output += struct.pack("!I", len(data)) + data
        self._writable()

    def close(self) -> None:
        """Kill the process; whoever waits learns that it died."""
        if self.closed:
            return
        self.closed = True
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        self._process.kill()
        threading.Thread(target=self._process.wait, daemon=True).start()  # reaps, never blocks
        for future in [self.first, *self._waiting.values()]:
            if not future.done():
                future.set_result({})
        self._waiting.clear()

    def _writable(self) -> None:
        try:
            del self._output[: self._socket.send(self._output)]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            return
        if self._output:
            self._loop.add_writer(self._socket, self._writable)
        else:
            self._loop.remove_writer(self._socket)

    def _readable(self) -> None:
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._input += data
        while len(self._input) >= 4:
            (size,) = struct.unpack_from("!I", self._input)
            if len(self._input) < 4 + size:
                return
            answer = json.loads(bytes(self._input[4 : 4 + size]))
            del self._input[: 4 + size]
            future = self._waiting.pop(answer["id"], None) if "id" in answer else self.first
            if future is not None and not future.done():
                future.set_result(answer)
