"""One session, as the host sees it: its process, and the socket over which both speak.

They speak length-prefixed JSON; what a session says is capped and never trusted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import struct
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from agentenv.errors import ForeignError, InfraError
from agentenv.foreign import decode

MAX_FRAME_BYTES = 1 << 20


class CellAnswer(Struct):
    """What a session may say: that it is ready, why it is not, how a cell went, or the digest of
    its variables. `number` is that of the request.

    `lost`: its variables fill the memory, so it cannot go on.
    """

    number: int = 0
    ready: bool = False
    error: str = ""
    output: str = ""
    problem: str = ""
    lost: bool = False
    digest: str = ""
    forked: bool = False


class ChannelClosedError(Exception):
    """The session is gone, or its answer is none that a session gives."""


class ForkRefusedError(Exception):
    """A session cannot be forked as it is: it shares files or memory, say."""


class Channel:
    """A non-blocking stream to one session; a cancelled call leaves it unusable."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    async def ask(self, request: dict[str, Any]) -> CellAnswer:
        """Send a request, and read the answer to it.

        Whatever else was said, before or instead, is nothing that a session says: it is closed.
        """
        try:
            self._socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            pass
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        else:
            raise ChannelClosedError("it ended, or spoke without being asked")
        number = secrets.randbits(53)  # so that none can be answered before it is asked
        await self.send({**request, "number": number})
        answer = await self.receive()
        if answer.number != number:
            raise ChannelClosedError("the answer to another request")
        return answer

    async def send(self, message: dict[str, Any]) -> None:
        """Write one frame."""
        data = msgspec.json.encode(message)
        try:
            frame = struct.pack("!I", len(data)) + data
            await asyncio.get_running_loop().sock_sendall(self._socket, frame)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    async def receive(self) -> CellAnswer:
        """Read one frame."""
        (size,) = struct.unpack("!I", await self._read(4))
        if size > MAX_FRAME_BYTES:
            raise ChannelClosedError(f"an answer of {size} bytes")
        try:
            return decode(await self._read(size), CellAnswer)
        except ForeignError as error:
            raise ChannelClosedError(f"not an answer: {error}") from error

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()

    async def _read(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        data = b""
        while len(data) < size:
            try:
                piece = await loop.sock_recv(self._socket, size - len(data))
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not piece:
                raise ChannelClosedError("end of file")
            data += piece
        return data


class Zygote(Protocol):
    """What a session's process comes from."""

    live_forks: bool

    def alive(self) -> bool: ...

    async def fork(self, parent: SessionProcess) -> SessionProcess | None: ...


class SessionProcess:
    """The process of one session, which is stopped but while it answers: whatever a cell leaves
    behind (timers, signals, threads, an answer that came too early) runs only within calls."""

    def __init__(self, zygote: Zygote, number: int, channel: Channel, pidfd: int) -> None:
        self.zygote = zygote
        self.number = number
        self._channel = channel
        self._pidfd = pidfd

    async def ask(self, request: dict[str, Any]) -> CellAnswer:
        """One request and its answer. Raises ChannelClosedError; then, and when cancelled, the
        process can only be killed."""
        send_signal(self._pidfd, signal.SIGCONT)
        answer = await self._channel.ask(request)
        self.stop()
        return answer

    def stop(self) -> None:
        """Until the next request."""
        send_signal(self._pidfd, signal.SIGSTOP)

    def kill(self) -> None:
        """End it, whatever its cell is doing; never waits; idempotent."""
        if self._pidfd >= 0:
            self._channel.close()
            kill(self._pidfd)
            self._pidfd = -1


def send_signal(pidfd: int, number: signal.Signals) -> None:
    """To a process that may be gone. Raises InfraError when it is not ours to signal."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        pass
    except OSError as error:
        raise InfraError(
            f"a sandbox session cannot be sent signals: {error}; a host that is root needs CAP_KILL"
        ) from error


def kill(pidfd: int) -> None:
    """End the process, and close the descriptor."""
    try:
        send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)
