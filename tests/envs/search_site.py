"""A web of three pages on one server, and a search in it."""

from __future__ import annotations

from collections import Counter
from typing import Any

from aiohttp import web

from agentenv.envs.search.keys import SearchConfig
from agentenv.envs.search.service import Episode, SearchService
from agentenv.envs.web_search import search_config
from tests.support.begun import closing
from tests.support.pdfs import SAYS, pages

FILLER = "Nothing of interest stands in this sentence. " * 200
MORE = FILLER.replace("Nothing", "Little")  # equal paragraphs count once
SNIPPET = "Lima was founded in 1535 by Francisco Pizarro"
GOOD = "The pages say.\n**Final Information**\n\nFounded in 1535."
ARTICLE = f"<html><body><p>{FILLER}</p><p>{SNIPPET}, it says.</p><p>{MORE}</p></body></html>"


class Web:
    """A search provider, three pages, one of which fails, and a summarizer, all on one server."""

    def __init__(self) -> None:
        self.url = ""
        self.reply: Any = GOOD  # of the summarizer; a number is a status
        self.summarized: list[dict[str, Any]] = []
        self.requests: Counter[str] = Counter()  # by path

    async def __call__(self, request: web.Request) -> web.Response:
        self.requests[request.path] += 1
        if request.path == "/search":
            rows = [
                {"title": "Lima", "url": f"{self.url}/article", "content": SNIPPET}
                | {"publishedDate": "2020-01-18T00:00:00", "site_name": "Almanac"},
                {"title": "Lima again", "url": f"{self.url}/copy", "content": SNIPPET},
                {"title": "Gone", "url": f"{self.url}/gone", "content": "A page that is gone."},
            ]
            return web.json_response({"results": [] if request.query["q"] == "?" else rows})
        if request.path == "/article":
            return web.Response(text=ARTICLE, content_type="text/html")
        if request.path == "/paper":
            return web.Response(body=pages(SAYS, num_pages=200), content_type="application/pdf")
        if request.path == "/photo":
            return web.Response(body=b"", content_type="image/png")
        if request.path == "/v1/chat/completions":
            self.summarized.append(await request.json())
            if isinstance(self.reply, int):
                return web.Response(status=self.reply)
            usage = {"prompt_tokens": 900, "completion_tokens": 30}
            choices = [{"message": {"content": self.reply}}]
            return web.json_response({"choices": choices, "usage": usage})
        return web.Response(status=404)

    def config(self, **keys: Any) -> SearchConfig:
        pages = {"fetch": {"allow_networks": ["127.0.0.0/8"]}}
        backend = {"name": "web", "provider": "searxng", "url": self.url}
        return search_config({"backend": backend, "pages": pages, **keys})

    def browser(self, **summarizer: Any) -> SearchConfig:
        """As in ARPO's evaluation: the policy reads summaries of the pages."""
        model = {"url": f"{self.url}/v1", "model": "small", "num_retries": 0, "timeout_s": 5.0}
        return self.config(preset="arpo_eval", summarizer=model | summarizer)


async def search(
    config: SearchConfig, query: str, episode: Episode | None = None, **keys: Any
) -> Any:
    async with closing(SearchService(config)) as service:
        return await service.search(query, episode or Episode(), **keys)
