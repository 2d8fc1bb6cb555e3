"""The browser agent: pages are read and summarized for the question by a second model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from agentenv.env import close_shared
from agentenv.envs.search.keys import SearchConfig, SummarizerConfig
from agentenv.envs.search.service import Episode, SearchService
from agentenv.envs.web_search import WebSearchEnv, search_config
from agentenv.errors import ConfigError, EnvError
from agentenv.reference.helpers import count_calls
from agentenv.types import Message, Task, ToolCall
from tests.envs.search_server import serving

SNIPPET = "Lima was founded in 1535 by Francisco Pizarro"
FILLER = "Nothing of interest stands in this sentence. " * 400
PAGE = f"<html><body><p>{FILLER}</p><p>{SNIPPET}, it says.</p><p>{FILLER}</p></body></html>"
GOOD = "I read the pages.\n**Final Information**\n\nFounded in 1535."


class Web:
    """A search provider, its page, and a model that returns `reply`."""

    def __init__(self) -> None:
        self.url = ""
        self.reply: Any = GOOD
        self.asked: list[str] = []

    async def __call__(self, request: web.Request) -> web.Response:
        if request.path == "/search":
            row = {"title": "Lima", "url": f"{self.url}/page", "content": SNIPPET}
            return web.json_response({"results": [row]})
        if request.path == "/page":
            return web.Response(text=PAGE, content_type="text/html")
        self.asked.append((await request.json())["messages"][0]["content"])
        if isinstance(self.reply, int):
            return web.Response(status=self.reply)
        usage = {"prompt_tokens": 900, "completion_tokens": 30}
        return web.json_response(
            {"choices": [{"message": {"content": self.reply}}], "usage": usage}
        )

    def config(self, **summarizer: Any) -> SearchConfig:
        pages = {"fetch": {"allow_networks": ["127.0.0.0/8"]}}
        backend = {"name": "web", "provider": "searxng", "url": self.url}
        keys = {"url": f"{self.url}/v1", "model": "small", "num_retries": 0, "timeout_s": 5.0}
        return search_config(
            {
                "backend": backend,
                "pages": pages,
                "preset": "arpo_eval",
                "summarizer": keys | summarizer,
            }
        )


@pytest.fixture
async def site() -> AsyncIterator[Web]:
    site = Web()
    async with serving(site) as site.url:
        yield site
        await close_shared()


async def search(config: SearchConfig, *queries: str, episode: Episode | None = None) -> list[Any]:
    service, episode = SearchService(config), episode or Episode()
    try:
        return [await service.search(query, episode) for query in queries]
    finally:
        await service.close()


async def test_the_policy_reads_the_final_information_of_the_window(site: Web) -> None:
    (result,) = await search(site.config(), "lima")
    assert result.text == "Founded in 1535."
    assert result.info["browser"] == {"found": True, "num_tokens": 930}
    (prompt,) = site.asked
    window = prompt.split("Page 1: ")[1].split("\n[/DATA-")[0]
    assert f"{SNIPPET}, it says." in window
    assert len(window) == 3000


@pytest.mark.slow
async def test_a_cached_summary_sends_no_request_and_costs_no_tokens(site: Web) -> None:
    service = SearchService(site.config())
    for num_tokens in (930, 0):
        result = await service.search("lima", Episode())
        assert (result.text, result.info["browser"]["num_tokens"]) == (
            "Founded in 1535.",
            num_tokens,
        )
    await service.close()
    assert len(site.asked) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "reply",
    [
        "It was founded in 1535.",  # cut off, or another form
        "<think>I shall write **Final Information** and then",
        "<think>**Final Information** is the mark</think>No idea.",
        "**Final Information**\n\n",
        "",
        None,
    ],
)
async def test_the_policy_reads_the_pages_when_the_reply_has_no_final_information(
    site: Web, reply: Any
) -> None:
    site.reply = reply
    (result,) = await search(site.config(), "lima")
    assert result.text.startswith("Page 1: ")
    assert len(result.text) == SummarizerConfig.max_chars
    assert result.info["browser"] == {"found": False, "num_tokens": 930}


@pytest.mark.slow
async def test_the_thoughts_of_the_model_are_dropped_and_a_long_reply_is_cut(site: Web) -> None:
    site.reply = f"<think>Lima?</think>{GOOD}{'.' * 9000}"
    (result,) = await search(site.config(), "lima")
    assert result.text.startswith("Founded in 1535.")
    assert len(result.text) == 6000


@pytest.mark.slow
async def test_uses_of_the_browser_agent_in_one_trajectory_can_be_limited(site: Web) -> None:
    episode = Episode()
    first, second = await search(site.config(max_uses=1), "lima", "lima again", episode=episode)
    assert first.text == "Founded in 1535."
    assert second.text.startswith("Page 1: ")
    assert "browser" not in second.info
    assert episode.copy().num_summaries == 1
    assert len(site.asked) == 1


@pytest.mark.slow
async def test_a_failing_model_server_fails_the_trajectory(site: Web) -> None:
    """The trajectory fails and is not counted as wrong."""
    site.reply = 500
    task = Task("t", "web", "When was Lima founded?", ("1535",))
    env = WebSearchEnv(task, search=site.config(), num_retries=0)
    await env.reset(seed=1)
    call = Message("assistant", "<search>lima</search>", (ToolCall("search", {"query": "lima"}),))
    with pytest.raises(EnvError, match=r"search\.summarizer: .* answered 500"):
        await env.step(call)
    await env.close()
    site.reply = 401
    service = SearchService(site.config())
    with pytest.raises(ConfigError, match=r"search\.summarizer: .* answered 401"):
        await service.search("lima", Episode())
    assert service.stats()["summarizer/num_requests"] == 1
    await service.close()


@pytest.mark.slow
async def test_the_record_of_a_call_counts_the_use_of_the_browser_agent(site: Web) -> None:
    task = Task("t", "web", "When was Lima founded?", ("1535",))
    env = WebSearchEnv(task, search=site.config())
    await env.reset(seed=1)
    text = "<think>I need its history.</think><search>lima</search>"
    call = Message("assistant", text, (ToolCall("search", {"query": "lima"}),))
    *_, info = await env.step(call)
    await env.close()
    counts: dict[str, float] = {}
    count_calls(counts, info["tool_calls"])
    assert counts == {"browser_uses": 1, "browser_ok": 1, "browser_tokens": 930}
    assert "When was Lima founded?" in site.asked[0]
    assert "I need its history." in site.asked[0]
