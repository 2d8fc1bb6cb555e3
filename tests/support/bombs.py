"""Servers of replies that never end, or that are far larger in memory than on the wire."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

SPACES = b" " * 65_536
MAX_SENT = 1 << 30  # bytes on the wire, more than any client may read
DRIP_S = 0.05


class Bomb(NamedTuple):
    """`head` follows the status line; `piece` is then sent again and again. `drips`: each of its
    bytes after a pause."""

    head: bytes
    first: bytes = b""
    piece: bytes = SPACES
    status: int = 200
    drips: bool = False


def _coded(coding: str) -> bytes:
    return f"Content-Encoding: {coding}\r\n{JSON}\r\n".encode()


def _block() -> bytes:
    """10 MB of spaces as blocks of a deflate stream that may be repeated."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    return packer.compress(b" " * 10_000_000) + packer.flush(zlib.Z_FULL_FLUSH)


JSON, SSE = "Content-Type: application/json\r\n", "Content-Type: text/event-stream\r\n"
BLOCK, GZIP = _block(), b"\x1f\x8b\x08\0\0\0\0\0\0\3"
CHUNK = b"10000\r\n" + SPACES + b"\r\n"
DENSE = b"[" + b"{}," * 499_990 + b"{}]"
VALUES = b'{"b":"' + b"x" * 800_000 + b'","a":[' + b"7," * 300_000 + b"7]}"
BOMBS = {
    "plain": Bomb(f"{JSON}Content-Length: 99999999999\r\n\r\n".encode()),
    "endless": Bomb(f"{JSON}\r\n".encode()),
    "chunked": Bomb(f"{JSON}Transfer-Encoding: chunked\r\n\r\n".encode(), piece=CHUNK),
    "gzip": Bomb(_coded("gzip"), GZIP, BLOCK),
    "deflate": Bomb(_coded("deflate"), b"\x78\x9c", BLOCK),
    "zstd": Bomb(_coded("zstd"), b"\x28\xb5\x2f\xfd\0\x38", b"\2\0\x10 " * 1000),
    "br": Bomb(_coded("br"), b"\x1b", b"\xff" * 1000),
    "dense": Bomb(f"{JSON}Content-Length: {len(DENSE)}\r\n\r\n".encode(), DENSE),
    "values": Bomb(f"{JSON}Content-Length: {len(VALUES)}\r\n\r\n".encode(), VALUES),
    "header": Bomb(b"X-Long: ", piece=b"x" * 65_536),
    "headers": Bomb(b"", piece=b"X-More: 1\r\n" * 1000),
    "line": Bomb(f"{SSE}\r\n".encode(), b"data: ", b"x" * 65_536),
    "events": Bomb(f"{SSE}\r\n".encode(), piece=b"data: {}\n\n" * 1000),
    "dense event": Bomb(f"{SSE}\r\n".encode(), b"data: " + DENSE[:1_000_000]),
    "gzip line": Bomb(f"{SSE}Content-Encoding: gzip\r\n\r\n".encode(), GZIP, BLOCK),
    "refusal": Bomb(f"{JSON}\r\n".encode(), status=400),
    "gzip refusal": Bomb(_coded("gzip"), GZIP, BLOCK, status=400),
    "failure": Bomb(f"{JSON}\r\n".encode(), status=500),
    "full": Bomb(b"Retry-After: 0\r\n" + _coded("gzip"), GZIP, BLOCK, status=429),
    "drips": Bomb(f"{JSON}\r\n".encode(), piece=b" ", drips=True),
}
MESSAGES = {  # WebSocket frames: a large one, and a message of endless parts
    "frame": (b"\x81\x7f" + (10**11).to_bytes(8, "big"), SPACES),
    "parts": (b"\x01\x7e\x03\xe8" + b"x" * 1000, b"\x00\x7e\x03\xe8" + b"x" * 1000),
}


@asynccontextmanager
async def bombing(bomb: Bomb) -> AsyncIterator[str]:
    """The URL of a server that answers every request so; a WebSocket handshake is accepted."""
    tasks, writers = set[asyncio.Task[None]](), set[asyncio.StreamWriter]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            writer.write(f"HTTP/1.1 {bomb.status} Bomb\r\n".encode() + bomb.head)
            if b"Sec-WebSocket-Key: " in head:
                key = head.split(b"Sec-WebSocket-Key: ")[1].split(b"\r\n")[0]
                digest = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
                writer.write(b"Sec-WebSocket-Accept: " + base64.b64encode(digest) + b"\r\n\r\n")
            writer.write(bomb.first)
            for _ in range(MAX_SENT // len(bomb.piece)):
                writer.write(bomb.piece)
                await writer.drain()
                await asyncio.sleep(DRIP_S if bomb.drips else 0)

    def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.add(writer)
        tasks.add(asyncio.create_task(answer(reader, writer)))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task, writer in zip(tasks, writers, strict=True):
            task.cancel()
            writer.transport.abort()
        await asyncio.gather(*tasks, return_exceptions=True)


def socket_bomb(kind: str) -> Bomb:
    """A WebSocket whose messages never end."""
    return Bomb(b"Upgrade: websocket\r\nConnection: Upgrade\r\n", *MESSAGES[kind], status=101)
