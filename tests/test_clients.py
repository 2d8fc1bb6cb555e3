"""All that asks others over HTTP: bounds, names, proxies, redirects, retries."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentenv.base.errors import AgentEnvError, ConfigError, InfraError, ToolError
from agentenv.contract.http import HttpClient, JsonSocket, fetch, fetched
from agentenv.contract.http_client import ServerClient
from agentenv.contract.http_session import HttpSession
from agentenv.contract.server_config import ChatModelConfig
from agentenv.envs.bridges.mcp_tools import Connection
from agentenv.envs.search.keys import FetchConfig, TrafficConfig
from agentenv.envs.search.pages import PageFetcher
from agentenv.envs.search.upstream import HttpRequest, Upstream
from agentenv.text.chat_model import ChatModel
from tests.support.bombs import BOMBS, MESSAGES, bombing, socket_bomb

MAX_BYTES, SHORT_S = 64 << 20, 1.0
Ask = Callable[[str], Awaitable[Any]]


async def engine(url: str) -> Any:
    client = ServerClient(url, call_s=SHORT_S)
    try:
        return await client.call_json("POST", "/x", {})
    finally:
        await client.close()


async def stream(url: str) -> Any:
    client = ServerClient(url, wait_s=SHORT_S)
    try:
        async with asyncio.timeout(30), client.stream("/x", {}) as events:
            return [event async for event in events]
    finally:
        await client.close()


async def judge(url: str) -> Any:
    config = ChatModelConfig(url=url, model="m", timeout_s=SHORT_S, num_retries=0)
    model = ChatModel(config, "grader.judge")
    try:
        return await model.complete("", "right?")
    finally:
        await model.close()


async def search(url: str) -> Any:
    upstream = Upstream("service", TrafficConfig(timeout_s=SHORT_S, num_retries=0))
    try:
        return await upstream.send(HttpRequest("GET", url))
    finally:
        await upstream.close()


async def page(url: str) -> Any:
    fetcher = PageFetcher(FetchConfig(timeout_s=SHORT_S, allow_networks=["127.0.0.0/8"]))
    try:
        return await fetcher.fetch(url)
    finally:
        await fetcher.close()


async def api(url: str) -> Any:
    return await HttpClient(url, timeout_s=SHORT_S).get("/x")


async def data(url: str) -> Any:
    return await fetched(f"{url}/x", {})


async def mcp(url: str) -> Any:
    connection = Connection(None, url, {})
    try:
        return await connection.start()
    finally:
        await connection.close()


CLIENTS: tuple[Ask, ...] = (engine, stream, judge, search, page, api, data, mcp)


def memory(name: str) -> int:
    """VmRSS or VmHWM of this process, bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) * 1024  # type: ignore[index]


async def peak_of(asking: Awaitable[Any]) -> tuple[int, Any]:
    """The memory that it takes at most, bytes, and its result or error."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = memory("VmRSS")
    (found,) = await asyncio.gather(asking, return_exceptions=True)
    return memory("VmHWM") - before, found


@pytest.mark.parametrize("bomb", BOMBS)
@pytest.mark.parametrize("ask", CLIENTS, ids=lambda ask: ask.__name__)
async def test_no_reply_takes_much_memory(
    ask: Ask, bomb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentenv.contract.http.FETCH_S", SHORT_S / 10)
    monkeypatch.setattr("agentenv.envs.search.pages.NUM_RETRIES", 0)
    monkeypatch.setattr("agentenv.envs.bridges.mcp_tools.START_TIMEOUT_S", SHORT_S)
    if ask is stream and bomb == "drips":
        return  # bytes arrive in time: the deadline of the turn ends it
    async with bombing(BOMBS[bomb]) as url:
        peak, found = await peak_of(ask(url))
    assert peak < MAX_BYTES
    is_whole = bomb == "dense" or (ask is page and "e" in bomb)  # pages are cut
    assert isinstance(found, AgentEnvError) or is_whole, found
