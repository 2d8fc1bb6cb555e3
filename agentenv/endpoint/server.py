"""The HTTP server of the endpoint: routes, keys, streams; a `Handler` serves each key.

    GET   /health, /v1/models, /v1/models/NAME
    POST  /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens
    POST  /v1/reward                            {"reward": NUMBER, "success"} of a captured program

The key is in `Authorization: Bearer KEY` or `x-api-key: KEY`. Every error has the form of its
route's API, and a name of ERRORS.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import zlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from hmac import compare_digest
from typing import Any, Protocol

import msgspec
from aiohttp import web

from agentenv.base.errors import ConfigError
from agentenv.base.offload import in_thread
from agentenv.base.ports import port_of, stop_listening
from agentenv.endpoint.anthropic import Anthropic
from agentenv.endpoint.chat import Chat
from agentenv.endpoint.messages import (
    ApiError,
    Dialect,
    Event,
    Handed,
    Json,
    Request,
    ServedTurn,
    Writer,
    read_body,
)
from agentenv.endpoint.responses import Responses

MAX_BODY_BYTES = 64 << 20
BODY_S = 60.0  # for a client to send its request, and to receive each part of a reply
SHUTDOWN_S = 1.0
_COMPACT = re.compile(r"\b(?:js|node|bun|deno|undici|ai-sdk|pydantic-ai)\b", re.IGNORECASE)
BACKLOG = 4096  # concurrent connects; a client that the kernel drops retries after seconds

Delta = Callable[[int, str, str], None]  # (choice, "thoughts" or "text", new text)

logger = logging.getLogger(__name__)
encode = msgspec.json.Encoder(enc_hook=str).encode


class Handler(Protocol):
    """Answers the calls of one key. Raises ApiError. `handed`: its replies that a call may name."""

    @property
    def handed(self) -> Handed: ...

    def new_id(self) -> str:
        """The id of the next reply."""
        ...

    async def answer(self, request: Request, delta: Delta | None) -> Sequence[ServedTurn]:
        """One turn per choice; `delta`, if any, gets new text during sampling."""
        ...

    async def count(self, request: Request) -> int:
        """Tokens of the prompt."""
        ...

    def written(self, request: Request) -> None:
        """The whole reply was written to its connection."""
        ...

    def lost(self, request: Request) -> None:
        """The connection ended before that."""
        ...

    def refused(self, error: ApiError) -> None:
        """A call is answered with this error."""
        ...


class Listener:
    """An application that listens at `port`. `unpacks`: aiohttp decodes compressed bodies; it
    answers encodings that it does not know by itself."""

    unpacks = True

    def __init__(self) -> None:
        self._runner: web.AppRunner | None = None
        self._servers: list[asyncio.Server] = []
        self.port = 0

    async def listen(
        self, app: web.Application, host: str, port: int, path: str | None = None
    ) -> None:
        """Listen, also at the Unix socket `path` if any; port 0 is any free one. Raises
        ConfigError."""
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=SHUTDOWN_S,
            auto_decompress=self.unpacks,
        )  # fmt: skip
        await self._runner.setup()
        loop, answer = asyncio.get_running_loop(), self._runner.server
        assert answer is not None
        try:
            self._servers = [await loop.create_server(answer, host, port, backlog=BACKLOG)]
        except OSError as error:
            await self.close()
            if error.errno == errno.EADDRINUSE:
                reason = "the port is in use; choose another one, or 0 for any free one"
            else:
                reason = error.strerror or str(error)
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
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


class ApiServer(Listener):
    """Serves the three APIs. `find` returns the handler of a key, or raises ApiError; `models` are
    those of /v1/models. `created` is the time of all replies, in seconds since 1970."""

    unpacks = False

    def __init__(
        self, find: Callable[[str], Handler], models: Callable[[], Sequence[Json]], created: int = 0
    ) -> None:
        super().__init__()
        self._find, self._models, self._created = find, models, created

    async def start(self, host: str = "127.0.0.1", port: int = 0, path: str | None = None) -> None:
        """Listen, as in `listen`."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app[_FIND] = self._find
        app.router.add_get("/health", _healthy)
        app.router.add_get("/v1/models", self._list)
        app.router.add_get("/v1/models/{name:.+}", self._one)
        for dialect in DIALECTS:
            app.router.add_post(dialect.path, partial(self._call, dialect))
        app.router.add_post(f"{Anthropic.path}/count_tokens", self._count)
        app.router.add_post("/v1/reward", self._reward)
        await self.listen(app, host, port, path)

    async def _list(self, http: web.Request) -> web.Response:
        self._handler(http)
        found = [*self._models()]
        names = [one["id"] for one in found] or [None]
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": found, **ends})

    async def _one(self, http: web.Request) -> web.Response:
        self._handler(http)
        name = http.match_info["name"]
        for model in self._models():
            if model["id"] == name:
                return json_response(model)
        raise ApiError("no_model", f"unknown model {name!r:.200}", "model")

    def _handler(self, http: web.Request) -> Handler:
        return self._find(key_of(http))

    async def _call(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        handler = self._handler(http)
        request = dialect.read(await _body(http), handler.handed)
        request.compact = not isinstance(dialect, Anthropic) and _writes_compact(http)
        request.repeats = http.headers.get("Idempotency-Key", "")
        request.id, request.created = handler.new_id(), self._created
        is_written = False
        try:
            if request.stream:
                response = await self._stream(dialect, http, handler, request)
            else:
                answers = await handler.answer(request, None)
                response = json_response(dialect.reply(request, answers))
            await _end(response, http)
            is_written = True
        finally:
            (handler.written if is_written else handler.lost)(request)
        return response

    async def _count(self, http: web.Request) -> web.Response:
        handler = self._handler(http)
        body = {"max_tokens": 1, **await _body(http)}
        if isinstance(found := body.get("messages"), list) and found:
            body["messages"] = [*found, {"role": "user"}]  # they may end with the policy's
        request = DIALECTS[-1].read(body, handler.handed)
        request.messages = request.messages[:-1]
        return json_response({"input_tokens": await handler.count(request)})

    async def _reward(self, http: web.Request) -> web.Response:
        """The reward of a program with captured calls."""
        rewarded = getattr(self._handler(http), "rewarded", None)
        if rewarded is None:
            raise ApiError("no_route", "only a program with captured calls has a reward")
        rewarded(await _body(http))
        return json_response({"ok": True})

    async def _stream(
        self, dialect: Dialect, http: web.Request, handler: Handler, request: Request
    ) -> web.StreamResponse:
        """Stream a reply. The stream begins with the first delta, so that earlier errors have their
        HTTP status."""
        queue: asyncio.Queue[tuple[int, str, str] | None] = asyncio.Queue()

        def delta(index: int, kind: str, text: str) -> None:
            queue.put_nowait((index, kind, text))

        answering = asyncio.ensure_future(handler.answer(request, delta))
        answering.add_done_callback(lambda _: queue.put_nowait(None))
        writers: list[Writer] = []  # made once `answer` has decided the id of the reply
        response: web.StreamResponse | None = None
        written = [{"thoughts": 0, "text": 0} for _ in range(request.n)]  # characters

        async def begin() -> web.StreamResponse:
            writers.extend(dialect.writer(request, i) for i in range(request.n))
            return await _begin(http, writers)

        try:
            while (item := await queue.get()) is not None:
                response = response or await begin()
                index, kind, text = item
                written[index][kind] += len(text)
                await _send(response, getattr(writers[index], kind)(text))
            answers = await answering
            response = response or await begin()
            for writer, found, sizes in zip(writers, answers, written, strict=True):
                for kind, size in sizes.items():
                    more = getattr(found.message, kind)[size:]
                    await _send(response, getattr(writer, kind)(more) if more else ())
                await _send(response, writer.finish(found))
            if request.usage_in_stream and isinstance(dialect, Chat):
                await _send(response, [("", dialect.usage(request, answers))])
        except ApiError as error:
            if response is None:
                raise
            handler.refused(error)
            await _send(response, [_error_event(dialect, error)])
        finally:
            answering.cancel()
        await _write(response, dialect.done)
        return response


def key_of(http: web.Request) -> str:
    """The key of a request, from `Authorization: Bearer KEY` or `x-api-key: KEY`."""
    kind, _, key = http.headers.get("Authorization", "").partition(" ")
    if kind.lower() != "bearer":
        key = http.headers.get("x-api-key", "")
    return key.strip()


def only(key: str, handler: Handler) -> Callable[[str], Handler]:
    """A `find` for a single handler."""

    def find(given: str) -> Handler:
        if not compare_digest(given.encode(), key.encode()):
            raise ApiError("no_key", "send the key as Authorization: Bearer KEY or x-api-key: KEY")
        return handler

    return find


DIALECTS: tuple[Chat, Responses, Anthropic] = (Chat(), Responses(), Anthropic())
SERVED = f"the served paths are {', '.join(dialect.path for dialect in DIALECTS)}"


async def _end(response: web.StreamResponse, http: web.Request) -> None:
    """Write all of a response, so that a lost connection raises here."""
    async with asyncio.timeout(BODY_S):
        await response.prepare(http)
        await response.write_eof()


def _writes_compact(http: web.Request) -> bool:
    """Whether the client writes JSON without blanks. In Anthropic's API arguments are no text."""
    client = http.headers.get("X-Stainless-Lang", ""), http.headers.get("User-Agent", "")
    return _COMPACT.search(" ".join(client)) is not None


_BROKEN = web.PayloadAccessError, web.RequestPayloadError, ConnectionError, ValueError, zlib.error


async def _body(http: web.Request) -> Json:
    try:
        async with asyncio.timeout(BODY_S):
            data = await http.read()
        coding = http.headers.get("Content-Encoding", "identity").lower()
        return read_body(data if coding == "identity" else await in_thread(_plain, data, coding))
    except TimeoutError as error:
        raise ApiError("too_slow", f"the request did not arrive within {BODY_S:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise ApiError("too_large", str(error.text)) from error
    except _BROKEN as error:
        raise ApiError("malformed", f"the body cannot be read: {error}") from error


def _plain(data: bytes, coding: str) -> bytes:
    """A body without its Content-Encoding."""
    if coding not in ("gzip", "deflate"):
        what = f"a body in {coding:.60} is not supported: send it as it is, or in gzip"
        raise ApiError("unsupported", what, "Content-Encoding")
    data = zlib.decompressobj(wbits=47).decompress(data, MAX_BODY_BYTES + 1)
    if len(data) > MAX_BODY_BYTES:
        raise ApiError("too_large", f"the body exceeds {MAX_BODY_BYTES} bytes")
    return data


async def _begin(http: web.Request, writers: Sequence[Writer]) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    async with asyncio.timeout(BODY_S):
        await response.prepare(http)
    for writer in writers:
        await _send(response, writer.start())
    return response


async def _send(response: web.StreamResponse, events: Iterable[Event]) -> None:
    data = b""
    for name, event in events:
        head = b"event: " + name.encode() + b"\n" if name else b""
        data += head + b"data: " + encode(event) + b"\n\n"
    await _write(response, data)


async def _write(response: web.StreamResponse, data: bytes) -> None:
    if data:
        async with asyncio.timeout(BODY_S):
            await response.write(data)


def _error_event(dialect: Dialect, error: ApiError) -> Event:
    body = dialect.error(error)
    if isinstance(dialect, Chat):
        return "", body
    if isinstance(dialect, Responses):
        body = {"type": "error", "sequence_number": 0, **body["error"]}
    return "error", body


def json_response(body: Any, status: int = 200) -> web.Response:
    """The response of an API."""
    return web.Response(body=encode(body), status=status, content_type="application/json")


async def _healthy(http: web.Request) -> web.Response:
    return json_response({"status": "ok"})


_HTTP = {404: "no_route", 405: "no_method", 413: "too_large"}
_FIND: web.AppKey[Callable[[str], Handler]] = web.AppKey("find")


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Whatever goes wrong has the form of the API; the handler of the key, if any, learns of it."""
    try:
        return await handler(request)
    except ApiError as error:
        found = error
    except web.HTTPException as error:
        name = _HTTP.get(error.status, "malformed")
        what = f"{request.method} {request.path}: {error.reason}; {SERVED}"
        found = ApiError(name, what, request.path.strip("/")[:60])
    except (TimeoutError, ConnectionError):
        raise  # the client is gone
    except Exception:
        logger.exception("a request of the endpoint failed")
        found = ApiError("bug", "internal error of the endpoint; the traceback is in its log")
    if request.path.startswith("/v1/"):
        with suppress(ApiError):
            request.app[_FIND](key_of(request)).refused(found)
    anthropic = "anthropic-version" in request.headers or request.path.startswith(Anthropic.path)
    dialect: Dialect = DIALECTS[-1] if anthropic else DIALECTS[0]
    with suppress(ConnectionError):
        return json_response(dialect.error(found), found.status)
    raise ConnectionResetError
