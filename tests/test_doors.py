"""What is opened towards others has one place, and its defenses are everywhere the same."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest

from agentenv.base.errors import ConfigError
from agentenv.base.ports import LOOPBACK_DEVICE, open_server
from agentenv.endpoint import listener
from agentenv.endpoint.capture import Endpoint
from agentenv.endpoint.listener import Listener
from agentenv.endpoint.openenv import EnvServer
from agentenv.endpoint.server import ApiServer
from agentenv.lab.viewing.folder import Folder
from agentenv.lab.viewing.page import FolderServer
from agentenv.launchers.retriever import Retriever, RetrieverConfig
from tests.commands.test_viewer_page import CHROMIUM, FLAGS
from tests.envs.bridges.test_openenv import TASKS, CounterEnv
from tests.support.snippets import run_python
from tests.support.sockets import sockets_of
from tests.support.sources import ROOT, texts
from tests.support.viewed_run import make_run
from tests.support.warehouse import make_workspace

TABLE = tomllib.loads((ROOT / "tests" / "support" / "doors.toml").read_text(encoding="utf-8"))
INHERITED = "self.listen"  # of a Listener


def named(source: str) -> Iterator[str]:
    """The names that it uses, however it calls them later: of modules and attributes, imported
    ones, also under another name, and texts, as of getattr."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node) != INHERITED:
            yield from (node.attr, ast.unparse(node))
        elif isinstance(node, ast.ImportFrom):
            yield from (f"import {node.module}.{one.name}" for one in node.names)
            yield from (one.name for one in node.names)
        elif isinstance(node, ast.Import):
            yield from (f"import {one.name}" for one in node.names)
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.mark.parametrize("kind", ["server", "client", "model"])
def test_each_kind_is_opened_in_its_place(kind: str) -> None:
    places = dict(TABLE[kind])
    names = re.compile(places.pop("names").strip())
    found = {name for name, text in texts().items() if any(map(names.fullmatch, named(text)))}
    assert found == places.keys()
    for spelled in TABLE["spelled"][kind]:
        assert any(map(names.fullmatch, named(spelled))), spelled


def viewer(folder: Path) -> FolderServer:
    return FolderServer(Folder(make_run(folder / "run").folder))


SERVERS: dict[str, tuple[Any, str, int]] = {  # by kind, a path, and its status for damaged bytes
    "view": (viewer, "/api/run", 401),
    "serve": (lambda _: ApiServer(lambda _: HANDLER, list, key="k"), "/v1/chat/completions", 400),
    "serve-env": (lambda _: EnvServer("Counter", CounterEnv, {"train": TASKS}), "/reset", 400),
    "retriever": (lambda _: Retriever(RetrieverConfig(port=0), HANDLER), "/retrieve", 400),
    "programs": (lambda _: Endpoint(), "/v1/messages", 401),
}
HANDLER: Any = SimpleNamespace(handed={}, refused=lambda error: None)


@asynccontextmanager
async def served(kind: str, folder: Path) -> AsyncIterator[int]:
    """Its port."""
    server = SERVERS[kind][0](folder)
    await server.start()
    try:
        yield server.port
    finally:
        await server.close()


