"""Clients of engine servers, without a server."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv.contract.http_client import ServerClient
from agentenv.contract.request import ServerInfo
from agentenv.contract.weights import SharedWeights
from agentenv.engines.remote.probes import VLLMFacts
from agentenv.engines.remote.routing import SESSION_HEADER, routing
from agentenv.engines.vllm import VLLMServer
from tests.support.begun import closing


async def test_a_server_sleeps_only_after_a_cancelled_load_has_resumed_it() -> None:
    """A cancelled load of weights continues in the background and resumes the server, which must
    not happen to a sleeping one."""
    server, paths = VLLMServer("http://nowhere:1", vocab_size=8), []

    async def post(path: str, body: Any = None, timeout_s: Any = None, **params: str) -> None:
        paths.append(path)

    async def call(method: str, path: str, *_: Any, **__: Any) -> bytes:
        await asyncio.sleep(0.01)
        paths.append(path)
        return b""

    async def load() -> None:
        await asyncio.Event().wait()

    server._post = post  # type: ignore[method-assign]
    server._http.call = call  # type: ignore[method-assign]
    loading = asyncio.create_task(server._replace(load, 1))
    await asyncio.sleep(0.05)
    loading.cancel()
    await asyncio.wait({loading})
    await server.sleep()
    steps = ["/pause", "/resume", "/sleep"]
    assert [path for path in paths if path in steps] == steps
    await server.close()


async def test_a_waking_server_allocates_its_cache_last() -> None:
    """After the learner has taken back the memory of the copy that the server has read. A server
    with adapters keeps its weights, which nothing loads again."""
    server, calls = VLLMServer("http://nowhere:1", vocab_size=8), []

    async def post(path: str, body: Any = None, timeout_s: Any = None, **params: str) -> None:
        calls.append(path.strip("/") + "".join(f" {params[k]}" for k in params if k != "mode"))

    async def call(*_: Any, **__: Any) -> bytes:
        return b'{"success": true}'

    async def release() -> None:
        calls.append("release")

    server._post = post  # type: ignore[method-assign]
    server._http.call = call  # type: ignore[method-assign]
    await server.sleep()
    await server.take(SharedWeights([], [], [], [], 0, {}), 0, 3, release)
    expected = [
        "sleep 2", "wake_up weights", "start_weight_update", "update_weights",
        "finish_weight_update", "release", "wake_up kv_cache", "update_weight_version", "resume",
    ]  # fmt: skip
    assert calls == expected
    await server.take(SharedWeights([], [], [], [], 0, {}), 0, 4, release)  # awake
    later = [one for one in calls[9:] if one.split()[0] in ("pause", "wake_up", "release")]
    assert later == ["pause true"]  # and waits for no other server
    assert server.policy_version == 4
    info = ServerInfo("vllm", "0.32.0", "m", 0, frozenset({"adapters"}))
    server._facts = VLLMFacts(info, 8, None, 1, "", "", frozenset())
    await server.sleep()
    assert calls[-1] == "sleep 1"
    await server.close()


async def test_the_pause_of_a_slow_server_is_measured() -> None:
    """Tokens sampled during the pause are of the old weights."""
    server = VLLMServer("http://nowhere:1", vocab_size=8)

    async def post(path: str, body: Any = None, timeout_s: Any = None, **params: str) -> None:
        await asyncio.sleep(0.2 if path == "/pause" else 0.0)

    async def call(*_: Any, **__: Any) -> bytes:
        return b'{"success": true}'

    server._post = post  # type: ignore[method-assign]
    server._http.call = call  # type: ignore[method-assign]
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await server._replace(partial(asyncio.sleep, 0.3), 1)
    assert 0.2 <= server.pause_wait_s <= loop.time() - began_s - 0.3
    await server.close()


SESSIONS = [
    "17", "one: conversation/3", "two\nlines", "two%0Alines", "\r\nX-Other: 1", "問", "\ud800",
    " a ", "", "x" * 9000,
]  # fmt: skip


@pytest.mark.parametrize("session", SESSIONS)
async def test_any_session_fits_in_a_header(session: str) -> None:
    """Unchanged if it is plain; it may be the user's name of a task."""
    seen: list[str | None] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.headers.get(SESSION_HEADER))
        assert "X-Other" not in request.headers
        return web.Response(text="data: [DONE]\n\n")

    app = web.Application()
    app.router.add_post("/", answer)
    async with (
        TestServer(app) as server,
        closing(ServerClient(str(server.make_url("/")))) as client,
        client.stream("/", {}, routing(session, None)) as events,
    ):
        assert [event async for event in events] == []
    (found,) = seen
    assert found == session if session in SESSIONS[:2] else found != ""
    assert (found is None) == (session == "")


def test_distinct_sessions_have_distinct_headers() -> None:
    found = {routing(session, None).get(SESSION_HEADER) for session in [*SESSIONS, "x" * 9001]}
    assert len(found) == len(SESSIONS) + 1
