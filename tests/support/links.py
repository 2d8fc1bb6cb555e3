"""Links within one process, by queues or a socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from agentenv.processes.link import LAST_S, Link


class _End(Link):
    """An end of a link within this process."""

    def __init__(
        self, ours: asyncio.Queue[bytes | None], theirs: asyncio.Queue[bytes | None]
    ) -> None:
        self._ours, self._theirs = ours, theirs
        self._is_over = False

    def send(self, frame: bytes) -> None:
        self._theirs.put_nowait(frame)

    def flush(self) -> None:
        pass

    async def receive(self) -> bytes:
        frame = None if self._is_over else await self._ours.get()
        if frame is None:
            self._is_over = True
            raise EOFError("the other end of the link is closed")
        return frame

    def close(self) -> None:
        self._theirs.put_nowait(None)

    def finish(self) -> None:
        self.close()
        asyncio.get_running_loop().call_later(LAST_S, self.abort)

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


@asynccontextmanager
async def connected(serve: Callable[[Link], Awaitable[None]]) -> AsyncIterator[Link]:
    """An end of a link over a socket, whose other end is served."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await serve(Link(reader, writer))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as server:
        yield Link(*await asyncio.open_connection(*server.sockets[0].getsockname()))
