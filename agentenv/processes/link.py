"""Links between a process and its workers.

A link carries frames over a stream, in order, each delivered once: 8 bytes little-endian length,
then a message.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

PREFIX_BYTES = 8
GONE_S = 60.0  # a machine that does not answer for this long counts as lost
GATHER_S = 0.02
LAST_S = 5.0  # for the other end to read pending frames before a close


def frame_of(body: bytes) -> bytes:
    """A message in wire format."""
    return len(body).to_bytes(PREFIX_BYTES, "little") + body


def receive_frame(connection: socket.socket) -> bytes:
    """The next message on a blocking socket. Raises EOFError at the end of the connection."""
    return _exactly(connection, int.from_bytes(_exactly(connection, PREFIX_BYTES), "little"))


def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    body = bytearray()
    while len(body) < num_bytes:
        chunk = connection.recv(min(num_bytes - len(body), 1 << 20))
        if not chunk:
            raise EOFError("the connection ended")
        body += chunk
    return bytes(body)


class Link:
    """One end of a stream connection. A frame is sent at once, unless others were sent within the
    last GATHER_S seconds: then the frames of that interval are sent together, since each read costs
    the other end far more than the content of a frame."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._unsent: list[bytes] = []
        self._flushed = 0.0  # loop time
        self._size: int | None = None  # of the next frame, once known
        self._is_closed = False
        self.max_bytes: int | None = None  # limit of a frame; a longer one ends the link

    @property
    def peer(self) -> str:
        """Address of the machine at the other end."""
        return str(self._writer.get_extra_info("peername")[0])

    @property
    def own(self) -> str:
        """Address of this machine, as the other end sees it."""
        return str(self._writer.get_extra_info("sockname")[0])

    def keep_alive(self) -> None:
        """Enable keepalive: the connection breaks within GONE_S seconds of the loss of the other
        machine, even if nothing is sent."""
        connection: socket.socket = self._writer.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(GONE_S * 1000))

    def send(self, frame: bytes) -> None:
        """Queue a frame; it is lost if the other end is gone."""
        if self._is_closed:
            return
        if not self._unsent:
            loop, due = asyncio.get_running_loop(), self._flushed + GATHER_S
            if loop.time() < due:
                loop.call_at(due, self.flush)
            else:
                loop.call_soon(self.flush)
        self._unsent += (len(frame).to_bytes(PREFIX_BYTES, "little"), frame)

    async def drain(self) -> None:
        """Write the queued frames, and wait until the connection takes more."""
        self.flush()
        await self._writer.drain()

    def flush(self) -> None:
        """Write the queued frames now, for instance before the event loop is blocked."""
        unsent, self._unsent = self._unsent, []
        if unsent and not self._writer.transport.is_closing():
            self._flushed = asyncio.get_running_loop().time()
            self._writer.write(b"".join(unsent))

    async def receive(self) -> bytes:
        """The next frame from the other end, also after a cancelled call. Raises EOFError when the
        link has ended."""
        try:
            if self._size is None:
                self._size = int.from_bytes(await self._reader.readexactly(PREFIX_BYTES), "little")
            if self.max_bytes is not None and self._size > self.max_bytes:
                raise EOFError(f"a frame of {self._size} bytes exceeds the limit")
            frame = await self._reader.readexactly(self._size)
        except asyncio.IncompleteReadError as error:
            raise EOFError("the connection ended") from error
        except OSError as error:
            raise EOFError(f"the connection broke: {error}") from error
        self._size = None
        return frame

    def close(self, *, receives: bool = False) -> None:
        """Close after the other end has received the sent frames; `receives`: still receive its
        frames until it closes. The link ends within LAST_S seconds. Idempotent."""
        if not self._is_closed:
            self.flush()
            self._is_closed = True
            if not receives:
                self._writer.close()
            elif not self._writer.transport.is_closing():
                self._writer.write_eof()
            asyncio.get_running_loop().call_later(LAST_S, self.abort)

    async def closed(self) -> None:
        """Wait for the end of a close, at most LAST_S."""
        with suppress(OSError, TimeoutError):  # the other end does not read
            async with asyncio.timeout(LAST_S):
                await self._writer.wait_closed()
        self._writer.transport.abort()

    def abort(self) -> None:
        """Close both ends at once; frames in transit are lost. Idempotent."""
        self._is_closed = True
        self._writer.transport.abort()