@pytest.mark.parametrize("kind", SERVERS)
async def test_a_server_answers_no_page_of_others(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (_, path, damaged), before = SERVERS[kind], sockets_of()
    async with served(kind, tmp_path) as port, aiohttp.ClientSession() as http:
        assert [place for place, _ in sockets_of().keys() - before] == ["127.0.0.1"]

        async def ask(method: str, path: str, headers: Any, data: bytes = b"") -> tuple[int, Any]:
            given = {name: text.format(port=port) for name, text in headers.items()}
            url = f"http://127.0.0.1:{port}{path}"
            async with http.request(method, url, headers=given, data=data) as reply:
                assert reply.headers["Cross-Origin-Resource-Policy"] == "same-origin"
                return reply.status, await reply.json()

        for status, sent in TABLE["browser"].items():
            is_refused = status != "200"
            for headers, method in product(sent, ("GET", "POST", "PUT")[: 3 if is_refused else 1]):
                found, body = await ask(method, path if is_refused else "/health", headers)
                assert (str(found), "error" in body) == (status, is_refused)
        for sent in (b"x", b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nA B: c\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent + b"\r\n\r\n")
            head, _, text = (await reader.read()).partition(b"\r\n\r\n")
            assert (b" 400 " in head, b"nosniff" in head) == (True, True)
            assert json.loads(text)["error"]["message"].startswith("not HTTP: ")
            writer.close()
        assert not caplog.records
        status, body = await ask("POST", path, {"x-api-key": "k"}, b"\xff")
        assert (status, bool(body["error"]["message"])) == (damaged, True)


async def test_what_a_client_never_sends_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "BODY_S", 0.1)
    server = Listener()
    await server.listen({}, {"/x": listener.body_of}, "127.0.0.1", 0)
    length = b"Host: localhost\r\nContent-Length: 999999999\r\nConnection: close\r\n\r\n"
    origins = b"Origin: http://localhost\r\nOrigin: http://evil.example\r\n"
    for sent, reply in (
        (b"GET / HT", b""),
        (b"POST /x HTTP/1.1\r\n" + length, b"HTTP/1.1 413 "),
        (b"GET /health HTTP/1.1\r\n" + origins + length, b"HTTP/1.1 403 "),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        assert (await reader.read())[:13] == reply
        writer.close()
    await server.close()


async def test_beyond_loopback_a_server_needs_a_key() -> None:
    with pytest.raises(ConfigError, match="api_key_env"):
        await open_server(asyncio.Protocol, "0.0.0.0", 0, has_key=False)
    server = Listener("a-key")
    await server.listen({}, {}, "0.0.0.0", 0)
    with pytest.raises(ConfigError, match=f":{server.port}: .* 0 for any free"):
        await open_server(asyncio.Protocol, "127.0.0.1", server.port, has_key=False)
    async with aiohttp.ClientSession(headers={"Host": "retriever.service"}) as http:
        for path, status in (("health", 200), ("x", 401)):
            async with http.get(f"http://127.0.0.1:{server.port}/{path}") as reply:
                assert reply.status == status
    await server.close()


ATTACK = (ROOT / "tests" / "support" / "attack.js").read_text(encoding="utf-8")


@pytest.mark.viewer
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")
async def test_a_page_of_others_in_chromium_gets_nothing(tmp_path: Path) -> None:
    """A page at another address, and one whose name then leads to the server."""
    from playwright.async_api import async_playwright

    async with AsyncExitStack() as stack:
        playwright = await stack.enter_async_context(async_playwright())
        flags = [*FLAGS, "--host-resolver-rules=MAP evil.example 127.0.0.1"]
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        opened = await browser.new_page()
        await opened.route("http://evil.example/", lambda route: route.fulfill(body="evil"))
        for kind, (_, path, _) in SERVERS.items():
            port = await stack.enter_async_context(served(kind, tmp_path))
            await opened.goto("http://evil.example/")
            assert await opened.evaluate(ATTACK, [port, path]) == [], kind
            reply = await opened.goto(f"http://evil.example:{port}{path}")
            assert reply is not None
            assert reply.status == 421
            assert await opened.evaluate(ATTACK, [str(port), path]) == [], kind
        await browser.close()


def test_a_run_listens_where_the_page_on_security_says(tmp_path: Path) -> None:
    """Two ranks and a rollout worker, with an embedded engine; the settings of
    gloo are those of a machine whose name leads to the network."""
    keys = ["learner.num_ranks=2", "cluster.kind=processes", "cluster.workers=1"]
    command = [sys.executable, "-m", "agentenv.launchers", "train", str(make_workspace(tmp_path))]
    command += [*keys, "engine.name=embedded", "train.num_steps=1"]
    device = next(name for name in psutil.net_if_addrs() if name != LOOPBACK_DEVICE)
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "GLOO_SOCKET_IFNAME": device}
    seen = dict[tuple[str, int], str]()
    with subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            seen = sockets_of(psutil.Process(process.pid)) | seen
            time.sleep(0.1)
    assert process.returncode == 0
    table = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = [row for row in table.splitlines() if row.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert {*seen.values()} == {"launchers", "rank_process"}
    assert {*seen.values()} <= named
    assert {address for address, _ in seen} == {"127.0.0.1"}
    assert [*seen.values()].count("rank_process") == 3  # a store, gloo twice


RAY = """
from agentenv.training.workers import ray_driver, ray_placement
from tests.support.sockets import sockets_of
ray_driver.Ray(ray_placement.RaySetup("", "", [], 10.0)).connect()
print("on", *{address for address, _ in sockets_of()})"""


def test_the_ray_of_a_run_listens_on_loopback() -> None:
    pytest.importorskip("ray")
    *_, last = run_python(RAY).stdout.splitlines()
    assert {*last.split()} == {"on", "127.0.0.1", "::ffff:127.0.0.1"}
