"""Tools of a real MCP server, over both transports, as tools of an environment."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

import psutil
import pytest

from agentenv.env import close_shared
from agentenv.errors import ConfigError, EnvError
from agentenv.tool_env import Grade, ToolEnv
from agentenv.tools import ToolConfig, ToolLimits, load_tools
from agentenv.types import Message, Task, ToolCall
from envs.mcp_tools import MCPTools
from tests.support.small_server import until
from tests.support.warehouse import ROOT

pytest.importorskip("mcp")

SERVER = Path(__file__).resolve().parents[1] / "support" / "mcp_server.py"
COMMAND = [sys.executable, str(SERVER), "stdio"]
TASK = Task("t", "test", "2 + 3?", ("5",))


class Anything:
    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        return Grade(float(sum(calls.values())), True)


@pytest.fixture(autouse=True)
async def _shared() -> AsyncIterator[None]:
    yield
    await close_shared()


def call(tool: str, **arguments: object) -> Message:
    return Message("assistant", "", (ToolCall(tool, arguments),))


@pytest.mark.slow
async def test_an_episode_with_a_server_of_its_own() -> None:
    source = MCPTools(COMMAND, env={"GREETING": "hello"})
    env = ToolEnv(TASK, [source], Anything())
    _, info = await env.reset()
    assert [schema["name"] for schema in info["tools"]] == ["add", "fail", "environment", "die"]
    assert info["tools"][0]["description"] == "The sum of two numbers."
    assert list(info["tools"][0]["parameters"]["properties"]) == ["a", "b"]
    assert env.fork_mode == "none"

    async def shown(action: Message) -> str:
        return (await env.step(action))[0][0].content

    assert await shown(call("add", a=2, b=3)) == "5"
    assert await shown(call("environment", name="GREETING")) == "hello"
    assert "fail" in await shown(call("fail"))
    assert "b" in await shown(call("add", a=2))
    many = await asyncio.gather(*(shown(call("add", a=n, b=1)) for n in range(20)))
    assert many == [str(n + 1) for n in range(20)]
    *_, info = await env.step(Message("assistant", "5"))
    assert info["success"]
    await env.close()


@pytest.mark.slow
async def test_a_server_that_died_is_started_again() -> None:
    env = ToolEnv(TASK, [MCPTools(COMMAND)], Anything(), num_retries=0)
    await env.reset()
    with pytest.raises(EnvError, match="MCP server"):
        await env.step(call("die"))
    assert (await env.step(call("add", a=1, b=1)))[0][0].content == "2"
    await env.close()


@pytest.mark.slow
async def test_streamable_http_and_a_choice_of_tools() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, str(SERVER), "http", str(port)]
    process = subprocess.Popen(  # noqa: ASYNC220
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        await _listening(port)
        entry = ToolConfig(
            name="envs.mcp_tools:MCPTools",
            kwargs={"url": f"http://127.0.0.1:{port}/mcp", "only": ["add"], "fork_mode": "pure"},
            max_calls=1,
        )
        env = ToolEnv(TASK, [], Anything())
        env.configure(tools=load_tools([entry]))
        _, info = await env.reset()
        assert [schema["name"] for schema in info["tools"]] == ["add"]
        assert env.fork_mode == "pure"
        assert (await env.step(call("add", a=2, b=3)))[0][0].content == "5"
        assert "all 1 calls" in (await env.step(call("add", a=2, b=3)))[0][0].content
        await env.close()
        await close_shared()
    finally:
        process.kill()
        process.wait()


async def _listening(port: int) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                await writer.wait_closed()
                return


@pytest.mark.parametrize(
    "command", [["no-such-program-xyz"], [sys.executable, "-c", "raise SystemExit('bad setup')"]]
)
async def test_a_server_that_does_not_start_is_refused_with_what_it_said(
    command: list[str],
) -> None:
    env = ToolEnv(TASK, [MCPTools(command)], Anything())
    with pytest.raises(ConfigError, match="cannot be used") as caught:
        await env.reset()
    assert ("bad setup" in str(caught.value)) == (len(command) > 1)


STUBBORN = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork():
    open(sys.argv[1], "w").write(str(os.getpid()))
time.sleep(600)
"""
CONTROLLER = """
import asyncio, sys
from envs.mcp_tools import MCPTools
asyncio.run(MCPTools([sys.executable, "-c", sys.argv[1], sys.argv[2]]).load())
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_a_controller_that_is_killed(
    tmp_path: Path, how: signal.Signals
) -> None:
    """Also one that heeds neither the end of its input nor SIGTERM, and what it has started."""
    told = tmp_path / "pid"
    command = [sys.executable, "-c", CONTROLLER, STUBBORN, str(told)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as controller:
        until(lambda: told.is_file() and told.read_text() != "")
        server = psutil.Process(int(told.read_text()))
        (child,) = server.children()
        controller.send_signal(how)
        until(lambda: not server.is_running() and not child.is_running())


@pytest.mark.slow
async def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="either command = "):
        MCPTools()
    with pytest.raises(ConfigError, match="either command = "):
        MCPTools("python server.py")
    with pytest.raises(ConfigError, match=r"has no tools \['multiply'\]"):
        await MCPTools(COMMAND, only=["multiply"]).load()
    assert load_tools([], str) == []
    assert ToolLimits().required
