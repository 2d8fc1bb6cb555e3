"""Search as the policy has it: its tools, and the environment around them."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web

import agentenv.contract.env_registry
from agentenv.base.errors import EnvError, ToolError
from agentenv.base.types import Message, Task, ToolCall
from agentenv.contract.env import close_shared
from agentenv.envs.search.service import Episode, OpenPageTool, SearchPagesTool, shared_service
from agentenv.envs.web_search import WebSearchEnv
from tests.envs.search_server import serving
from tests.envs.search_site import SNIPPET, Web
from tests.support.begun import begun


async def test_open_page_gives_the_passages_of_the_query(site: Web) -> None:
    service = shared_service(site.config())
    tool = OpenPageTool(service)
    episode = Episode("When was Lima founded?")
    url = f"{site.url}/article"
    for query in ({"query": "Pizarro founded"}, {}):  # without a query the question serves
        result = await tool.call({"url": url, **query}, episode)
        assert SNIPPET in result.text
        assert len(result.text) <= 6000 < result.info["num_chars"]
    with pytest.raises(ToolError, match="with status 404"):
        await tool.call({"url": f"{site.url}/gone"}, episode)
    with pytest.raises(ToolError, match="corpus:x"):
        await tool.call({"url": "corpus:x"}, episode)


@pytest.mark.parametrize("tool", [SearchPagesTool, OpenPageTool])
async def test_wrong_arguments_are_tool_errors(tool: Any) -> None:
    with pytest.raises(ToolError, match=rf"{tool.name}: "):
        await tool(None).call({"q": 3}, Episode())


def act(name: str, **arguments: Any) -> Message:
    return Message("assistant", f"<{name}>", (ToolCall(name, arguments),))


TASK = Task("t", "agentenv/WebSearch-v0", "How many points did the defense give up?", ("308",))


async def test_an_episode_searches_the_shipped_corpus() -> None:
    env = agentenv.contract.env_registry.make("agentenv/WebSearch-v0", TASK)
    _, info = await env.reset(seed=1)
    assert [tool["name"] for tool in info["tools"]] == ["search", "open_page"]
    found, *_ = await env.step(act("search", query="points the Panthers defense gave up"))
    first = found[0].content.splitlines()[0]
    assert first.startswith("Page 1: [Super Bowl 50](corpus:xquad-")
    url = first.partition("(")[2].partition(")")[0]
    opened, *_ = await env.step(act("open_page", url=url))
    assert "308 points" in opened[0].content
    refused, *_ = await env.step(act("open_page", url="http://169.254.169.254/latest"))
    assert "a public address" in refused[0].content
    answer = Message("assistant", r"<think>.</think><answer>\boxed{308}</answer>")
    _, reward, terminated, _, info = await env.step(answer)
    assert (reward, terminated, info["success"]) == (1.0, True, True)
    await env.close()
    await close_shared()


async def test_the_summarizer_receives_the_text_of_the_policy(site: Web) -> None:
    summarizer = {"url": f"{site.url}/v1", "model": "small"}
    config = site.config(mode="summaries", summarizer=summarizer)
    async with begun(WebSearchEnv(TASK, config), seed=1) as env:
        child = await env.fork()
        await child.step(Message("assistant", "child's", (ToolCall("search", {"query": "c"}),)))
        for query in ("p", "q"):
            call = ToolCall("search", {"query": query})
            await env.step(Message("assistant", f"<search>{query}</search>", (call,)))
        await child.close()
    first, second, third = (sent["messages"][0]["content"] for sent in site.summarized)
    assert TASK.question in first
    assert "Step 1: child's<search>c</search>\n" in first
    assert "Step 1: <search>p</search>\n" in second
    assert "child's" not in second
    steps = "Step 1: <search>p</search>\n\nStep 2: <result>Founded in 1535.</result>\n\nStep 3"
    assert steps in third


async def test_a_failing_provider_fails_the_episode() -> None:
    async def down(request: web.Request) -> web.Response:
        return web.Response(status=503, text="overloaded")

    async with serving(down) as url:
        backend = {"name": "web", "provider": "searxng", "url": url, "traffic": {"num_retries": 1}}
        failing = WebSearchEnv(TASK, {"backend": backend})
        failing.num_retries = 0
        async with begun(failing, seed=1) as env:
            with pytest.raises(EnvError, match=r"'search'.*503"):
                await env.step(act("search", query="x"))
        await close_shared()
