"""HTTP client of one engine server: calls with deadlines, event streams, readable errors.

no connection, deadline passed, 5xx -> ServerLostError: the request may be sent again
connection aborted                  -> BrokenConnectionError: the server's state is unknown
429, 503 with Retry-After           -> BusyError: the server is healthy, but full
other statuses except 2xx           -> RefusedError, an EngineError with the server's reason

Only GET is sent again, if a kept connection was closed. If this process has no file descriptor
left, a call waits for one. A stream then raises NoDescriptorError, also if only the descriptors are
left that are reserved for the files of the process. That is not a server's fault.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec
from msgspec import Meta, Struct
from yarl import URL

from agentenv.base.errors import SHOWN, ConfigError, DataError, EngineError, ForeignError
from agentenv.base.offload import in_new_thread, result_of
from agentenv.base.secrets import SECRETS
from agentenv.base.untrusted import convert, decode
from agentenv.base.urls import checked_url
from agentenv.contract.http import MAX_REASON_CHARS, is_temporary, reason_of, retry_after_s
from agentenv.contract.http_session import (
    HttpSession,
    LargeReplyError,
    read_body,
    read_lines,
    read_refusal,
)
from agentenv.contract.request import (
    BrokenConnectionError,
    BusyError,
    NoDescriptorError,
    ServerLostError,
)

# uvicorn closes an idle connection after 5 s; a request at that moment would be lost
KEEP_ALIVE_S = 3.0
CONNECT_S = 10.0
HEALTH_S = 5.0
END_S = 0.25  # for the end of a complete answer; later its connection is not kept
# Of the reply to a request that samples: for its form, for a token, for a log-prob of a token.
FORM_BYTES, TOKEN_BYTES, LOGPROB_BYTES = 262_144, 64, 256
EVENT_LOGPROBS = 4  # an event of a stream has the size of this many
MAX_LINE_BYTES = 4_000_000  # beyond the tokens of an event
DONE = b"[DONE]"
NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)
NO_DESCRIPTOR_S = 0.25  # between attempts of a request without a free file descriptor
SPARED = 64  # reserved file descriptors (at most a sixth): pages, checkpoints, processes
WARN_S = 60.0  # between warnings about this

logger = logging.getLogger(__name__)

T = TypeVar("T")
TokenId = Annotated[int, Meta(ge=0, lt=1 << 31)]
Logprob = Annotated[float, Meta(le=1.0)]  # with tolerance for rounding
Count = Annotated[int, Meta(ge=0, lt=1 << 53)]  # exact as a float


class RefusedError(EngineError):
    """The server rejected the request; `status` is the HTTP status, `reason` the server's text."""

    is_final = True

    def __init__(self, text: str, status: int, reason: str) -> None:
        super().__init__(text)
        self.status, self.reason = status, reason


class FailedError(ServerLostError):
    """The server answered 5xx or 408: it is broken, or failed to process the request."""

    kind = "failed"

    def __init__(self, text: str, status: int, reason: str) -> None:
        super().__init__(text)
        self.status, self.reason = status, reason


class SilentServerError(ServerLostError):
    """The server did not answer in time."""


class _Schema(Struct):
    paths: dict[str, dict[str, msgspec.Raw]]


class MalformedReplyError(EngineError):
    """A reply with status 200 of an unexpected form or size."""


def reply_bytes(num_tokens: int, num_logprobs: int) -> int:
    """The bound of a reply with this many tokens, each with this many log-probs."""
    return FORM_BYTES + num_tokens * (TOKEN_BYTES + LOGPROB_BYTES * num_logprobs)


async def why_unreachable(url: str, key: str) -> str:
    """The reason why no connection to this URL of `key` is possible; empty if one is. Raises
    ConfigError for an invalid URL."""
    base = URL(checked_url(url, key))
    try:
        async with asyncio.timeout(CONNECT_S):
            _, writer = await asyncio.open_connection(base.host, base.port)
    except TimeoutError:
        return f"no connection within {CONNECT_S:g} s"
    except OSError as error:
        return error.strerror or str(error)
    writer.close()
    return ""


