"""Published MCP servers, from npm and PyPI, as tools of an environment; see .ci/mcp-servers."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.types import Task
from agentenv.contract.env import close_shared
from agentenv.contract.tool_env import ToolEnv
from agentenv.envs.bridges.mcp_tools import MCPTools
from tests.envs.bridges.test_mcp_tools import Anything, call, listening
from tests.support.ports import free_port
from tests.support.warehouse import ROOT

pytest.importorskip("mcp")

FOLDER = ROOT / ".venv-mcp"
FROM_NPM, FROM_PYPI = FOLDER / "node_modules" / ".bin", FOLDER / "bin"
EVERYTHING = FROM_NPM / "mcp-server-everything"
pytestmark = [
    pytest.mark.usefixtures("services"),
    pytest.mark.mcp_servers,
    pytest.mark.skipif(
        not (FOLDER / ".complete").is_file(), reason="no published servers: sh .ci/mcp-servers"
    ),
]


class Episode:
    """An episode whose only tools are those of one server."""

    def __init__(self, source: MCPTools) -> None:
        self.env = ToolEnv(Task("t", "test", "?", ("5",)), [source], Anything())

    async def __aenter__(self) -> Episode:
        _, info = await self.env.reset()
        self.tools = [schema["name"] for schema in info["tools"]]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.env.close()

    async def result(self, tool: str, **arguments: Any) -> str:
        """The text of a call that works."""
        text, is_ok = await self.call(tool, **arguments)
        assert is_ok, text
        return text

    async def error(self, tool: str, **arguments: Any) -> str:
        """The text of a call that the server answers with an error."""
        text, is_ok = await self.call(tool, **arguments)
        assert not is_ok, text
        return text

    async def call(self, tool: str, **arguments: Any) -> tuple[str, bool]:
        messages, *_, info = await self.env.step(call(tool, **arguments))
        return messages[0].content, info["tool_calls"][0]["ok"]


async def check_everything(episode: Episode) -> None:
    """One call of each kind of content that the server has."""
    assert {"echo", "get-sum", "get-tiny-image", "get-resource-links"} <= {*episode.tools}
    assert await episode.result("echo", message="hé") == "Echo: hé"
    assert "12" in await episode.result("get-sum", a=5, b=7)
    assert "expected string" in await episode.error("echo")
    shown = await episode.result("get-resource-reference", resourceType="Text", resourceId=3)
    assert "Resource 3: This" in shown
    shown = await episode.result("get-resource-reference", resourceType="Blob", resourceId=3)
    line = shown.splitlines()[1]
    assert line.startswith("[resource, text/plain, ")
    assert line.endswith(" bytes, demo://resource/dynamic/blob/3]")
    shown = await episode.result("get-resource-links", count=2)
    assert "Resource 2, demo://resource/dynamic/text/2" in shown
    assert "[image, image/png, " in await episode.result("get-tiny-image")
    shown = await episode.result("get-structured-content", location="Chicago")
    assert json.loads(shown).keys() == {"temperature", "conditions", "humidity"}  # shown once


async def test_the_everything_server_works_over_stdio() -> None:
    async with Episode(MCPTools([str(EVERYTHING)])) as episode:
        await check_everything(episode)


async def test_the_everything_server_works_over_http() -> None:
    port = free_port()
    async with listening(str(EVERYTHING), "streamableHttp", port=port, PORT=str(port)) as address:
        async with Episode(MCPTools(url=f"{address}/mcp")) as episode:
            await check_everything(episode)
        await close_shared()


async def test_the_filesystem_server_works(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first\nsecond\n")
    (tmp_path / "b.png").write_bytes(b"\x89PNG" + b"\0" * 96)
    command = [str(FROM_NPM / "mcp-server-filesystem"), str(tmp_path)]
    async with Episode(MCPTools(command)) as episode:
        assert len(episode.tools) > 10
        assert await episode.result("read_text_file", path=f"{tmp_path}/a.txt") == "first\nsecond\n"
        shown = await episode.result("read_media_file", path=f"{tmp_path}/b.png")
        assert shown == "[image, image/png, 100 bytes]"  # and not its base64, of either content
        assert "[FILE] a.txt" in await episode.result("list_directory", path=str(tmp_path))
        await episode.result("write_file", path=f"{tmp_path}/c.txt", content="<b>é</b>")
        assert (tmp_path / "c.txt").read_text() == "<b>é</b>"
        assert "ENOENT" in await episode.error("read_text_file", path=f"{tmp_path}/none")
        assert "Access denied" in await episode.error("read_text_file", path="/etc/passwd")


async def test_the_memory_server_works(tmp_path: Path) -> None:
    variables = {"MEMORY_FILE_PATH": str(tmp_path / "graph.jsonl")}
    source = MCPTools([str(FROM_NPM / "mcp-server-memory")], env=variables)
    async with Episode(source) as episode:
        lima = {"name": "Lima", "entityType": "city", "observations": ["capital of Peru"]}
        await episode.result("create_entities", entities=[lima])
        shown = json.loads(await episode.result("search_nodes", query="Peru"))  # shown once
        assert shown["entities"] == [lima]
        assert "expected array" in await episode.error("create_entities", entities="Lima")


async def test_the_git_server_works(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    (tmp_path / "a.txt").write_text("one\n")
    git("add", "a.txt")
    git("commit", "-m", "The first commit")
    (tmp_path / "a.txt").write_text("two\n")
    command = [str(FROM_PYPI / "mcp-server-git"), "--repository", str(tmp_path)]
    async with Episode(MCPTools(command)) as episode:
        assert "The first commit" in await episode.result("git_log", repo_path=str(tmp_path))
        shown = await episode.result("git_diff_unstaged", repo_path=str(tmp_path))
        assert "-one" in shown
        assert "+two" in shown
        await episode.error("git_log", repo_path=str(tmp_path.parent))


async def test_the_time_server_works() -> None:
    command = [str(FROM_PYPI / "mcp-server-time"), "--local-timezone", "UTC"]
    async with Episode(MCPTools(command, only=["convert_time"])) as episode:
        assert episode.tools == ["convert_time"]
        shown = await episode.result(
            "convert_time", source_timezone="UTC", time="12:30", target_timezone="Asia/Tokyo"
        )
        assert json.loads(shown)["target"]["datetime"].endswith("21:30:00+09:00")
        shown = await episode.error(
            "convert_time", source_timezone="UTC", time="25:99", target_timezone="Asia/Tokyo"
        )
        assert "time" in shown
