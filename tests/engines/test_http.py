"""The HTTP layer against a server that misbehaves in ways real ones do now and then."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from agentenv.assembly.run.terminal import is_shown
from agentenv.base.errors import ConfigError, EngineError
from agentenv.contract.http_client import FailedError, RefusedError, ServerClient
from agentenv.contract.request import (
    BrokenConnectionError,
    BusyError,
    NoDescriptorError,
    ServerLostError,
)
from agentenv.engines.remote.base import top_k_entropies
from tests.support.polling import until

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def serving(handler: Handler, **options: Any) -> AsyncIterator[ServerClient]:
    """A client of a socket on which `handler` acts as the server."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    client = ServerClient(f"http://{host}:{port}", **options)
    try:
        yield client
    finally:
        await client.close()
        server.close()
        await server.wait_closed()


def answering(status: str, body: str, header: str = "") -> Handler:
    """One answer to everything."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        head = f"HTTP/1.1 {status}\r\n{header}Content-Length: {len(body)}\r\nConnection: close"
        writer.write(f"{head}\r\n\r\n{body}".encode())
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
async def test_a_refusal_reports_the_reason_of_the_server(body: str) -> None:
    async with serving(answering("400 Bad Request", body)) as client:
        with pytest.raises(RefusedError, match="answered 400: too") as caught:
            await client.call("POST", "/x", {"a": 1})
    assert (caught.value.status, caught.value.reason) == (400, "too long")
    assert not isinstance(caught.value, ServerLostError)


async def test_an_invalid_json_reply_is_quoted() -> None:
    async with serving(answering("200 OK", "<html>hello")) as client:
        with pytest.raises(EngineError, match="'<html>hello'"):
            await client.call_json("GET", "/x")
        with pytest.raises(ConfigError, match="<html>hello'; expected the"):
            await client.routes()


async def test_silent_and_absent_servers_are_lost() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with serving(silent, call_s=0.1, wait_s=0.1) as client:
        with pytest.raises(ServerLostError, match="answer in time"):
            await client.call("GET", "/x")
        with pytest.raises(ServerLostError, match="answer in time"):
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


async def test_events_are_reassembled_from_any_packets() -> None:
    """One of them is longer than the limit of a line-wise reader."""
    long = b"x" * 300_000
    text = b': hello\n\ndata: {"a": 1}\n\ndata: ' + long + b"\r\n\r\ndata: [DONE]\n\n"
    pieces = [text[i : i + 70_001] for i in range(0, len(text), 70_001)]
    async with serving(streaming(*pieces)) as client, client.stream("/x", {}) as events:
        assert [event async for event in events] == [b'{"a": 1}', long]


async def test_an_interrupted_stream_loses_the_server_and_keeps_its_events() -> None:
    found = []
    async with serving(streaming(b"data: 1\n\n", b"data: 2")) as client:
        with pytest.raises(ServerLostError, match="it was complete"):  # noqa: PT012
            async with client.stream("/x", {}) as events:
                async for event in events:
                    found.append(event)  # noqa: PERF401 (it raises)
    assert found == [b"1"]


@pytest.mark.parametrize(("late_s", "num_kept"), [(0.05, 1), (60.0, 3)])
async def test_a_stream_keeps_its_connection_when_its_end_arrives_late(
    late_s: float, num_kept: int
) -> None:
    """The end of the body is a separate packet. A missing one costs the connection."""
    connections = 0

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(2)
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            writer.write(b"16\r\ndata: 1\n\ndata: [DONE]\n\r\n")
            await asyncio.wait_for(reader.read(1), late_s) if late_s > 1 else None
            await asyncio.sleep(late_s)
            writer.write(b"0\r\n\r\n")

    async with serving(handler) as client:
        for _ in range(3):
            async with client.stream("/x", {}) as events:
                assert [event async for event in events] == [b"1"]
    assert connections == num_kept


async def test_a_kept_connection_closed_by_the_server_is_reopened() -> None:
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


def closing_kept(bodies: list[bytes]) -> Handler:
    """Answers the first request of each connection; closes it at the second, having read it."""

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(2):
            await reader.readuntil(b"\r\n\r\n")
            bodies.append(await reader.readexactly(1))
            if number == 0:
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    return handler


async def test_a_request_that_may_have_been_processed_is_not_sent_twice() -> None:
    bodies: list[bytes] = []
    async with serving(closing_kept(bodies)) as client:
        assert await client.call("POST", "/x", 1) == b"ok"
        with pytest.raises(BrokenConnectionError, match="connection lost"):
            await client.call("POST", "/x", 2)
    assert bodies == [b"1", b"2"]
    assert issubclass(BrokenConnectionError, ServerLostError)


async def test_posts_open_a_fresh_connection_on_request() -> None:
    bodies: list[bytes] = []
    async with serving(closing_kept(bodies), fresh_posts=True) as client:
        assert await client.call("POST", "/x", 1) == b"ok"
        assert await client.call("POST", "/x", 2) == b"ok"
    assert bodies == [b"1", b"2"]


async def test_a_connection_reset_is_distinguished_from_an_absent_server() -> None:
    async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        found = writer.get_extra_info("socket")
        found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async with serving(reset) as client:
        with pytest.raises(BrokenConnectionError):
            await client.call("POST", "/x", {})
        with pytest.raises(BrokenConnectionError):
            await client.call("GET", "/x")
    with pytest.raises(ServerLostError, match="connection lost") as caught:
        await client.call("GET", "/x")
    assert not isinstance(caught.value, BrokenConnectionError)
    await client.close()


@pytest.mark.parametrize(
    ("status", "header", "is_busy", "wanted_s"),
    [
        ("429 Too Many Requests", "", True, 0.0),
        ("429 Too Many Requests", "Retry-After: 7\r\n", True, 7.0),
        ("503 Service Unavailable", "Retry-After: 2\r\n", True, 2.0),
        ("503 Service Unavailable", "", False, 0.0),
        ("500 Internal Server Error", "", False, 0.0),
    ],
)
async def test_a_full_server_is_not_a_lost_server(
    status: str, header: str, is_busy: bool, wanted_s: float
) -> None:
    async with serving(answering(status, "", header)) as client:
        with pytest.raises(BusyError if is_busy else FailedError) as caught:
            await client.call("GET", "/x")
    if isinstance(caught.value, BusyError):
        assert caught.value.retry_after_s == wanted_s
    assert isinstance(caught.value, ServerLostError) != is_busy


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """This process can open only so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    gaps: list[int] = []
    while (descriptor := os.dup(0)) <= highest:
        gaps.append(descriptor)
    os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + free, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in gaps:
            os.close(descriptor)


