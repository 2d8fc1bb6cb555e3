"""All that asks others over HTTP: bounds, names, proxies, redirects, retries."""

from __future__ import annotations

import asyncio
import email.utils
import re
import threading
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from yarl import URL

from agentenv.base.errors import AgentEnvError, ConfigError, DataError, ToolError
from agentenv.base.offload import in_thread
from agentenv.base.retries import Backoff
from agentenv.base.secrets import SECRETS
from agentenv.contract.env import isolated_shared
from agentenv.contract.http import MAX_RETRY_AFTER_S, HttpClient, JsonSocket, retry_after_s
from agentenv.contract.http_client import ServerClient, fetch, fetched
from agentenv.contract.http_session import MAX_REPLY_BYTES, HttpSession
from agentenv.contract.server_config import ChatModelConfig
from agentenv.envs.bridges.mcp_tools import Connection
from agentenv.envs.search.keys import FetchConfig, TrafficConfig
from agentenv.envs.search.pages import PageFetcher
from agentenv.envs.search.upstream import HttpRequest, Upstream
from agentenv.text.chat_model import ChatModel, read_chat
from tests.envs.search_server import serving
from tests.support.begun import closing
from tests.support.bombs import BOMBS, MESSAGES, bombing, socket_bomb

MAX_BYTES, SHORT_S, NUM_RETRIES = 64 << 20, 1.0, 0
Ask = Callable[[str], Awaitable[Any]]


async def engine(url: str) -> Any:
    async with closing(ServerClient(url, call_s=SHORT_S)) as client:
        return await client.call_json("POST", "/x", {})


async def stream(url: str) -> Any:
    async with (
        closing(ServerClient(url, wait_s=SHORT_S)) as client,
        asyncio.timeout(30),
        client.stream("/x", {}) as events,
    ):
        return [event async for event in events]


async def judge(url: str) -> Any:
    config = ChatModelConfig(url=url, model="m", timeout_s=SHORT_S, num_retries=NUM_RETRIES)
    async with closing(ChatModel(config, "grader.judge")) as model:
        return await model.complete("", "right?")


async def search(url: str) -> Any:
    traffic = TrafficConfig(timeout_s=SHORT_S, num_retries=NUM_RETRIES)
    async with closing(Upstream("service", traffic)) as upstream:
        return await upstream.send(HttpRequest("GET", url))


async def page(url: str) -> Any:
    config = FetchConfig(timeout_s=SHORT_S, allow_networks=("127.0.0.0/8",))
    async with closing(PageFetcher(config)) as fetcher:
        return await fetcher.fetch(url)


async def api(url: str) -> Any:
    async with isolated_shared():
        return await HttpClient(url, timeout_s=SHORT_S).get("/x")


async def data(url: str) -> Any:
    return await fetched(f"{url}/x", {})


async def mcp(url: str) -> Any:
    async with closing(Connection(None, url, {})) as connection:
        return await connection.start()


CLIENTS: tuple[Ask, ...] = (engine, stream, judge, search, page, api, data, mcp)


