"""The calls of the Hugging Face hub that creating and filling a repository of a model needs.

Weights are sent in parts by the LFS protocol, as to a hub without Xet.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.support.listening import listening

TOKEN = "hf_of_the_test"
PART = 4096  # bytes of an LFS object


class FakeHub:
    """`files` are those of each repository; `failing` the path at whose part a request fails."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.created: list[Any] = []
        self.parts: dict[str, dict[str, bytes]] = {}  # of LFS objects, by their hash
        self.failing = ""
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        if self.failing and self.failing in request.path:
            return web.json_response({"error": "no space is left"}, status=403)
        if request.path.startswith("/storage/"):  # its links are signed, and a token is a leak
            assert "Authorization" not in request.headers
            _, _, oid, number = request.path.split("/")
            self.parts[oid][number] = await request.read()
            return web.Response(headers={"ETag": number})
        if request.path.startswith("/complete/"):
            named = [one["partNumber"] for one in (await request.json())["parts"]]
            assert [str(one) for one in named] == [*self.parts[request.path.split("/")[2]]]
            return web.json_response({})
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            text = "Invalid credentials in Authorization header"
            return web.json_response({"error": text}, status=401)
        if request.path.endswith(".git/info/lfs/objects/batch"):
            return web.json_response(
                {"objects": [*map(self.place, (await request.json())["objects"])]}
            )
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
            kinds = ["lfs" if one.endswith(".safetensors") else "regular" for one in paths]
            modes = [{"path": one, "uploadMode": k} for one, k in zip(paths, kinds, strict=True)]
            return web.json_response({"files": [{**one, "shouldIgnore": False} for one in modes]})
        if "/commit/" in request.path:
            for line in (await request.text()).splitlines():
                part = json.loads(line)
                if part["key"] == "file":
                    content = base64.b64decode(part["value"]["content"])
                    self.files[name][part["value"]["path"]] = content
                if part["key"] == "lfsFile":
                    content = b"".join(self.parts[part["value"]["oid"]].values())
                    assert hashlib.sha256(content).hexdigest() == part["value"]["oid"]
                    self.files[name][part["value"]["path"]] = content
            address = f"{self.url}/{name}/commit/{'1' * 40}"
            return web.json_response({"commitUrl": address, "commitOid": "1" * 40})
        return web.json_response({"id": name, "sha": "0" * 40, "siblings": []})

    def place(self, one: Any) -> Any:
        """Where the client sends the parts of an object, and reports that they are complete."""
        self.parts[one["oid"]] = {}
        numbers = range(1, 1 + -(-one["size"] // PART))
        links = {str(n): f"{self.url}/storage/{one['oid']}/{n}" for n in numbers}
        header = {"chunk_size": str(PART), **links}
        upload = {"href": f"{self.url}/complete/{one['oid']}", "header": header}
        return {**one, "actions": {"upload": upload}}


@asynccontextmanager
async def fake_hub() -> AsyncIterator[FakeHub]:
    """One on a free port of this machine."""
    hub, app = FakeHub(), web.Application(client_max_size=1 << 30)
    app.router.add_route("*", "/{path:.*}", hub.answer)
    async with listening(app) as hub.url:
        yield hub
