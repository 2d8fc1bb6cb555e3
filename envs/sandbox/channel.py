"""The host's end of a session: length-prefixed JSON over a socket, capped and never trusted."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import msgspec
from msgspec import Struct

MAX_FRAME_BYTES = 1 << 20


class Answer(Struct):
    """What a session may say: that it is ready, why it is not, or how a cell went.

    `lost`: its variables fill the memory, so it cannot go on.
    """

    ready: bool = False
    error: str = ""
    output: str = ""
    problem: str = ""
    lost: bool = False


class ChannelClosedError(Exception):
    """The session is gone, or answered something that it never should."""


class Channel:
    """A non-blocking stream to one session; a cancelled call leaves it unusable."""

    _decoder = msgspec.json.Decoder(Answer)

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock

    async def send(self, message: dict[str, Any]) -> None:
        """Write one frame."""
        data = msgspec.json.encode(message)
        try:
            frame = struct.pack("!I", len(data)) + data
            await asyncio.get_running_loop().sock_sendall(self._socket, frame)
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    async def receive(self) -> Answer:
        """Read one frame."""
        (size,) = struct.unpack("!I", await self._read(4))
        if size > MAX_FRAME_BYTES:
            raise ChannelClosedError(f"an answer of {size} bytes")
        try:
            return self._decoder.decode(await self._read(size))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