class ServerClient:
    """Calls to one base URL. `name` is the URL without credentials.

    Deadlines in seconds: `call_s` of a short call; `wait_s` of a stream without an event, and of a
    long call (requests wait while weights are loaded).

    `fresh_posts`: each POST that is not a stream uses a new connection, so that it cannot fail on a
    closed one; for the few calls that change the server. `by_proxy`: see HttpSession.
    """

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        headers: Mapping[str, str] | None = None,
        call_s: float = 30.0,
        wait_s: float = 600.0,
        fresh_posts: bool = False,
        by_proxy: bool = False,
    ) -> None:
        self._base = URL(checked_url(url, "engine URL"))
        self.name = str(self._base.with_user(None).with_query(None)).rstrip("/")
        self.wait_s, self._call_s = wait_s, call_s
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {**(headers or {})}
        self._fresh_posts = fresh_posts
        self._warned_at = -WARN_S
        # Kept connections; a router's cookie would bind all sessions to one server.
        kept: Any = {"keepalive_timeout": KEEP_ALIVE_S, "socket_factory": _socket}
        self._session = HttpSession(by_proxy=by_proxy, **kept)
        self._fresh = HttpSession(by_proxy=by_proxy, force_close=True)  # one for each request

    async def call(
        self,
        method: str,
        path: str,
        json: Any = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        *,
        fresh: bool = False,
        max_bytes: int = 0,
    ) -> bytes:
        """The body of a 2xx answer. `json` is sent as JSON unless it is None. `fresh`: use a new
        connection; `max_bytes`: see `read_body`. Raises MalformedReplyError for a larger body."""
        limit = aiohttp.ClientTimeout(total=timeout_s or self._call_s, sock_connect=CONNECT_S)
        fresh = fresh or (self._fresh_posts and method == "POST")
        async with self._request(method, path, json, limit, params, fresh=fresh) as response:
            return await read_body(response, max_bytes)

    async def call_json(self, method: str, path: str, json: Any = None, **options: Any) -> Any:
        """As `call`, decoded; None for an empty body. Raises MalformedReplyError for invalid
        JSON."""
        anything: Any = Any  # which is no type to mypy
        return await self.call_as(anything, method, path, json, **options)

    async def call_as(
        self, kind: type[T], method: str, path: str, json: Any = None, **options: Any
    ) -> T:
        """As `call`, decoded as `kind`. Raises MalformedReplyError for other content."""
        body = await self.call(method, path, json, **options) or b"null"
        return read_as(
            kind, body, f"{self.name}{path} returned an answer that no known engine gives"
        )

    async def read(
        self,
        kind: type[T],
        method: str,
        path: str,
        key: str,
        default: T | None = None,
        **options: Any,
    ) -> T:
        """One key of an answer that is an object; `default` if it is missing or null. Raises
        MalformedReplyError if it is not a `kind`."""
        found = (await self.call_as(dict[str, Any], method, path, **options)).get(key)
        found = default if found is None else found
        if not isinstance(found, kind):
            raise MalformedReplyError(
                f"{self.name}{path} answered {key} = {beginning(repr(found))}, no {kind.__name__}"
            )
        return found

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        json: Any,
        headers: Mapping[str, str] | None = None,
        num_tokens: int = 4096,
        num_logprobs: int = 0,
        num_together: int = 1,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """A POST with server-sent events as its answer: yields the data of each, without the final
        `[DONE]`. Leaving the context before the end drops the connection. The bounds follow from
        the number of tokens, of log-probs of a token, and of tokens in an event.

        The iterator raises BrokenConnectionError if the stream ends before `[DONE]`, and
        ServerLostError beyond the bounds. Raises NoDescriptorError if nothing was sent.
        """
        limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=self.wait_s)
        sending = self._request("POST", path, json, limit, headers=headers, streams=True)
        async with sending as response:
            num_logprobs += EVENT_LOGPROBS
            max_line = MAX_LINE_BYTES + reply_bytes(num_together, num_logprobs)
            lines = read_lines(response, reply_bytes(num_tokens, num_logprobs), max_line)
            yield self._events(response, path, lines)

    async def answers(self, path: str) -> bool:
        """Whether it answers a GET now; does not raise for a lost server."""
        try:
            await self.call("GET", path, timeout_s=HEALTH_S)
        except EngineError:
            return False
        return True

    async def routes(self) -> frozenset[str]:
        """The routes in its /openapi.json, as "POST /path"; ConfigError if hidden."""
        try:
            schema = await self.call_as(_Schema, "GET", "/openapi.json")
        except RefusedError as error:
            raise ConfigError(
                f"{self.name} answers {error.status} to GET /openapi.json, which lists the routes "
                "of an engine: it is not an engine server, or it was started with "
                "--disable-fastapi-docs"
            ) from error
        except MalformedReplyError as error:
            raise ConfigError(f"{error}; expected the routes of an engine") from error
        return frozenset(
            f"{verb.upper()} {path}" for path, verbs in schema.paths.items() for verb in verbs
        )

    async def close(self) -> None:
        """Drop all connections. Idempotent; a later call opens new ones."""
        await self._session.close()
        await self._fresh.close()

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        json: Any,
        limit: aiohttp.ClientTimeout,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        fresh: bool = False,
        streams: bool = False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        kind = {} if json is None else {"Content-Type": "application/json"}
        request: dict[str, Any] = {
            "url": self._base.with_path(self._base.path.rstrip("/") + path),
            "params": params,
            "data": None if json is None else msgspec.json.encode(json),
            "headers": {**kind, **self._headers, **(headers or {})},
            "timeout": limit,
        }
        try:
            sending = self._send(method, request, fresh=fresh, streams=streams)
            async with await sending as response:
                if not 200 <= response.status < 300:
                    wanted_s = retry_after_s(response.headers)
                    self._refuse(path, response.status, await read_refusal(response), wanted_s)
                yield response
        except LargeReplyError as error:
            wrong = ServerLostError if streams else MalformedReplyError
            raise wrong(f"{self.name}{path}: {error}") from error
        except (aiohttp.ClientError, OSError) as error:  # a TimeoutError is an OSError
            text = f" ({type(error).__name__}: {error})".replace(": )", ")")
            if isinstance(error, TimeoutError):
                raise SilentServerError(f"{self.name}{path}: no answer in time{text}") from error
            lost = BrokenConnectionError if _is_broken(error) else ServerLostError
            raise lost(f"{self.name}{path}: connection lost{text}") from error

    async def _send(
        self, method: str, request: dict[str, Any], *, fresh: bool, streams: bool
    ) -> aiohttp.ClientResponse:
        """Send on a kept connection unless `fresh`; a GET uses a new one if the kept one was
        closed."""
        while True:
            try:
                session = self._fresh if fresh else self._session
                return await session.send(method, **request)
            except (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                if isinstance(error, aiohttp.ClientConnectorError):
                    if error.errno not in NO_DESCRIPTOR and not _lacks_descriptors():
                        raise
                    if streams or fresh:
                        self._warn_descriptors()
                    if streams:
                        raise NoDescriptorError(f"no file descriptor for {self.name}") from error
                    if fresh:
                        await asyncio.sleep(NO_DESCRIPTOR_S)
                    fresh = True  # a new connection may use the reserved descriptors
                elif fresh or method != "GET":
                    raise
                else:
                    fresh = True

    def _warn_descriptors(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._warned_at >= WARN_S:
            self._warned_at = now
            logger.warning(
                "requests to %s wait for file descriptors, since this process has used all of "
                "them; raise the hard limit (ulimit -Hn), or lower engine.pool.max_concurrency",
                self.name,
                extra=SHOWN,
            )

    def _refuse(self, path: str, status: int, body: bytes, retry_after_s: float | None) -> None:
        reason = reason_of(body)[:MAX_REASON_CHARS]
        text = f"{self.name}{path} answered {status}: {reason or 'no reason given'}"
        if status == 429 or (status == 503 and retry_after_s is not None):
            raise BusyError(text, retry_after_s or 0.0)
        if is_temporary(status):
            raise FailedError(text, status, reason)
        if status == 401:
            text += "; check the API key of this server"
        raise RefusedError(text, status, reason)

    async def _events(
        self, response: aiohttp.ClientResponse, path: str, lines: AsyncIterator[bytes]
    ) -> AsyncIterator[bytes]:
        async for line in lines:
            if line.startswith(b"data:"):
                data = line[5:].strip()
                if data == DONE:
                    await _read_end(response)
                    return
                yield data
        raise BrokenConnectionError(f"{self.name}{path}: the stream ended before it was complete")


async def _read_end(response: aiohttp.ClientResponse) -> None:
    """Read the end of the body, usually a separate packet; the connection is kept only after it."""
    if response.content.at_eof():
        return
    with suppress(aiohttp.ClientError, OSError):  # the answer is complete
        async with asyncio.timeout(END_S):
            while await response.content.readany():
                pass


def _is_broken(error: Exception) -> bool:
    """Whether an established connection was lost, which proxies also do with healthy servers."""
    if isinstance(error, aiohttp.ClientConnectorError | TimeoutError):
        return False
    return isinstance(
        error,
        aiohttp.ServerDisconnectedError
        | aiohttp.ClientPayloadError
        | aiohttp.ClientOSError
        | ConnectionError,
    )


def _socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """A socket, unless it would use a reserved descriptor: the system assigns the lowest free one,
    so the upper ones stay free. Raises OSError."""
    family, kind, protocol = address[:3]
    opened = socket.socket(family, kind, protocol)
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most > 0 and opened.fileno() >= most - min(SPARED, most // 6):  # -1: there is no limit
        opened.close()
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return opened


def _lacks_descriptors() -> bool:
    """Whether this process can open no more files."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno in NO_DESCRIPTOR
    return False


def read_as(kind: type[T], reply: Any, what: str) -> T:
    """A reply, bytes or plain values, as `kind`. Raises MalformedReplyError that begins with
    `what`."""
    try:
        return decode(reply, kind) if isinstance(reply, bytes) else convert(reply, kind)
    except ForeignError as error:
        text = beginning(reply if isinstance(reply, bytes) else msgspec.json.encode(reply))
        raise MalformedReplyError(f"{what} ({error}): {text!r:.200}") from error


def beginning(text: bytes | str) -> str:
    """The beginning of a server's text for messages, without secrets."""
    text = text if isinstance(text, str) else text.decode(errors="replace")
    return SECRETS.known(text[:10_000])[:MAX_REASON_CHARS]


FETCH_S = 300.0


async def fetched(url: str, headers: Mapping[str, str], body: Any = None) -> Any:
    """The JSON response of a URL, to a POST if there is a `body`. None if the server does not have
    the route. Raises DataError."""
    server = ServerClient(url, headers=headers, call_s=FETCH_S, by_proxy=True)
    try:
        return await server.call_json("GET" if body is None else "POST", "", body)
    except EngineError as error:
        if getattr(error, "status", 0) in (404, 405, 501):
            return None
        raise DataError(str(error)) from error
    finally:
        await server.close()


def fetch(url: str, headers: Mapping[str, str], body: Any = None) -> Any:
    """As `fetched`, for data files: waits for the response."""
    return result_of(in_new_thread(lambda: asyncio.run(fetched(url, headers, body)), "fetch"))