async def test_a_request_waits_for_a_descriptor(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the request nor its server is lost, and the log names the missing descriptors."""
    async with serving(answering("200 OK", "ok"), fresh_posts=True) as client:
        before = os.listdir("/proc/self/fd")
        assert await client.call("POST", "/x", 1) == b"ok"
        await until(lambda: len(os.listdir("/proc/self/fd")) <= len(before))  # of both ends
        with few_descriptors(free=3):
            taken = []
            with suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            pending = asyncio.create_task(client.call("POST", "/x", 1))
            await asyncio.sleep(0.4)
            assert not pending.done()
            with pytest.raises(NoDescriptorError):  # so that its slot goes to another request
                async with client.stream("/x", 1):
                    raise AssertionError
            for descriptor in taken:
                os.close(descriptor)
            assert await pending == b"ok"
    (message,) = [one.getMessage() for one in caplog.records if is_shown(one)]
    assert "file descriptors" in message


async def test_streams_leave_descriptors_for_the_rest_of_the_process() -> None:
    """Of few a sixth: with eight free ones below the limit none begins, while a call is answered
    and files can be opened."""
    async with serving(answering("200 OK", "ok")) as client:
        with few_descriptors(free=8):
            most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
            taken = []
            while max(taken, default=0) < most - most // 6 - 1:
                taken.append(os.dup(0))
            with pytest.raises(NoDescriptorError):
                async with client.stream("/x", 1):
                    raise AssertionError
            assert await client.call("POST", "/x", 1) == b"ok"
            for descriptor in taken:
                os.close(descriptor)


async def test_names_hide_credentials_and_bad_urls_are_refused() -> None:
    assert ServerClient("http://me:secret@host:8000/base/").name == "http://host:8000/base"
    for url in ("host:8000", "ftp://host", ""):
        with pytest.raises(ConfigError, match="expected http"):
            ServerClient(url)


def test_entropy_of_the_largest_and_the_rest() -> None:
    """Hand-computed: halves and quarters, in nats; the rest counts as one token."""
    ln2 = 0.6931471805599453
    positions = [
        [-ln2, -2 * ln2, -2 * ln2],
        [-ln2],
        [-ln2, -2 * ln2],
        [0.0, -9999.0, float("-inf")],
        [1e-7],  # rounded above probability 1
        [],
    ]
    known = [1.5 * ln2, ln2, 1.5 * ln2, 0.0, 0.0, 0.0]
    assert top_k_entropies(positions) == pytest.approx(known, abs=1e-6)
    assert top_k_entropies(positions[3:4]) == [0.0]
    assert top_k_entropies([]) == []


def test_the_bound_of_entropies_rises_with_the_entropy() -> None:
    """From flat to peaked; no remaining token is likelier than the given ones. The sampled token is
    also given, instead of the k-th."""
    rng = np.random.default_rng(0)
    last = 0.0
    for scale in (8.0, 5.0, 3.0, 1.3, 0.0):
        logits = rng.normal(size=50_000) * scale
        logprobs = np.sort(logits - np.logaddexp.reduce(logits))[::-1]
        exact = float(-(np.exp(logprobs) * logprobs).sum())
        first, other = top_k_entropies([logprobs[:10].tolist(), [*logprobs[:9], logprobs[30_000]]])
        assert last < other <= first + 1e-9
        assert first <= exact + 1e-9
        last = other
    assert first == pytest.approx(exact)  # of a flat distribution
