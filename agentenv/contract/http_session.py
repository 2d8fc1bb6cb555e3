"""The client side of HTTP and WebSockets: every connection, reply and stream of the project.

A reply takes at most a few times its bound of memory: bodies, errors, lines of streams and messages
are read in pieces, counted after decompression. aiohttp bounds headers, decompressed pieces and
codings. Names are resolved in threads of their own, since those of the event loop may all hang.
Proxies are those of HTTP_PROXY, HTTPS_PROXY and NO_PROXY, never for this machine.
"""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, cast
from urllib.request import getproxies, proxy_bypass

import aiohttp
from aiohttp.resolver import ThreadedResolver
from yarl import URL

from agentenv.base.offload import OwnThread
from agentenv.base.ports import is_loopback
from agentenv.base.urls import checked_url

# Of a reply, a line or a message. Decoded JSON may take thirty times as much: [{}, {}, ..].
MAX_REPLY_BYTES = 1_500_000
MAX_ERROR_BYTES = 64_000  # of the reply to a failed request, whose beginning is read
PIECE_BYTES = 65_536
NUM_THREADS = 8  # that resolve the names of a session
MAX_REDIRECTS = 5


class LargeReplyError(aiohttp.ClientPayloadError):
    """A reply exceeds its bound."""


class Names(ThreadedResolver):
    """The addresses of names, from threads that do nothing else."""

    def __init__(self) -> None:
        super().__init__(cast(Any, self))  # instead of an event loop, whose threads may all hang
        self._threads = OwnThread("names", NUM_THREADS)

    async def getaddrinfo(self, *arguments: Any, **keys: Any) -> Any:
        """See the event loop's."""
        return await self._threads(socket.getaddrinfo, *arguments, **keys)

    async def getnameinfo(self, *arguments: Any) -> Any:
        """See the event loop's."""
        return await self._threads(socket.getnameinfo, *arguments)


class HttpSession:
    """The connections of one client, opened by its first request: without cookies, unless
    `keeps_cookies`. `limit`: connections at the same time, 0: any number. `by_proxy`: the proxies
    of the environment apply; not for pages, whose addresses are checked here, and not for the
    servers of a run. `headers` go with each request. `options` are those of aiohttp's connector."""

    def __init__(
        self,
        *,
        keeps_cookies: bool = False,
        limit: int = 0,
        by_proxy: bool = True,
        headers: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        self._keeps_cookies, self._headers = keeps_cookies, headers
        self._options = {"limit": limit, **options}
        self._proxies = proxies() if by_proxy else {}
        self._session: aiohttp.ClientSession | None = None

    async def send(self, method: str, url: URL | str, **options: Any) -> aiohttp.ClientResponse:
        """The response, whose body is to be read by `read_body` or `read_lines`, and which is to be
        closed. `options` are those of aiohttp's `ClientSession.request`; a redirect is returned,
        unless they allow redirects, which must stay at the same host. Raises aiohttp's errors."""
        options = {"allow_redirects": False, "max_redirects": MAX_REDIRECTS, **options}
        try:
            return await self._opened.request(method, url, proxy=self._proxy(URL(url)), **options)
        except aiohttp.TooManyRedirects as error:
            problem = f"redirects more than {options['max_redirects']} times"
            raise aiohttp.InvalidUrlRedirectClientError(url, problem) from error

    async def connect(self, url: str) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket, whose messages are bounded. Raises aiohttp's errors."""
        proxy = self._proxy(URL(url))
        return await self._opened.ws_connect(url, max_msg_size=MAX_REPLY_BYTES, proxy=proxy)

    async def close(self) -> None:
        """Drop the connections; a later request opens new ones. Idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    @property
    def _opened(self) -> aiohttp.ClientSession:
        if self._session is None:
            trace = aiohttp.TraceConfig()
            trace.on_request_redirect.append(_stay)
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(**{"resolver": Names(), **self._options}),
                cookie_jar=None if self._keeps_cookies else aiohttp.DummyCookieJar(),
                headers=self._headers,
                trace_configs=[trace],
            )
        return self._session

    def _proxy(self, url: URL) -> str | None:
        found = self._proxies.get(url.scheme.replace("ws", "http"))
        host = url.host or ""
        is_here = is_loopback(host) or host.endswith(".localhost")
        return None if not found or is_here or proxy_bypass(f"{host}:{url.port}") else found


def proxies() -> dict[str, str]:
    """The proxies of the environment. Raises ConfigError for another kind than http."""
    found = getproxies()
    for scheme in ("http", "https"):
        if scheme in found:
            found[scheme] = checked_url(found[scheme], f"{scheme}_proxy")
    return found


async def read_body(
    response: aiohttp.ClientResponse, max_bytes: int = 0, *, cut: bool = False
) -> bytes:
    """The body, of at most `max_bytes` (0: MAX_REPLY_BYTES); if `cut`, the beginning of a larger
    one. Raises LargeReplyError."""
    body, max_bytes = bytearray(), max_bytes or MAX_REPLY_BYTES
    async for piece in response.content.iter_chunked(PIECE_BYTES):
        body += piece
        if len(body) > max_bytes:
            if cut:
                break
            raise LargeReplyError(f"the reply exceeds {max_bytes} bytes")
    return bytes(memoryview(body)[:max_bytes])


async def read_refusal(response: aiohttp.ClientResponse) -> bytes:
    """The beginning of the reply to a failed request."""
    return await read_body(response, MAX_ERROR_BYTES, cut=True)


async def read_lines(
    response: aiohttp.ClientResponse, max_bytes: int, max_line: int
) -> AsyncIterator[bytes]:
    """The complete lines of a body of at most `max_bytes`, each of at most `max_line` bytes and
    without its end. Raises LargeReplyError."""
    rest, num_bytes = bytearray(), 0
    while piece := await response.content.readany():
        num_bytes += len(piece)
        rest += piece
        if b"\n" in piece:
            *lines, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in lines:
                yield line
        if num_bytes > max_bytes or len(rest) > max_line:
            most = max_bytes if num_bytes > max_bytes else max_line
            raise LargeReplyError(f"the stream, or a line of it, exceeds {most} bytes")


async def _stay(_: Any, __: Any, params: aiohttp.TraceRequestRedirectParams) -> None:
    """Refuse a redirect to another host, which would get our headers."""
    headers = params.response.headers
    target = headers.get("Location") or headers.get("URI") or ""  # as aiohttp does
    with suppress(ValueError):
        if params.url.join(URL(target)).origin() == params.url.origin():
            return
    raise aiohttp.InvalidUrlRedirectClientError(
        target.partition("?")[0], "another host would get our headers"
    )
