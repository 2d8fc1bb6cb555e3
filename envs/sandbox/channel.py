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
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from agentenv.errors import ForeignError, InfraError
from agentenv.untrusted import decode

MAX_FRAME_BYTES = 1 << 20
HEADER_BYTES = 4
READ_BYTES = 1 << 16


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

    async def ask(
        self, request: dict[str, Any], wake: Callable[[], None] | None = None
    ) -> CellAnswer:
        """Send a request, and read the answer to it; `wake` is called once that is there to be
        read, so that who sleeps wakes once.

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
        data = msgspec.json.encode({**request, "number": number})
        await self._send(struct.pack("!I", len(data)) + data, wake)
        answer = await self.receive()
        if answer.number != number:
            raise ChannelClosedError("the answer to another request")
        return answer

    async def receive(self) -> CellAnswer:
        """Read one frame."""
        data = await self._read(READ_BYTES)
        while len(data) < HEADER_BYTES:
            data += await self._read(READ_BYTES)
        end = HEADER_BYTES + int.from_bytes(data[:HEADER_BYTES])
        if end - HEADER_BYTES > MAX_FRAME_BYTES:
            raise ChannelClosedError(f"an answer of {end - HEADER_BYTES} bytes")
        pieces, size = [data], len(data)
        while size < end:
            pieces.append(await self._read(end - size))
            size += len(pieces[-1])
        if size > end:
            raise ChannelClosedError("it spoke without being asked")
        try:
            return decode(b"".join(pieces)[HEADER_BYTES:], CellAnswer)
        except ForeignError as error:
            raise ChannelClosedError(f"not an answer: {error}") from error

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._socket.close()

    async def _send(self, frame: bytes, wake: Callable[[], None] | None) -> None:
        try:
            try:
                num_sent = self._socket.send(frame)
            except BlockingIOError:
                num_sent = 0
            if wake is not None:
                wake()
            if num_sent < len(frame):
                await asyncio.get_running_loop().sock_sendall(self._socket, frame[num_sent:])
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    async def _read(self, size: int) -> bytes:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._socket, size)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error
        if not data:
            raise ChannelClosedError("end of file")
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
        answer = await self._channel.ask(request, self._resume)
        self.stop()
        return answer

    def stop(self) -> None:
        """Until the next request."""
        send_signal(self._pidfd, signal.SIGSTOP)

    def _resume(self) -> None:
        send_signal(self._pidfd, signal.SIGCONT)

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
