"""Bytes that a server, a process or a model could send: valid ones, damaged on purpose.

The shape is damaged (a value of another type, huge or deep, a key too few) or the bytes are.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from hypothesis import strategies as st

VALUES = (
    "null", "true", "0", "-1", "1.5", "1" + "0" * 30, "1e308", "-1e308", str(2**63), '""', '"x"',
    '"\\u0000"', '"\\ud800"', '"' + "é" * 300 + '"', '"[[[["', "[]", "{}", "[[]]", '{"": {}}',
    "[null]", '["x", 1]', "[" * 300 + "]" * 300,
)  # fmt: skip
BYTES: tuple[bytes, ...] = (
    b"", b"[", b"{", b"]}", b'"', b"\\", b"\xff", b"\x00", b"\xed\xa0\x80", b'"\\ud800"', b"NaN",
    b"-", b"1e999", b"9" * 400, b"9" * 5000, b"[" * 5000, b'{"a":' * 5000, b"[" * 200 + b"]" * 200,
    b"\r\n", b"\n\n", b":", b",", b"%", b"\xef\xbb\xbf", b"<", b"http://[",
)  # fmt: skip


def damaged_json(*valid: Any) -> st.SearchStrategy[bytes]:
    """JSON of one of the values, with up to two parts of it replaced or left out, and sometimes
    with bytes damaged too."""
    changes = st.lists(st.tuples(st.integers(0, 200), st.integers(-1, len(VALUES) - 1)), max_size=2)
    return st.builds(_damaged_json, st.sampled_from(valid), changes, edits(5))


def damaged_stream(
    valid: Sequence[Any], others: Sequence[Any] = ()
) -> st.SearchStrategy[list[bytes]]:
    """JSON of each of the values, with one of them damaged, or another one in its place."""
    return st.builds(
        lambda place, bad: [
            bad if number == place else json.dumps(one).encode() for number, one in enumerate(valid)
        ],
        st.integers(0, len(valid)),
        damaged_json(*valid, *others),
    )


def damaged(*valid: bytes) -> st.SearchStrategy[bytes]:
    """One of these, with bytes damaged."""
    return st.builds(_edited, st.sampled_from(valid), edits(1))


def edits(one_in: int) -> st.SearchStrategy[list[tuple[int, int, int]]]:
    """Positions, numbers of removed bytes, and their replacements; most lists are empty."""
    one = st.tuples(st.integers(0, 10_000), st.integers(0, 9), st.integers(0, len(BYTES) - 1))
    some = st.lists(one, min_size=1, max_size=3)
    return st.builds(
        lambda chance, found: found if chance == one_in - 1 else [],
        st.integers(0, one_in - 1),
        some,
    )


def _edited(data: bytes, changes: list[tuple[int, int, int]]) -> bytes:
    for place, num_gone, new in changes:
        start = place % (len(data) + 1)
        data = data[:start] + BYTES[new] + data[start + num_gone :]
    return data


def _damaged_json(
    value: Any, changes: list[tuple[int, int]], bytes_: list[tuple[int, int, int]]
) -> bytes:
    value = {"": json.loads(json.dumps(value))}
    for number, choice in changes:
        places = list(_places(value))
        holder, key = places[number % len(places)]
        if choice < 0 and holder is not value:
            del holder[key]
        else:
            holder[key] = json.loads(VALUES[choice])
    return _edited(json.dumps(value[""]).encode(), bytes_)


def _places(value: Any, level: int = 0) -> Iterator[tuple[Any, Any]]:
    """The parts of a value, each as its container and its key there."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list) and level < 20:
            yield from _places(value[key], level + 1)


PAGE = b"<html><head><title>Lima</title></head><body><p>Lima is the capital of Peru.</p></body>"
REDIRECTS = (
    b"/next", b"//[x", b"http://[bad", b"http://a:99999/", b"http://:80", b"http://\xff/",
    b"http://\xe2\x84\x80.com/", b"http://127.1/", b"file:///etc/passwd", b"?", b"#",
    b"http://a b/", b"::", b"%", b"http://xn--a/", b"http://" + b"a" * 300 + b"/", b"javascript:1",
    b"\\\\x", b"http://user:@/",
)  # fmt: skip
HEADERS = (
    b"Content-Type: text/html", b"Content-Type: text/html; charset=utf-16",
    b"Content-Type: text/\xff; charset=\xed\xa0\x80", b"Content-Type: application/json",
    b"Content-Type: ;;=", b"Content-Encoding: gzip", b"Content-Encoding: deflate",
    b"Transfer-Encoding: chunked", b"Content-Length: 3", b"Content-Length: 10", b"Retry-After: 0",
    b"Retry-After: Mon, 1 Jan 2024 00:00:00 +9999", b"Date: x", b"Set-Cookie: \xff=;;\x01",
    b"Connection: close", b"Link: <\xff>", b"X: " + b"y" * 200,
)  # fmt: skip
HEADERS += tuple(b"Location: " + place for place in REDIRECTS)
STATUSES = (
    *(b"200 OK",) * 30, b"301 x", b"302 \xff", b"307", b"204 x", b"304 x", b"403 x", b"404 x",
    b"429 x", b"500 x", b"503 x", b"101 x", b"100 x", b"999 x", b"0 x", b"-1 x",
)  # fmt: skip


def http_replies(bodies: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Replies of a web server as it sends them, some with damaged bytes."""
    chunked = [b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body) for body in bodies if body]
    return st.builds(
        lambda status, headers, body, changes: _edited(
            b"HTTP/1.1 " + b"\r\n".join([status, *headers]) + b"\r\n\r\n" + body, changes
        ),
        st.sampled_from(STATUSES),
        st.lists(st.sampled_from(HEADERS), max_size=2).map(lambda more: [*more, HEADERS[0]]),
        st.sampled_from([*bodies, *chunked]),
        edits(4),
    )


class RawServer:
    """Answers any request with `answer`, and closes the connection."""

    def __init__(self) -> None:
        self.answer = b""
        self.url = ""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(self.answer)
            await writer.drain()
        except (OSError, EOFError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def raw_server() -> AsyncIterator[RawServer]:
    """One on 127.0.0.1."""
    raw = RawServer()
    server = await asyncio.start_server(raw._serve, "127.0.0.1", 0)
    raw.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield raw
    finally:
        server.close()
        await server.wait_closed()
