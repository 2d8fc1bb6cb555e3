"""A scripted OpenAI-compatible endpoint in a separate thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, Self

from aiohttp import web

from tests.support.listening import listening

Json = dict[str, Any]
# its answers: a reply, a status (with a reason), raw bytes, or a number of seconds to be silent
Answer = Json | int | tuple[int, str] | bytes | float


class ScriptedEndpoint:
    """Serves one model; `script(body, number of the request)` answers. `pages`: content type and
    bytes by path, of a web site."""

    def __init__(self, script: Callable[[Json, int], Answer], owner: str = "somebody") -> None:
        self.script, self.owner = script, owner
        self.pages: dict[str, tuple[str, bytes]] = {}
        self.requests: list[Json] = []
        self.headers: list[dict[str, str]] = []
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/{path:.*}", self._page)
        app.router.add_post("/{path:.*}", self._answer)
        async with listening(app) as self.url:
            self._ready.set()
            await self._stop.wait()

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "owned_by": self.owner}]})

    async def _page(self, request: web.Request) -> web.Response:
        kind, body = self.pages.get(request.path, ("text/html", b""))
        return web.Response(body=body, content_type=kind, status=200 if body else 404)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        self.headers.append({**request.headers, "path": request.path_qs})
        answer = self.script(body, len(self.requests))
        if isinstance(answer, float):
            await asyncio.sleep(answer)
            answer = 500
        if isinstance(answer, int):
            answer = (answer, f"no ({answer})")
        if isinstance(answer, tuple):
            return web.json_response({"error": {"message": answer[1]}}, status=answer[0])
        if isinstance(answer, bytes):
            return web.Response(body=answer)
        return web.json_response(answer)


def reply(
    content: str | None, reason: str = "stop", usage: tuple[int, int] | None = None, **more: Any
) -> Json:
    """A chat completion; `usage` is (prompt tokens, completion tokens)."""
    choice = {"message": {"role": "assistant", "content": content, **more}, "finish_reason": reason}
    found: Json = {"choices": [choice]}
    if usage is not None:
        found["usage"] = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
    return found


def call(name: str, arguments: str, number: int = 1) -> Json:
    """A native tool call."""
    function = {"name": name, "arguments": arguments}
    return {"id": f"id-{number}", "type": "function", "function": function}
