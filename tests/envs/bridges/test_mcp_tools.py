"""Tools of a real MCP server as tools of an environment."""

from __future__ import annotations

import asyncio
import codecs
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentenv.base.errors import ConfigError, EnvError, ToolError
from agentenv.base.types import Message, Task, ToolCall
from agentenv.contract.env import Grade, close_shared
from agentenv.contract.tool_config import ToolConfig, load_tools
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import ToolLimits
from agentenv.envs.bridges.mcp_tools import _BOUNDED, MCPTools, text_of_json
from tests.support.begun import begun
from tests.support.ports import free_port
from tests.support.small_server import until
from tests.support.warehouse import ROOT
from tests.test_clients import MAX_BYTES, forget_peak, memory

pytest.importorskip("mcp")
pytestmark = pytest.mark.usefixtures("services")

SERVER = Path(__file__).resolve().parents[2] / "support" / "mcp_server.py"
COMMAND = [sys.executable, str(SERVER), "stdio"]
TASK = Task("t", "test", "2 + 3?", ("5",))


class Anything:
    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        return Grade(float(sum(calls.values())), True)


def call(tool: str, **arguments: object) -> Message:
    return Message("assistant", "", (ToolCall(tool, arguments),))


@asynccontextmanager
async def listening(*command: str, port: int, **variables: str) -> AsyncIterator[str]:
    """The address of a server once it listens at this port."""
    process = subprocess.Popen(  # noqa: ASYNC220
        command,
        env={**os.environ, **variables},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await asyncio.to_thread(until, lambda: _answers(port))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def serving(form: str = "events") -> AbstractAsyncContextManager[str]:
    """The address of our server over HTTP."""
    port = free_port()
    return listening(sys.executable, str(SERVER), "http", str(port), form, port=port)


async def test_an_episode_calls_the_tools_of_its_own_server() -> None:
    source = MCPTools(COMMAND, env={"GREETING": "hello"})
    env = ToolEnv(TASK, [source], Anything())
    _, info = await env.reset()
    names = ["add", "fail", "environment", "large", "die", "header"]
    assert [schema["name"] for schema in info["tools"]] == names
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


async def test_a_dead_server_is_restarted() -> None:
    async with begun(ToolEnv(TASK, [MCPTools(COMMAND)], Anything(), num_retries=0)) as env:
        with pytest.raises(EnvError, match="MCP server"):
            await env.step(call("die"))
        assert (await env.step(call("add", a=1, b=1)))[0][0].content == "2"


async def test_chosen_tools_are_called_over_streamable_http() -> None:
    async with serving() as address:
        entry = ToolConfig(
            name="agentenv.envs.bridges.mcp_tools:MCPTools",
            kwargs={"url": f"{address}/mcp", "only": ["add"], "fork_mode": "pure"},
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


@pytest.mark.parametrize("form", ["events", "json"])
async def test_a_large_result_is_an_error_of_its_call_only(form: str) -> None:
    async with serving(form) as address:
        source = MCPTools(url=f"{address}/mcp")
        tools = {tool.name: tool for tool in await source.load()}
        owner = source.connection._owner
        with pytest.raises(ToolError, match=r"too large|byte limit"):
            await tools["large"].call({"size": 2_000_000}, None)
        assert (await tools["add"].call({"a": 1, "b": 2}, None)).text == "3"
        assert source.connection._owner is owner
        await close_shared()


@pytest.mark.parametrize(
    "reply",
    [
        b'{"jsonrpc": "2.0", "id": 424242, "result": {"content": [%s]}}',
        b'{"result": {"content": [%s]}, "jsonrpc": "2.0", "id": 424242}',
        b'{"id":424242,"result":{"content":[%s],"x":"\xc3\xa9"},"jsonrpc":"2.0"}',
    ],
)
@pytest.mark.parametrize("part", [b"{}," * 200_000 + b"{}", b'"' + b"x" * 2_000_000 + b'"'])
async def test_a_large_line_is_an_error_of_its_call_only(reply: bytes, part: bytes) -> None:
    source = MCPTools([sys.executable, str(SERVER.with_name("mcp_hostile.py"))])
    (say,) = await source.load()
    owner = source.connection._owner
    with pytest.raises(ToolError, match="too large"):
        await say.call({"said": (reply % part).hex()}, None)
    assert (await say.call({"said": (reply % b"").hex()}, None)).text == ""
    assert source.connection._owner is owner


async def test_an_endless_line_takes_little_memory() -> None:
    lines = codecs.getincrementaldecoder(_BOUNDED)()
    forget_peak()
    before = memory("VmRSS")
    for _ in range(3000):
        assert not lines.decode(b"{x" * 32_768)
    assert lines.decode(b"\n[1]\n[").splitlines() == ['""', "[1]"]
    assert memory("VmHWM") - before < MAX_BYTES


@pytest.mark.parametrize(
    "command", [["no-such-program-xyz"], [sys.executable, "-c", "raise SystemExit('bad setup')"]]
)
async def test_a_server_that_fails_to_start_is_refused_with_its_output(command: list[str]) -> None:
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
from agentenv.envs.bridges.mcp_tools import MCPTools
asyncio.run(MCPTools([sys.executable, "-c", sys.argv[1], sys.argv[2]]).load())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_ends_with_its_killed_controller(tmp_path: Path, how: signal.Signals) -> None:
    """Also one that ignores the end of its input and SIGTERM, and the processes it started."""
    pid_file = tmp_path / "pid"
    command = [sys.executable, "-c", CONTROLLER, STUBBORN, str(pid_file)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as controller:
        until(lambda: pid_file.is_file() and pid_file.read_text() != "")
        server = psutil.Process(int(pid_file.read_text()))
        (child,) = server.children()
        controller.send_signal(how)
        until(lambda: not server.is_running() and not child.is_running())


async def test_wrong_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="either command = "):
        MCPTools()
    with pytest.raises(ConfigError, match="either command = "):
        MCPTools("python server.py")
    with pytest.raises(ConfigError, match=r"no tools \['multiply'\]"):
        await MCPTools(COMMAND, only=["multiply"]).load()
    assert load_tools([], str) == []
    assert ToolLimits().required


def scripted(folder: Path, **script: object) -> MCPTools:
    """The tools of a server with scripted answers."""
    path = folder / "script.json"
    path.write_text(json.dumps(script))
    return MCPTools([sys.executable, str(SERVER.with_name("mcp_scripted.py")), str(path)])


def listed(names: Sequence[str], **more: object) -> dict[str, object]:
    return {"tools": [{"name": one, "inputSchema": {"type": "object"}} for one in names], **more}


@pytest.mark.parametrize("size", [1, 5, 7, 16, 100])
async def test_all_pages_of_a_list_of_tools_are_read(tmp_path: Path, size: int) -> None:
    names = [f"tool{n}" for n in range(16)]
    pages = {}
    for start in range(0, 16, size):
        following = {"nextCursor": str(start + size)} if start + size < 16 else {}
        pages[str(start or "")] = listed(names[start : start + size], **following)
    source = scripted(tmp_path, pages=pages)
    assert [tool.name for tool in await source.load()] == names
    source.only = ["tool15", "tool3"]
    assert [tool.name for tool in await source.load()] == ["tool3", "tool15"]


@pytest.mark.parametrize(
    ("cursors", "problem"),
    [
        ({"": "a", "a": "a"}, "repeats the cursor 'a'"),
        ({"": "a", "a": "b", "b": "a"}, "repeats the cursor 'a'"),
        (None, "exceeds 1000 pages"),
    ],
)
async def test_an_endless_list_of_tools_is_refused(
    tmp_path: Path, cursors: dict[str, str] | None, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cursors is None:
        chain = [str(n) for n in range(1100)]
        cursors = dict(zip(["", *chain], chain, strict=False))
    pages = {key: listed([f"t{key}"], nextCursor=value) for key, value in cursors.items()}
    with pytest.raises(ConfigError, match=problem):
        await scripted(tmp_path, pages=pages).load()


PNG = "iVBORw0KGgo="  # 8 bytes
LINK = {"type": "resource_link", "uri": "repo://a.md", "name": "a.md", "description": "The readme."}
TEXT = {"type": "text", "text": "downloaded (SHA: 1)"}
README = {"uri": "repo://a.md", "mimeType": "text/plain", "text": "# The readme says 42"}
BLOB = {"uri": "repo://a.png", "mimeType": "image/png", "blob": PNG}
BLOCKS: list[tuple[dict[str, object], str]] = [
    (TEXT, "downloaded (SHA: 1)"),
    ({"type": "resource", "resource": README}, "# The readme says 42"),
    ({"type": "resource", "resource": BLOB}, "[resource, image/png, 8 bytes, repo://a.png]"),
    (LINK, "[resource_link, a.md, repo://a.md, The readme.]"),
    ({"type": "image", "data": PNG, "mimeType": "image/png"}, "[image, image/png, 8 bytes]"),
    ({"type": "audio", "data": PNG, "mimeType": "audio/wav"}, "[audio, audio/wav, 8 bytes]"),
]
FOUND = {"answer": 42, "names": ["é", None, True]}
FOUND_TEXT = '{"answer":42,"names":["é",null,true]}'


async def test_every_kind_of_content_is_read_in_results_and_in_errors(tmp_path: Path) -> None:
    """Alone and beside a text, with structured content and without."""
    results: dict[str, object] = {}
    expected: dict[str, str] = {}
    for number, (block, text) in enumerate(BLOCKS):
        for is_error in (False, True):
            for beside in (False, True):
                for structured in (None, FOUND):
                    name = f"{number} {is_error} {beside} {structured is None}"
                    results[name] = {
                        "content": [TEXT, block] if beside else [block],
                        "isError": is_error,
                        **({"structuredContent": structured} if structured else {}),
                    }
                    lines = [BLOCKS[0][1], text] if beside else [text]
                    expected[name] = "\n".join([*lines, FOUND_TEXT] if structured else lines)
    results["alone"] = {"content": [], "structuredContent": FOUND}
    expected["alone"] = FOUND_TEXT
    source = scripted(tmp_path, pages={"": listed([*results])}, results=results)
    async with begun(ToolEnv(TASK, [source], Anything())) as env:
        for name, text in expected.items():
            messages, *_, info = await env.step(call(name))
            assert messages[0].content == text, name
            assert info["tool_calls"][0]["ok"] != ("True" in name.split()[1:2])


@pytest.mark.parametrize(
    ("texts", "structured"),
    [
        ([json.dumps(dict(reversed(FOUND.items())))], FOUND),
        (["5"], {"result": 5}),
        (["five"], {"result": "five"}),
        (["line 1\nline 2"], {"content": "line 1\nline 2"}),
        (["a", "b"], {"result": ["a", "b"]}),
        (['{"x": 1}', '{"x": 2}'], {"result": [{"x": 1}, {"x": 2}]}),
        (["[1, 2]"], {"items": [1, 2]}),
    ],
)
async def test_structured_content_that_repeats_the_texts_is_left_out(
    tmp_path: Path, texts: list[str], structured: object
) -> None:
    content = [{"type": "text", "text": text} for text in texts]
    results = {"t": {"content": content, "structuredContent": structured}}
    source = scripted(tmp_path, pages={"": listed(["t"])}, results=results)
    (tool,) = await source.load()
    assert (await tool.call({}, None)).text == "\n".join(texts)


async def test_a_result_that_violates_its_schema_is_read(tmp_path: Path) -> None:
    """A server's wrong schema does not keep its results from the policy."""
    page = listed(["t"])
    page["tools"][0]["outputSchema"] = {  # type: ignore[index]
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
    }
    for structured in ({"n": "four"}, None):
        result = {"content": [TEXT], **({"structuredContent": structured} if structured else {})}
        source = scripted(tmp_path, pages={"": page}, results={"t": result})
        (tool,) = await source.load()
        assert (await tool.call({}, None)).text.startswith(TEXT["text"])
        await close_shared()


async def test_headers_are_sent_with_every_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SERVER_TOKEN", "tok-4711-secret")
    caplog.set_level(logging.DEBUG)
    async with serving() as address:
        url = f"{address}/mcp?key=of-the-query-9"
        headers = {"Authorization": "Bearer ${SERVER_TOKEN}", "X-Team": "blue"}
        source = MCPTools(url=url, headers=headers)
        tools = {tool.name: tool for tool in await source.load()}
        shown = await tools["header"].call({"name": "authorization"}, None)
        assert shown.text == "Bearer tok-4711-secret"
        assert (await tools["header"].call({"name": "x-team"}, None)).text == "blue"
        many = await asyncio.gather(*(tools["add"].call({"a": n, "b": 1}, None) for n in range(9)))
        assert [one.text for one in many] == [str(n + 1) for n in range(9)]
        assert "of-the-query-9" not in source.connection.place
        await close_shared()
    assert not any(secret in caplog.text for secret in ("of-the-query-9", "tok-4711-secret"))


@pytest.mark.parametrize("status", [401, 403, 404, 500])
async def test_the_error_of_a_refusing_address_has_its_status_and_no_secrets(status: int) -> None:
    from aiohttp import web
    from aiohttp.test_utils import TestServer

    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=status, text=request.headers["Authorization"])

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(app) as server:
        url = str(server.make_url("/mcp?api_key=in-the-query"))
        source = MCPTools(url=url, headers={"Authorization": "Bearer tok-4711"})
        with pytest.raises(ConfigError) as caught:
            await source.load()
        await close_shared()
    message = str(caught.value)
    assert f"HTTP {status}" in message
    assert "in-the-query" not in message
    assert "tok-4711" not in message
    assert ("takes headers" in message) == (status in (401, 403))


@pytest.mark.parametrize(
    ("kwargs", "problem"),
    [
        ({"command": ["x"], "headers": {"A": "b"}}, "headers require url"),
        ({"url": "http://h", "env": {"A": "b"}}, "env requires command"),
        ({"url": "http://h", "headers": {"A": "${NO_SUCH_NAME}"}}, "NO_SUCH_NAME is not set"),
        ({"command": ["x"], "env": {"A": "${NO_SUCH_NAME}"}}, "NO_SUCH_NAME is not set"),
        ({"url": "http://h", "headers": {"A": "top-secret\nX: y"}}, r"headers\.A: expected one"),
        ({"url": "http://h", "headers": ["A: b"]}, "headers: expected"),
        ({"url": "http://h", "headers": {"A": 5}}, "headers: expected"),
        ({"command": ["x"], "only": "add"}, "only: expected a list of names"),
        ({"url": "ftp://h"}, "url: expected http"),
    ],
)
def test_headers_and_variables_are_checked_when_the_source_is_created(
    kwargs: Any, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        MCPTools(**kwargs)
    assert "top-secret" not in str(caught.value)


def test_binary_fields_are_one_line() -> None:
    image = b64encode(bytes(range(256)) * 4).decode()
    urls = [f"data:image/png;base64,{image}"]
    found = text_of_json({"screen": image, "views": urls, "text": "A" * 2000})
    assert (found.count("1024 bytes"), found.count("image/png")) == (2, 1)
    assert "A" * 2000 in found