def memory(name: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


async def peak_of(asking: Awaitable[Any]) -> tuple[int, Any]:
    """The memory that it takes at most, bytes, and its result or error."""
    forget_peak()
    before = memory("VmRSS")
    (found,) = await asyncio.gather(asking, return_exceptions=True)
    return memory("VmHWM") - before, found


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("ask", CLIENTS, ids=lambda ask: ask.__name__)
async def test_no_reply_takes_much_memory(
    ask: Ask, bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.contract.http_client.FETCH_S", SHORT_S)
    monkeypatch.setattr("agentenv.envs.search.pages.NUM_RETRIES", 0)
    monkeypatch.setattr("agentenv.envs.bridges.mcp_tools.START_TIMEOUT_S", SHORT_S)
    if ask is stream and bomb == "drips":
        return  # bytes arrive in time: the deadline of the turn ends it
    async with bombing(BOMBS[bomb]) as url:
        peak, found = await peak_of(ask(url))
    assert peak < MAX_BYTES
    is_whole = ask is page or bomb in ("dense", "values")  # pages are cut
    assert isinstance(found, AgentEnvError) or is_whole, found


@pytest.mark.parametrize("kind", MESSAGES)
async def test_no_message_takes_much_memory(kind: str) -> None:
    async def ask(url: str) -> Any:
        async with closing(HttpSession()) as http, closing(JsonSocket(url, SHORT_S)) as end:
            await end.connect(http)
            return await end.request({}, dict)

    async with bombing(socket_bomb(kind)) as url:
        peak, found = await peak_of(ask(url))
    assert peak < MAX_BYTES
    assert isinstance(found, AgentEnvError), found
    assert re.search(rf"{MAX_REPLY_BYTES}\b.*; let", str(found))


async def one(request: web.Request) -> web.Response:
    return web.json_response([1])


async def test_names_are_found_while_all_threads_hang() -> None:
    """Also those of the event loop's own executor."""
    ends, loop = threading.Event(), asyncio.get_running_loop()
    hanging = [asyncio.create_task(in_thread(ends.wait)) for _ in range(64)]
    await asyncio.sleep(0.1)
    assert await loop.getaddrinfo("localhost", 80)
    hanging += [loop.run_in_executor(None, ends.wait) for _ in range(64)]  # type: ignore[misc]
    try:
        async with serving(one) as url:
            port = url.rpartition(":")[2]
            for ask in (engine, api, data):
                assert await ask(f"http://localhost:{port}") == [1]
    finally:
        ends.set()
        await asyncio.gather(*hanging)


class Proxy:
    """A proxy that answers by itself, and what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    async def __call__(self, request: web.Request) -> web.Response:
        user = request.headers.get("Proxy-Authorization", "")
        self.asked.append((request.raw_path, user))
        return web.json_response({"data": [{"id": "by proxy"}]})


async def test_proxies_are_those_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Proxy()
    async with serving(proxy) as url:
        monkeypatch.setenv("http_proxy", url.replace("//", "//me:pass@"))
        monkeypatch.setenv("no_proxy", "inside.test")
        for ask in (judge, search, api, data, mcp):
            proxy.asked.clear()
            await asyncio.gather(ask("http://far.test:1/x"), return_exceptions=True)
            assert proxy.asked, ask
            assert {user for _, user in proxy.asked} == {"Basic bWU6cGFzcw=="}
            assert all(path.startswith("http://far.test:1/") for path, _ in proxy.asked)
        monkeypatch.setenv("no_proxy", "far.test:8")
        sessions = HttpSession(), HttpSession(by_proxy=False)
        found = [one._proxy(URL(f"http://far.test:{n}")) for one in sessions for n in (8, 9)]
        assert [*map(bool, found)] == [False, True, False, False]
        monkeypatch.setenv("no_proxy", "inside.test")
        proxy.asked.clear()
        for ask in (engine, stream, page):
            await asyncio.gather(ask("http://far.test/"), return_exceptions=True)
        for host in ("inside.test", "localhost:1", "127.0.0.1:1", "[::1]:1"):
            await asyncio.gather(data(f"http://{host}/"), return_exceptions=True)
        assert not proxy.asked
    assert "opened directly" in caplog.text
    for wrong in ("socks5://h:1", "http-proxy:3128", "http://", "http://me:pass@h:port"):
        monkeypatch.setenv("https_proxy", wrong)
        with pytest.raises(ConfigError, match="https_proxy: expected http://HOST:PORT") as raised:
            HttpSession()
        assert "pass" not in str(raised.value)


async def test_own_headers_stay_at_their_host() -> None:
    seen: list[Any] = []

    async def other(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response([2])

    async def first(request: web.Request) -> web.Response:
        if request.path == "/here":
            raise web.HTTPFound("/there")
        if request.path == "/there":
            return web.json_response([1])
        if request.path == "/uri":  # the header of an older HTTP, which aiohttp follows
            return web.Response(status=302, headers={"URI": f"{elsewhere}/x"})
        if request.path == "/loop":
            raise web.HTTPFound("/loop")
        raise web.HTTPFound(f"{elsewhere}/x")

    async with serving(other) as elsewhere, serving(first) as url, isolated_shared():
        client = HttpClient(url, headers={"X-Api-Key": "mine"})
        assert await client.get("/here") == [1]
        for path in ("/away", "/uri"):
            with pytest.raises(ToolError, match="would get our headers"):
                await client.get(path)
        with pytest.raises(ToolError, match="more than 5"):
            await client.get("/loop")
        with pytest.raises(DataError, match="302"):
            await in_thread(fetch, f"{url}/away", {"X-Api-Key": "mine"})
        async with closing(HttpSession(headers={"X-Api-Key": "mine"})) as http:
            with pytest.raises(AgentEnvError):
                await JsonSocket(f"{url}/away", SHORT_S).connect(http)
    assert not seen


WAITS = {"2": 2.0, "0.5": 0.5, "9" * 400: MAX_RETRY_AFTER_S, "Sun, 06 Nov 1994 08:49:40 GMT": 3.0}
WAITS |= {"soon": 0.0}
DATE = "Sun, 06 Nov 1994 08:49:37 GMT"


@pytest.mark.parametrize("wanted", WAITS)
@pytest.mark.parametrize("ask", [judge, search, page], ids=lambda ask: ask.__name__)
async def test_one_policy_of_retries(
    ask: Ask, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """429 is retried, not before the server's time."""
    pauses: list[float] = []

    def seconds(self: Backoff, attempt: int, key: str, at_least_s: float) -> float:
        pauses.append(at_least_s)
        return 0.0

    async def full(request: web.Request) -> web.Response:
        headers = {"Retry-After": wanted, "Date": DATE}
        return web.Response(status=429, headers=headers)

    monkeypatch.setattr(Backoff, "seconds", seconds)
    monkeypatch.setattr("agentenv.envs.search.upstream.MAX_PAUSE_S", 0.0)  # of all callers
    monkeypatch.setattr("tests.test_clients.NUM_RETRIES", 2)
    async with serving(full) as url:
        with pytest.raises(AgentEnvError, match="429"):
            await ask(url)
    assert pauses == [WAITS[wanted]] * 2


def test_a_date_counts_from_now_without_one_of_the_server() -> None:
    later = email.utils.format_datetime(datetime.now(UTC) + timedelta(seconds=100))
    assert 90 <= (retry_after_s({"Retry-After": later}) or 0.0) <= 100


SECRET = "sk-secret-0123456789"


async def test_no_part_of_a_secret_remains_where_a_reply_is_cut() -> None:
    SECRETS.learn({"api_key": SECRET})

    async def repeat(request: web.Request) -> web.Response:
        text = "x" * (int(request.headers["X-Pad"]) - len(SECRET) // 2) + SECRET
        status = int(request.headers["X-Status"])
        return web.json_response({"x": text}, status=status)

    for pad, status in product((190, 195, 199, 200, 490, 495, 500, 505), (200, 400)):
        headers = {"X-Pad": str(pad), "X-Status": str(status)}
        async with serving(repeat) as url, closing(ServerClient(url, headers=headers)) as client:
            with pytest.raises(AgentEnvError) as raised:
                read_chat(await client.call("GET", "/x"))
            assert SECRET[:6] not in str(raised.value)
