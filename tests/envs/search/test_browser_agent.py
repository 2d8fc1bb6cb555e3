"""The browser agent: pages are read and summarized for the question by a second model."""

from __future__ import annotations

from typing import Any

import pytest

from agentenv.base.errors import ConfigError, EnvError
from agentenv.base.types import Message, Task, ToolCall
from agentenv.envs.search.keys import SummarizerConfig
from agentenv.envs.search.service import Episode, SearchService
from agentenv.envs.web_search import WebSearchEnv
from agentenv.reference.helpers import count_calls
from tests.envs.search_site import GOOD, Web, search
from tests.support.begun import begun


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
    result = await search(site.browser(), "lima")
    assert result.text.startswith("Page 1: ")
    assert len(result.text) <= SummarizerConfig.max_chars
    assert result.info["browser"] == {"found": False, "num_tokens": 930}


async def test_the_thoughts_of_the_model_are_dropped_and_a_long_reply_is_cut(site: Web) -> None:
    site.reply = f"<think>Lima?</think>{GOOD}{'.' * 9000}"
    result = await search(site.browser(), "lima")
    assert result.text.startswith("Founded in 1535.")
    assert len(result.text) == 6000


async def test_a_failing_model_server_fails_the_trajectory(site: Web) -> None:
    """The trajectory fails and is not counted as wrong."""
    site.reply = 500
    task = Task("t", "web", "When was Lima founded?", ("1535",))
    failing = WebSearchEnv(task, search=site.browser())
    failing.num_retries = 0
    async with begun(failing, seed=1) as env:
        lima = ToolCall("search", {"query": "lima"})
        call = Message("assistant", "<search>lima</search>", (lima,))
        with pytest.raises(EnvError, match=r"search\.summarizer.*500"):
            await env.step(call)
    site.reply = 401
    service = SearchService(site.browser())
    with pytest.raises(ConfigError, match=r"search\.summarizer.*401"):
        await service.search("lima", Episode())
    assert service.stats()["summarizer/num_requests"] == 1
    await service.close()


async def test_the_record_of_a_call_counts_the_use_of_the_browser_agent(site: Web) -> None:
    task = Task("t", "web", "When was Lima founded?", ("1535",))
    async with begun(WebSearchEnv(task, search=site.browser()), seed=1) as env:
        text = "<think>I need its history.</think><search>lima</search>"
        call = Message("assistant", text, (ToolCall("search", {"query": "lima"}),))
        *_, info = await env.step(call)
    counts = {"browser_uses": 1, "browser_ok": 1, "browser_tokens": 930}
    assert count_calls(info["tool_calls"]) == counts
