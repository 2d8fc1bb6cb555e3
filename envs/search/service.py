"""Web search: what the tools of all episodes share, and the tools themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from agentenv.env import ForkMode, shared, summed_stats
from agentenv.envs.search.cache import CachedBackend, ResultCache
from agentenv.envs.search.corpus import (
    CORPUS_SCHEME,
    Backend,
    Hit,
    Query,
    joined_contents,
    market_of,
)
from agentenv.envs.search.keys import (
    SearchConfig,
)
from agentenv.envs.search.pages import PageReader, passages, window
from agentenv.envs.search.snapshot import Nobody, Snapshot
from agentenv.envs.search.summary import Summarizer
from agentenv.errors import InfraError, ToolError
from agentenv.offload import in_thread
from agentenv.tools import argument_schema, read_arguments
from agentenv.types import Info, Message, ToolResult


def build_backend(config: SearchConfig, cache: ResultCache) -> Backend:
    """The backend of the configuration; one that has a `cache_name` is behind the cache."""
    chosen = config.backend
    backend: Backend = chosen.build()
    if not chosen.cache_name:
        return backend
    arpo_cache = Path(config.arpo_cache) if config.arpo_cache else None
    return CachedBackend(chosen.cache_name, backend, cache, arpo_cache, lasts=chosen.cache_lasts)


NO_RESULTS = "No search results found."
REPEATED = "You have searched for this before; the results are in an earlier answer."
MAX_QUERY_CHARS = 2000


class Episode(Struct):
    """What a search is for: the question, what the policy has written so far, the queries that
    were answered, and how many results were summarised."""

    question: str = ""
    written: list[str] = field(default_factory=list)
    queries: set[str] = field(default_factory=set)
    num_summaries: int = 0

    def copy(self) -> Episode:
        """An independent copy."""
        return Episode(self.question, list(self.written), set(self.queries), self.num_summaries)


class SearchService:
    """Search and pages, as configured. One a process and configuration: `shared_service`."""

    def __init__(self, config: SearchConfig) -> None:
        config.check()
        self.config = config
        self.snapshot = _snapshot(config) if config.snapshot else None
        self.cache = ResultCache(
            Path(config.cache) if config.cache else None, max_age_s=config.cache_max_age_s
        )
        replayed = self.snapshot is not None and self.snapshot.mode == "replay"
        self.backend: Backend = Nobody() if replayed else build_backend(config, self.cache)
        self.reader = PageReader(config.pages, self.cache)
        self.summarizer = (
            Summarizer(config.summarizer, self.cache) if config.summarizer is not None else None
        )

    async def start(self) -> None:
        """Build or load the backend and the snapshot; raises ConfigError or DataError."""
        if self.snapshot is not None:
            await self.snapshot.start()
        await self.backend.start()

    async def search(self, text: str, episode: Episode) -> ToolResult:
        """What the policy reads: "Page i: ..." for each result, or one summary of them."""
        text = text.strip()[:MAX_QUERY_CHARS]
        if not text:
            return ToolResult(NO_RESULTS, {"ids": []})
        if text in episode.queries and self.config.sizes.repeated == "tell":
            return ToolResult(REPEATED, {"ids": [], "repeated": True})
        result = await self._search(text, episode)
        episode.queries.add(text)
        return result

    async def _search(self, text: str, episode: Episode) -> ToolResult:
        config, sizes = self.config, self.config.sizes
        market = market_of(text, config.market)
        query, info = Query(text, config.max_results, market), Info()
        for keeper in (self.snapshot, self.backend):
            if isinstance(keeper, Snapshot | CachedBackend):
                info["cached"] = info.get("cached", False) or keeper.knows(query)
        hits = _distinct(await self._hits(query))
        info["ids"] = [hit.id or hit.url for hit in hits]
        if not hits:
            return ToolResult(NO_RESULTS, info)
        if sizes.mode == "snippets" and sizes.form == "passages":
            found = [joined_contents(hit.title, hit.text) for hit in hits]
            return ToolResult("\n\n".join(text.strip() for text in found), info)
        if sizes.mode == "snippets":
            parts = [hit.text[: config.max_chars_per_result] for hit in hits]
            return ToolResult(self._pages(hits, parts), info)
        windows = await asyncio.gather(*(self._window(hit, info) for hit in hits))
        pages = self._pages(hits, windows)
        if sizes.mode == "summaries":
            pages = await self._summary(text, pages, episode, info)
        return ToolResult(pages, info)

    async def open_page(self, url: str, query: str, episode: Episode) -> ToolResult:
        """The passages of a page that fit the query, or a model's summary of them."""
        config = self.config.pages
        text = await self._page(url)
        asked = query.strip()[:MAX_QUERY_CHARS] or episode.question
        room = self.config.sizes.max_page_chars if config.summarize else config.max_chars
        chosen = await in_thread(passages, text, asked, room)
        info: Info = {"url": url, "num_chars": len(text)}
        if config.summarize:
            chosen = await self._summary(asked, chosen, episode, info)
        return ToolResult(chosen, info)

    def stats(self) -> dict[str, float]:
        """What snapshot, cache, backend, reader and summariser count."""
        parts = (self.snapshot, self.cache, self.backend, self.reader, self.summarizer)
        return summed_stats(parts)

    async def close(self) -> None:
        """Stop what is in the air and close everything; idempotent."""
        await self.cache.close()
        await self.reader.close()
        await self.backend.close()
        if self.summarizer is not None:
            await self.summarizer.close()
        if self.snapshot is not None:
            self.snapshot.close()

    async def _hits(self, query: Query) -> list[Hit]:
        """The results, by way of the snapshot if there is one."""
        if self.snapshot is None:
            return await self.backend.search(query)
        return await self.snapshot.hits(query, lambda: self.backend.search(query))

    async def _page(self, url: str) -> str:
        """The text of a page or document, by way of the snapshot if there is one."""
        if self.snapshot is None:
            return await self._read(url)
        return await self.snapshot.page(url, lambda: self._read(url))

    async def _read(self, url: str) -> str:
        if not url.startswith(CORPUS_SCHEME):
            return await self.reader.text(url)
        document = await self.backend.document(url)
        if document is None:
            raise ToolError(f"There is no document {url}.")
        return f"{document.title}\n{document.text}" if document.title else document.text

    async def _window(self, hit: Hit, info: Info) -> str:
        """The page round the snippet; the snippet where the page cannot be had."""
        sizes = self.config.sizes
        if not hit.url.startswith(("http://", "https://")):
            return hit.text[: sizes.window_chars]
        try:
            page = await self._page(hit.url)
        except (ToolError, InfraError) as error:
            info.setdefault("pages_failed", []).append(str(error))
            return hit.text[: sizes.window_chars]
        page = page[: sizes.max_page_chars]
        return await in_thread(window, page, hit.text, sizes.window_chars)

    async def _summary(self, query: str, pages: str, episode: Episode, info: Info) -> str:
        """A model's summary; beyond its limit, or where the model gives none, the beginning of the
        pages. info["browser"] says which."""
        assert self.summarizer is not None, "the configuration was checked"
        config = self.summarizer.config
        if config.max_uses and episode.num_summaries >= config.max_uses:
            return pages[: config.max_chars]
        reasoning = "\n\n".join(episode.written)
        summary = await self.summarizer.summarize(episode.question, reasoning, query, pages)
        episode.num_summaries += 1
        info["browser"] = {"found": bool(summary.text), "num_tokens": summary.num_tokens}
        return summary.text or pages[: config.max_chars]

    def _pages(self, hits: list[Hit], parts: list[str]) -> str:
        lines = []
        for number, (hit, part) in enumerate(zip(hits, parts, strict=True), start=1):
            link = f"[{hit.title}]({hit.url}) " if self.config.show_links and hit.url else ""
            lines.append(f"Page {number}: {link}{part}")
        return "\n".join(lines)


