"""One guard for every HTTP and WebSocket server: who may ask, and the form of errors.

    421   on loopback, a Host that is no name of loopback: the name of a page leads here
    403   an Origin or a Sec-Fetch-Site of another page; a link may lead here
    401   a wrong key, or none; GET /health needs none
    408, 413, 400   a body that is late, larger than `max_bytes`, or unreadable; a request, too

A browser sends requests to loopback for any page that its user opens, so that a server without a
key needs the first two. Beyond loopback a server has a key, and any Host. Every error is the JSON
of an `ApiError`.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from hmac import compare_digest
from typing import Any, ClassVar

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from agentenv.base.errors import ConfigError, InfraError, ToolError
from agentenv.base.offload import in_thread
from agentenv.base.ports import BACKLOG, is_loopback, open_server, port_of, stop_listening
from agentenv.endpoint.chat import openai_error
from agentenv.endpoint.messages import ApiError, Json

BODY_S = 60.0  # for a client to send its request, and to receive each part of a reply
SHUTDOWN_S = 1.0
_NAMES = {404: "no_route", 405: "no_method", 413: "too_large"}

logger = logging.getLogger(__name__)
encode = msgspec.json.Encoder(enc_hook=str).encode


class _Connection(web.RequestHandler):
    """Closed without a first request within BODY_S."""

    timer: asyncio.TimerHandle

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.timer = asyncio.get_running_loop().call_later(BODY_S, self.force_close)

    def handle_error(
        self, request: Any, status: int = 500, exc: Any = None, message: Any = None
    ) -> web.StreamResponse:
        """The reply to a request that is not HTTP."""
        if status != 400:
            return super().handle_error(request, status, exc, message)
        error = ApiError("malformed", f"not HTTP: {message:.200}")
        response = json_response(openai_error(error), status)
        response.headers.update(Listener.headers)
        response.force_close()
        return response


class Listener:
    """Routes that are served at `port`. A client needs the `key`, if any; a server with other keys
    (`has_keys`) overrides `check`."""

    has_keys: ClassVar[bool] = False
    max_bytes: ClassVar[int] = 64 << 20  # of a request's body
    hint: ClassVar[str] = ""  # after the error of an unknown route
    headers: ClassVar[Mapping[str, str]] = {
        "X-Content-Type-Options": "nosniff",
        "Cross-Origin-Resource-Policy": "same-origin",
        "X-Frame-Options": "DENY",
    }

    def __init__(self, key: str = "") -> None:
        self._key = key
        self._runner: web.AppRunner | None = None
        self._servers: list[asyncio.Server] = []
        self._is_local = True
        self.port = 0

    def check(self, http: web.Request) -> None:
        """Raises ApiError for a request without the key."""
        if self._key and not same_key(key_of(http), self._key):
            raise ApiError("no_key", "send the key as Authorization: Bearer KEY or x-api-key: KEY")

    def error(self, http: web.Request, error: ApiError) -> Json:
        """The body of an error."""
        return openai_error(error)

    def refused(self, http: web.Request, error: ApiError) -> None:
        """A request is answered with this error."""

    async def listen(
        self,
        gets: Mapping[str, Handler],
        posts: Mapping[str, Handler],
        host: str,
        port: int,
        path: str | None = None,
    ) -> None:
        """Serve these routes, also at the Unix socket `path` if any; port 0 is any free one. Raises
        ConfigError."""
        app = web.Application(client_max_size=self.max_bytes, middlewares=[self._guard])
        gets = {"/health": _healthy, **gets}
        app.router.add_routes([web.get(route, answer) for route, answer in gets.items()])
        app.router.add_routes([web.post(route, answer) for route, answer in posts.items()])
        app.on_response_prepare.append(self._mark)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S)
        await self._runner.setup()
        loop, self._is_local = asyncio.get_running_loop(), is_loopback(host)
        options: Json = {"manager": self._runner.server, "access_log": None}
        answer = partial(_Connection, loop=loop, auto_decompress=False, **options)
        has_key = self.has_keys or bool(self._key)
        try:
            self._servers = [await open_server(answer, host, port, has_key=has_key)]
        except ConfigError:
            await self.close()
            raise
        self.port = port_of(self._servers[0].sockets[0])
        if path is not None:
            self._servers.append(await loop.create_unix_server(answer, path, backlog=BACKLOG))

    async def close(self) -> None:
        """Stop listening, and cancel running requests. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            while self._servers:
                await stop_listening(self._servers.pop())
            await runner.cleanup()

    def _refuse(self, http: web.Request) -> None:
        """Raises ApiError for a request that a page of others, or no known client, sends."""
        host, origins = http.headers.get("Host", ""), {*http.headers.getall("Origin", ())}
        name, _, port = host.rpartition(":")
        name = name if port.isdigit() else host
        if self._is_local and not is_loopback(name):
            raise ApiError("other_host", f"this is not {host}")
        site, mode = http.headers.get("Sec-Fetch-Site", "none"), http.headers.get("Sec-Fetch-Mode")
        is_own = origins <= {f"http://{host}"} and site in ("none", "same-origin")
        is_link = not origins and http.method == "GET" and mode == "navigate"
        if not (is_own or is_link):
            raise ApiError("other_page", "requests of other pages are rejected")
        if http.path != "/health":
            self.check(http)

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request.protocol.timer.cancel()  # type: ignore[attr-defined]
        try:
            self._refuse(request)
            return await handler(request)
        except ApiError as error:
            found = error
        except (ToolError, InfraError) as error:
            name = "invalid" if isinstance(error, ToolError) else "unavailable"
            found = ApiError(name, str(error))
        except web.HTTPException as error:
            name = _NAMES.get(error.status, "malformed")
            what = f"{request.method} {request.path}: {error.reason}{self.hint}"
            found = ApiError(name, what, request.path.strip("/")[:60])
        except (TimeoutError, ConnectionError):
            raise  # the client is gone
        except Exception:
            logger.exception("a request failed")
            found = ApiError("bug", "internal error of the server; the traceback is in its log")
        self.refused(request, found)
        with suppress(ConnectionError):
            response = json_response(self.error(request, found), found.status)
            if found.status < 500:  # the SDKs of both APIs read it
                response.headers["x-should-retry"] = "false"
            return response
        raise ConnectionResetError

    async def _mark(self, http: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(self.headers)


async def _healthy(http: web.Request) -> web.Response:
    return json_response({"status": "ok"})


def key_of(http: web.Request) -> str:
    """The key of a request, from `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    kind, _, key = http.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "bearer":
        key = http.headers.get("x-api-key", "")
    return key.strip()


def same_key(given: str, key: str) -> bool:
    """Whether it is the key, in a time that does not depend on it."""
    return compare_digest(given.encode(errors="surrogateescape"), key.encode())


_BROKEN = web.PayloadAccessError, web.RequestPayloadError, ConnectionError, ValueError, zlib.error


async def body_of(http: web.Request) -> bytes:
    """The body of a request, decoded. Raises ApiError."""
    try:
        if (http.content_length or 0) > http.client_max_size:
            raise web.HTTPRequestEntityTooLarge(http.client_max_size, http.content_length or 0)
        whole = http.read()
        data = await (whole if http.content.is_eof() else asyncio.wait_for(whole, BODY_S))
        coding = http.headers.get("Content-Encoding", "identity").lower()
        if coding == "identity":
            return data
        return await in_thread(_plain, data, coding, http.client_max_size)
    except TimeoutError as error:
        raise ApiError("too_slow", f"the request did not arrive within {BODY_S:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError("too_large", str(error.text)) from error
    except _BROKEN as error:
        raise ApiError("malformed", f"the body cannot be read: {error}") from error


def _plain(data: bytes, coding: str, max_bytes: int) -> bytes:
    """A body without its Content-Encoding."""
    if coding not in ("gzip", "deflate"):
        what = f"a body in {coding:.60} is not supported: send it as it is, or in gzip"
        raise ApiError("unsupported", what, "Content-Encoding")
    data = zlib.decompressobj(wbits=47).decompress(data, max_bytes + 1)
    if len(data) > max_bytes:
        raise ApiError("too_large", f"the body exceeds {max_bytes} bytes")
    return data


def json_response(body: Any, status: int = 200) -> web.Response:
    """The response of an API."""
    return web.Response(body=encode(body), status=status, content_type="application/json")
