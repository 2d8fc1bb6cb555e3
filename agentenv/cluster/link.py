"""Links between a controller and its rollout workers: frames, in their order, each once.

    8 bytes little-endian length, then a message      as the ranks of a learner have them

`linked` joins two ends within one process, `StreamLink` is an end of a TCP connection.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

PREFIX_BYTES = 8
LAST_S = 5.0  # in which the other end reads what was sent before a close


class Link(Protocol):
    """One end of a connection."""

    def send(self, frame: bytes) -> None:
        """Soon, behind all before it; to an end that is gone it is lost."""
        ...

    async def receive(self) -> bytes:
        """The next frame of the other end. Raises EOFError when it is gone."""
        ...

    def close(self) -> None:
        """Let the other end receive what was sent, and then EOFError. Idempotent."""
        ...

    def abort(self) -> None:
        """Both ends are gone at once; what is under way is lost. Idempotent."""
        ...


class _End:
    """An end of a link within this process."""

    def __init__(
        self, ours: asyncio.Queue[bytes | None], theirs: asyncio.Queue[bytes | None]
    ) -> None:
        self._ours, self._theirs = ours, theirs
        self._is_over = False

    def send(self, frame: bytes) -> None:
        self._theirs.put_nowait(frame)

    async def receive(self) -> bytes:
        frame = None if self._is_over else await self._ours.get()
        if frame is None:
            self._is_over = True
            raise EOFError("the other end of the link is closed")
        return frame

    def close(self) -> None:
        self._theirs.put_nowait(None)

    def abort(self) -> None:
        for queue in (self._ours, self._theirs):
            while not queue.empty():
                queue.get_nowait()
            queue.put_nowait(None)


def linked() -> tuple[Link, Link]:
    """Two ends that are joined."""
    first: asyncio.Queue[bytes | None] = asyncio.Queue()
    second: asyncio.Queue[bytes | None] = asyncio.Queue()
    return _End(first, second), _End(second, first)


class StreamLink:
    """An end of a connection. What is sent within one turn of the event loop is written at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._unsent: list[bytes] = []
        self._is_closed = False

    def send(self, frame: bytes) -> None:
        if self._is_closed:
            return
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent += (len(frame).to_bytes(PREFIX_BYTES, "little"), frame)

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and not self._writer.transport.is_closing():
            self._writer.write(b"".join(unsent))

    async def receive(self) -> bytes:
        try:
            prefix = await self._reader.readexactly(PREFIX_BYTES)
            return await self._reader.readexactly(int.from_bytes(prefix, "little"))
        except OSError as error:
            raise EOFError(f"the connection broke: {error}") from error

    def close(self) -> None:
        if not self._is_closed:
            self._flush()
            self._is_closed = True
            self._writer.close()
            asyncio.get_running_loop().call_later(LAST_S, self.abort)

    def abort(self) -> None:
        self._is_closed = True
        self._writer.transport.abort()
