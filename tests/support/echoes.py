"""A server that repeats secrets: a model, a judge, a retriever and an API, each answer of which
contains the request's headers and what it was told to repeat."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from aiohttp import web

from tests.support.listening import listening


@contextmanager
def echoes(repeated: list[str]) -> Iterator[str]:
    """Its host and port; it runs in a thread of its own."""
    loop, ready, stop = asyncio.new_event_loop(), threading.Event(), asyncio.Event()
    urls: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        said = "\n".join(repeated) + f"\n{dict(request.headers)}\n{request.path_qs}"
        if "deny" in request.path:
            return web.json_response({"error": {"message": said}}, status=401)
        if request.path.endswith("/models"):
            return web.json_response({"data": [{"id": "m"}]})
        if request.path.endswith("/retrieve"):
            return web.json_response({"result": [[{"document": {"contents": f"t\n{said}"}}]]})
        if request.path.endswith("/chat/completions"):
            tool = "shop" if "shop" in request.path else "search"
            is_first = "judge" not in request.path and len((await request.json())["messages"]) < 3
            text = f"<think>?</think><{tool}>bolts</{tool}>" if is_first else said
            choice = {"message": {"content": text}, "finish_reason": "stop"}
            return web.json_response({"choices": [choice]})
        return web.json_response({"message": said}, status=400)

    async def serve() -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        async with listening(app) as url:
            urls.append(url.removeprefix("http://"))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(30)
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
