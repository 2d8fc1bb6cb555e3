"""A reverse proxy in front of real engine servers: it spreads requests over them as a router does,
and can change messages, to simulate a server that was started with other options."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import reduce
from operator import getitem
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.listening import listening

Change = Callable[[Any], Any]  # takes decoded JSON or text, returns its replacement


class Proxy:
    """Requests go to `urls` in turn; answers are streamed back. `requests` and `answers` change the
    requests and answers of a path. A server does not notice that a client has disconnected: its
    answer is read to the end."""

    def __init__(
        self,
        urls: Sequence[str],
        session: aiohttp.ClientSession,
        requests: Mapping[str, Change],
        answers: Mapping[str, Change],
    ) -> None:
        self.url = ""
        self.counts: Counter[tuple[str, str]] = Counter()  # by server and path
        self._urls, self._session = urls, session
        self._requests, self._answers = requests, answers
        self._next = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.path in self._requests:
            body = json.dumps(self._requests[request.path](json.loads(body))).encode()
        server = self._urls[self._next % len(self._urls)]
        self._next += 1
        self.counts[server, request.path] += 1
        kind = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._session.request(
            request.method, server + request.path_qs, data=body or None, headers=kind
        ) as answer:
            headers = {"Content-Type": answer.headers.get("Content-Type", "application/json")}
            if request.path in self._answers:
                text = await answer.text()
                found = json.loads(text) if answer.content_type.endswith("json") else text
                found = self._answers[request.path](found)
                text = found if isinstance(found, str) else json.dumps(found)
                return web.Response(body=text.encode(), status=answer.status, headers=headers)
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                with suppress(ConnectionResetError):
                    await response.write(piece)
            with suppress(ConnectionResetError):
                await response.write_eof()
            return response


@asynccontextmanager
async def proxy(
    urls: Sequence[str],
    *,
    requests: Mapping[str, Change] | None = None,
    answers: Mapping[str, Change] | None = None,
) -> AsyncIterator[Proxy]:
    """One that listens on a free port."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        made = Proxy(urls, session, requests or {}, answers or {})
        app = web.Application(client_max_size=2**30)
        app.router.add_route("*", "/{path:.*}", made.handle)
        async with listening(app) as made.url:
            yield made


def changed(*path: str | int, to: Any) -> Change:
    """Sets the value at `path`, which must exist."""

    def change(found: Any) -> Any:
        place = reduce(getitem, path[:-1], found)
        assert path[-1] in place or isinstance(place, list), f"{path} is not in the answer"
        place[path[-1]] = to
        return found

    return change


def without(*path: str) -> Change:
    """Removes the value at `path`, which must exist."""

    def change(found: Any) -> Any:
        del reduce(getitem, path[:-1], found)[path[-1]]
        return found

    return change
