"""The calls of the Hugging Face hub that creating and filling a repository of a model needs."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.support.listening import listening

TOKEN = "hf_of_the_test"


class FakeHub:
    """`files` are those of each repository; `failing` the path at whose part a request fails."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.created: list[Any] = []
        self.failing = ""
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            text = "Invalid credentials in Authorization header"
            return web.json_response({"error": text}, status=401)
        if self.failing and self.failing in request.path:
            return web.json_response({"error": "no space is left"}, status=403)
        name = "/".join(request.path.split("/")[3:5])
        if request.path == "/api/repos/create":
            given = await request.json()
            self.created.append(given)
            name = f"{given['organization']}/{given['name']}"
            self.files[name] = {}
            return web.json_response({"url": f"{self.url}/{name}", "name": name})
        if name not in self.files:
            headers = {"X-Error-Code": "RepoNotFound"}
            return web.json_response({"error": "not found"}, status=404, headers=headers)
        if "/preupload/" in request.path:
            paths = [one["path"] for one in (await request.json())["files"]]
            modes = [{"path": one, "uploadMode": "regular", "shouldIgnore": False} for one in paths]
            return web.json_response({"files": modes})
        if "/commit/" in request.path:
            for line in (await request.text()).splitlines():
                part = json.loads(line)
                if part["key"] == "file":
                    content = base64.b64decode(part["value"]["content"])
                    self.files[name][part["value"]["path"]] = content
            address = f"{self.url}/{name}/commit/{'1' * 40}"
            return web.json_response({"commitUrl": address, "commitOid": "1" * 40})
        return web.json_response({"id": name, "sha": "0" * 40, "siblings": []})


@asynccontextmanager
async def fake_hub() -> AsyncIterator[FakeHub]:
    """One on a free port of this machine."""
    hub, app = FakeHub(), web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", hub.answer)
    async with listening(app) as hub.url:
        yield hub
