"""The contract with OpenEnv's package itself: its servers under our client, its clients and its
validator on our server. In .venv-openenv (sh .ci/openenv), since its mcp is older."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from agentenv.base.errors import DataError
from agentenv.base.types import Message, ToolCall
from agentenv.contract.env import isolated_shared
from agentenv.contract.http_client import fetch
from agentenv.data.data_files import generated_rows
from agentenv.envs.bridges.openenv import OpenEnv
from tests.envs.bridges.test_openenv import TASKS, CounterEnv, add, served, task
from tests.support.sources import ROOT

pytestmark = pytest.mark.openenv
PYTHON = ROOT / ".venv-openenv" / "bin" / "python"


@pytest.fixture(autouse=True)
async def _shared() -> AsyncIterator[None]:
    assert (PYTHON.parents[1] / ".complete").is_file(), "make it first: sh .ci/openenv"
    async with isolated_shared():
        yield


@asynccontextmanager
async def theirs(name: str) -> AsyncIterator[str]:
    """A server of the OpenEnv package."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        PYTHON, ROOT / "tests/support/openenv_servers.py", str(port), name
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(200):
            while process.returncode is None:
                with suppress(DataError):
                    await asyncio.to_thread(fetch, f"{url}/health", {})
                    break
                await asyncio.sleep(0.2)
        assert process.returncode is None
        yield url
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def call(name: str, **arguments: Any) -> Message:
    return Message("assistant", "<think>.</think>", (ToolCall(name, arguments),))


async def test_the_clients_and_the_validator_of_openenv_accept_the_server() -> None:
    async with served() as (_, url):
        process = await asyncio.create_subprocess_exec(
            PYTHON, ROOT / "tests/support/openenv_client.py", url, stdout=asyncio.subprocess.PIPE
        )
        seen = json.loads((await process.communicate())[0])
    assert seen["validation"]["passed"], seen["validation"]
    assert seen["validation"]["summary"]["failed_criteria"] == []
    assert [one["content"] for one in seen["prompt"]] == ["You count.", "Count to 3."]
    here = CounterEnv(TASKS[0])
    await here.reset(seed=3)
    (result,), *_ = await here.step(add(3))
    assert (seen["turn"][0]["content"], seen["steps"]) == (result.content, 1)
    assert seen["end"] == [1.0, True]
    assert seen["tools"] == seen["tools_of_production"] == ["add"]
    assert seen["called"] == str(int(result.content) + 1)


async def test_mcp_tools_of_an_openenv_server_are_tools_of_the_environment() -> None:
    async with theirs("echo") as url:
        env = OpenEnv(task(seed=1), url)
        prompt, info = await env.reset(seed=1)
        assert prompt[-1].content == "?\n\nready"
        assert [tool["name"] for tool in info["tools"]] == ["echo", "fail"]
        assert info["tools"][0]["parameters"]["required"] == ["message"]
        assert (await env.step(call("echo", message="hi")))[0][0].content == "hi"
        messages, *_, info = await env.step(call("fail", why="no reason"))
        assert "no reason" in messages[0].content
        assert info["tool_calls"][0]["ok"] is False
        messages, *_ = await env.step(call("echo", text=3))
        assert "message" in messages[0].content
        *_, ended, cut, info = await env.step(Message("assistant", "done"))
        assert (ended, cut, info["success"]) == (True, False, False)
        await env.close()


@pytest.mark.parametrize(("name", "mode"), [("guessing", "replay"), ("chance", "none")])
async def test_a_typed_action_is_a_tool_and_seeded_environments_fork(name: str, mode: str) -> None:
    async with theirs(name) as url:
        for _ in range(4):
            env = OpenEnv(task(seed=7), url)
            _, info = await env.reset(seed=1)
            assert [tool["name"] for tool in info["tools"]] == ["step"]
            for number in range(1, 101):
                *_, reward, ended, _, info = await env.step(call("step", number=number))
                if ended:
                    break
            assert (reward, info["success"]) == (1.0, True)
            await env.close()
        env = OpenEnv(task(seed=7), url)
        await env.reset(seed=1)
        refused = await env.step(call("step", number="x"))
        assert "number" in refused[0][0].content
        assert env.fork_mode == mode
        if mode == "replay":
            child = await env.fork()
            both = [await one.step(call("step", number=50)) for one in (env, child)]
            assert both[0][:4] == both[1][:4]
            await child.close()
        await env.close()


async def test_tasks_of_an_openenv_server_are_rows() -> None:
    async with theirs("asking") as url:
        path: Any = f"openenv:{url}"
        rows = await asyncio.to_thread(lambda: [*generated_rows(path, {}, held_out=False)])
        assert [one.row["question"] for one in rows] == ["train 0?", "train 1?", "train 2?"]
        env = OpenEnv(task(**rows[2].row["openenv"]), url)
        assert (await env.reset(seed=1))[0][-1].content == "?\n\ntrain 2"
        await env.close()
    async with theirs("guessing") as url:
        path = f"openenv:{url}"
        made = generated_rows(path, {"size": 2, "seed": 5}, held_out=False)
        rows = await asyncio.to_thread(list, made)
        assert [one.row["openenv"] for one in rows] == [{"seed": 5}, {"seed": 6}]
