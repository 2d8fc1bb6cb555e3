"""The HTTP layer against a server that misbehaves in ways real ones do now and then."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from agentenv.engines.client import FailedError, HttpClient, RefusedError
from agentenv.engines.remote import top_k_entropy
from agentenv.engines.server import ServerLostError
from agentenv.errors import ConfigError, EngineError

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler, **timeouts: float) -> AsyncIterator[HttpClient]:
    """A client of a socket on which `handler` speaks for the server."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = HttpClient(f"http://{host}:{port}", **timeouts)
    try:
        yield client
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


def answering(status: str, body: str) -> Handler:
    """One answer to everything."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write((head + body).encode())
        await writer.drain()

    return handler


@pytest.mark.parametrize(
    "body",
    [
        '{"error": {"message": "too long"}}',
        '{"error": "too long"}',
        '{"detail": "too long"}',
        "too long",
    ],
)
async def test_a_refusal_tells_the_servers_reason(body: str) -> None:
    async with serving(answering("400 Bad Request", body)) as client:
        with pytest.raises(RefusedError, match="/x answered 400: too long") as caught:
            await client.call("POST", "/x", {"a": 1})
    assert (caught.value.status, caught.value.reason) == (400, "too long")
    assert not isinstance(caught.value, ServerLostError)


async def test_a_broken_server_is_a_lost_one() -> None:
    async with serving(answering("500 Internal Server Error", "")) as client:
        with pytest.raises(FailedError, match="no reason given"):
            await client.call("GET", "/x")
    assert issubclass(FailedError, ServerLostError)


async def test_what_is_no_json_is_shown() -> None:
    async with serving(answering("200 OK", "<html>hello")) as client:
        with pytest.raises(EngineError, match="answered no JSON: '<html>hello'"):
            await client.call_json("GET", "/x")
        with pytest.raises(ConfigError, match="<html>hello'; expected the routes"):
            await client.routes()


async def test_silence_and_absence_are_losses() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(silent, call_s=0.1, wait_s=0.1) as client:
        with pytest.raises(ServerLostError, match="no answer in time"):
            await client.call("GET", "/x")
        with pytest.raises(ServerLostError, match="no answer in time"):
            async with client.stream("/x", {}) as events:
                await anext(events)
    with pytest.raises(ServerLostError, match="connection lost"):
        await client.call("GET", "/x")
    await client.close()


def streaming(*pieces: bytes) -> Handler:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.01)

    return handler


async def test_events_arrive_whole_however_they_are_cut() -> None:
    """One of them longer than what a line-wise reader takes."""
    long = b"x" * 300_000
    text = b': hello\n\ndata: {"a": 1}\n\ndata: ' + long + b"\r\n\r\ndata: [DONE]\n\n"
    pieces = [text[i : i + 70_001] for i in range(0, len(text), 70_001)]
    async with serving(streaming(*pieces)) as client, client.stream("/x", {}) as events:
        assert [event async for event in events] == [b'{"a": 1}', long]


async def test_a_stream_that_breaks_off_is_a_loss_and_keeps_what_came() -> None:
    found = []
    async with serving(streaming(b"data: 1\n\n", b"data: 2")) as client:
        with pytest.raises(ServerLostError, match="before it was complete"):  # noqa: PT012
            async with client.stream("/x", {}) as events:
                async for event in events:
                    found.append(event)  # noqa: PERF401 (it raises)
    assert found == [b"1"]


async def test_a_kept_connection_that_the_server_closed_is_no_loss() -> None:
    """It answers one request on each connection without announcing that it closes it."""
    connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await reader.readuntil(b"\r\n\r\n")

    async with serving(handler) as client:
        assert await client.call("GET", "/x") == b"ok"
        assert await client.call("GET", "/x") == b"ok"
    assert connections == 2


async def test_names_hide_credentials_and_bad_urls_are_refused() -> None:
    assert HttpClient("http://me:secret@host:8000/base/").name == "http://host:8000/base"
    for url in ("host:8000", "ftp://host", ""):
        with pytest.raises(ConfigError, match="expected http"):
            HttpClient(url)


def test_entropy_of_the_largest_and_the_rest() -> None:
    """Hand-computed: halves and quarters, in nats; the rest counts as one token."""
    ln2 = 0.6931471805599453
    assert top_k_entropy([-ln2, -2 * ln2, -2 * ln2]) == pytest.approx(1.5 * ln2)
    assert top_k_entropy([-ln2]) == pytest.approx(ln2)
    assert top_k_entropy([-ln2, -2 * ln2]) == pytest.approx(1.5 * ln2)
    assert top_k_entropy([0.0, -9999.0, float("-inf")]) == 0.0
    assert top_k_entropy([1e-7]) == pytest.approx(0.0, abs=1e-6)  # rounded above probability 1