def _snapshot(config: SearchConfig) -> Snapshot:
    kind = config.backend
    return Snapshot(
        Path(config.snapshot),
        config.snapshot_mode,
        backend=kind.cache_name or str(kind.__struct_config__.tag),
        reader=config.pages.reader,
        sha256=config.snapshot_sha256,
        on_miss=config.on_miss,
    )


def shared_service(config: SearchConfig) -> SearchService:
    """The service of this configuration that all episodes of the process share."""
    key = ("search", msgspec.json.encode(config))
    return shared(key, lambda: SearchService(config))


def _distinct(hits: list[Hit]) -> list[Hit]:
    return list({hit.text: hit for hit in reversed(hits)}.values())[::-1]


# The tools of web search: `search` and `open_page`.


def tell_tools(states: Iterable[Any], question: str, action: Message) -> None:
    """Note in the states of these tools what the episode asks and what the policy wrote.

    An environment calls it at the start of each step; the states of other tools are left alone.
    """
    for state in states:
        if isinstance(state, Episode):
            state.question = question
            state.written.append(action.content)


class _SearchArguments(Struct, forbid_unknown_fields=True):
    query: str


class _OpenPageArguments(Struct, forbid_unknown_fields=True):
    url: str
    query: str = ""


class _EpisodeTool:
    """Base: the state is the Episode, which the environment keeps up to date."""

    fork_mode: ForkMode = "pure"

    def __init__(self, service: SearchService) -> None:
        self.service = service

    async def prepare(self) -> None:
        """Build or load what searching needs, once a process."""
        await self.service.start()

    def start(self, seed: int | None) -> Episode:
        """An episode of which nothing is known yet."""
        return Episode()

    async def fork(self, state: Episode) -> Episode:
        """An independent copy."""
        return state.copy()

    async def close(self, state: Episode) -> None:
        """Nothing to free."""


class SearchPagesTool(_EpisodeTool):
    """Search by the configured backend, in the configured mode."""

    name = "search"
    description = "Search for information; returns the best matching passages or pages."
    schema = argument_schema(_SearchArguments)

    async def call(self, arguments: dict[str, Any], state: Episode) -> ToolResult:
        """Search; "no results" is a result, a failure of the machinery an InfraError."""
        query = read_arguments(self.name, arguments, _SearchArguments).query
        return await self.service.search(query, state)


class OpenPageTool(_EpisodeTool):
    """Open a page that a search has found, or any public address."""

    name = "open_page"
    description = "Open a page by its address; returns the passages that fit the query."
    schema = argument_schema(_OpenPageArguments)

    async def call(self, arguments: dict[str, Any], state: Episode) -> ToolResult:
        """Open; private addresses and unreadable pages are a ToolError."""
        asked = read_arguments(self.name, arguments, _OpenPageArguments)
        return await self.service.open_page(asked.url.strip(), asked.query, state)
