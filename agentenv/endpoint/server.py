"""The HTTP server of the endpoint: routes, keys, streams; a `Handler` serves each key.

    GET   /health, /v1/models, /v1/models/NAME
    POST  /v1/chat/completions, /v1/responses, /v1/messages, /v1/messages/count_tokens
    POST  /v1/reward                            {"reward": NUMBER, "success"} of a captured program

The key is in `Authorization: Bearer KEY` or `x-api-key: KEY`. Every error has the form of its
route's API, and a name of ERRORS.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, Protocol

from aiohttp import web

from agentenv.endpoint.anthropic import Anthropic, AnthropicWriter, anthropic_error
from agentenv.endpoint.chat import Chat, ChatWriter, openai_error
from agentenv.endpoint.listener import BODY_S, Listener, body_of, encode, json_response, key_of
from agentenv.endpoint.messages import ApiError, Event, Handed, Json, Request, ServedTurn, read_body
from agentenv.endpoint.responses import Responses, ResponsesWriter

_COMPACT = re.compile(r"\b(?:js|node|bun|deno|undici|ai-sdk|pydantic-ai)\b", re.IGNORECASE)

Dialect = Chat | Responses | Anthropic
Writer = ChatWriter | ResponsesWriter | AnthropicWriter  # of one choice of a stream
DIALECTS: tuple[Chat, Responses, Anthropic] = (Chat(), Responses(), Anthropic())

Delta = Callable[[int, str, str], None]  # (choice, "thoughts" or "text", new text)


class Handler(Protocol):
    """Answers the calls of one key. Raises ApiError. `handed`: its replies that a call may name. By
    default nothing depends on the end of a call."""

    handed: Handed

    def new_id(self) -> str:
        """The id of the next reply."""

    async def answer(self, request: Request, delta: Delta | None) -> Sequence[ServedTurn]:
        """One turn per choice; `delta`, if any, gets new text during sampling."""

    async def count(self, request: Request) -> int:
        """Tokens of the prompt."""

    def written(self, request: Request) -> None:
        """The whole reply was written to its connection."""
        return None

    def lost(self, request: Request) -> None:
        """The connection ended before that."""
        return None

    def refused(self, error: ApiError) -> None:
        """A call is answered with this error."""
        return None


class ApiServer(Listener):
    """Serves the three APIs. `find` returns the handler of a key, or raises ApiError; `key`: the
    only one, if any. `models` are those of /v1/models. `created` is the time of all replies, in
    seconds since 1970."""

    has_keys = True
    hint = f"; the served paths are {', '.join(dialect.path for dialect in DIALECTS)}"

    def __init__(
        self,
        find: Callable[[str], Handler],
        models: Callable[[], Sequence[Json]],
        created: int = 0,
        key: str = "",
    ) -> None:
        super().__init__(key)
        self._find, self._models, self._created = find, models, created

    async def start(self, host: str = "127.0.0.1", port: int = 0, path: str | None = None) -> None:
        """Listen, as in `listen`."""
        gets = {"/v1/models": self._list, "/v1/models/{name:.+}": self._one}
        posts: dict[str, Any] = {one.path: partial(self._call, one) for one in DIALECTS}
        posts |= {f"{Anthropic.path}/count_tokens": self._count, "/v1/reward": self._reward}
        await self.listen(gets, posts, host, port, path)

    def check(self, http: web.Request) -> None:
        """The key belongs to a handler."""
        super().check(http)
        self._handler(http)

    def _handler(self, http: web.Request) -> Handler:
        return self._find(key_of(http))

    def error(self, http: web.Request, error: ApiError) -> Json:
        """In the form of the route's API."""
        if "anthropic-version" in http.headers or http.path.startswith(Anthropic.path):
            return anthropic_error(error)
        return openai_error(error)

    def refused(self, http: web.Request, error: ApiError) -> None:
        """The handler of the key, if any, learns of it."""
        if http.path.startswith("/v1/"):
            with suppress(ApiError):
                self._handler(http).refused(error)

    async def _list(self, http: web.Request) -> web.Response:
        found = [*self._models()]
        names = [one["id"] for one in found] or [None]
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": found, **ends})

    async def _one(self, http: web.Request) -> web.Response:
        name = http.match_info["name"]
        for model in self._models():
            if model["id"] == name:
                return json_response(model)
        raise ApiError("no_model", f"unknown model {name!r:.200}", "model")

    async def _call(self, dialect: Dialect, http: web.Request) -> web.StreamResponse:
        handler = self._handler(http)
        request = dialect.read(read_body(await body_of(http)), handler.handed)
        client = http.headers.get("X-Stainless-Lang", ""), http.headers.get("User-Agent", "")
        request.compact = not isinstance(dialect, Anthropic) and _writes_compact(*client)
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
        body = {"max_tokens": 1, **read_body(await body_of(http))}
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
        rewarded(read_body(await body_of(http)))
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


async def _end(response: web.StreamResponse, http: web.Request) -> None:
    """Write all of a response, so that a lost connection raises here."""
    async with asyncio.timeout(BODY_S):
        await response.prepare(http)
        await response.write_eof()


@lru_cache(maxsize=256)
def _writes_compact(*client: str) -> bool:
    """Whether the client writes JSON without blanks. In Anthropic's API arguments are no text."""
    return _COMPACT.search(" ".join(client)) is not None


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
    if isinstance(dialect, Anthropic):
        return "error", anthropic_error(error)
    body = openai_error(error)
    if isinstance(dialect, Chat):
        return "", body
    return "error", {"type": "error", "sequence_number": 0, **body["error"]}
