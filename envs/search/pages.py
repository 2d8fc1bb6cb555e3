"""Pages as text: fetched directly or through Jina's reader, and cached."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Literal

from aiohttp.abc import AbstractResolver
from msgspec import Meta, Struct

from agentenv.errors import ToolError
from envs.search.cache import ResultCache
from envs.search.cassette import Cassette
from envs.search.extract import TextExtractor
from envs.search.fetch import FetchConfig, PageFetcher
from envs.search.flight import SingleFlight
from envs.search.upstream import HttpRequest, TrafficConfig, Upstream

JINA_KEY = "JINA_API_KEY"  # optional: without one the reader is slower


class PagesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How pages are fetched and read."""

    reader: Annotated[Literal["direct", "jina"], Meta(description="who fetches and reads")] = (
        "direct"
    )
    jina_url: Annotated[str, Meta(description="address of the reader")] = "https://r.jina.ai"
    jina_traffic: Annotated[TrafficConfig, Meta(description="rate limit and retries")] = (
        TrafficConfig(timeout_s=40.0)
    )
    fetch: Annotated[FetchConfig, Meta(description="direct fetching")] = FetchConfig()
    max_chars: Annotated[int, Meta(ge=100, description="of a page, given to the policy")] = 6000
    max_page_chars: Annotated[int, Meta(ge=1000, description="of a page's text, kept")] = 100_000
    num_workers: Annotated[int, Meta(ge=1, description="processes that extract text")] = 2
    extract_timeout_s: Annotated[float, Meta(gt=0, description="for one page")] = 5.0
    summarize: Annotated[bool, Meta(description="open_page gives a model's summary")] = False


class PageReader:
    """From an address to the text of its page; shared by all episodes."""

    def __init__(
        self,
        config: PagesConfig,
        cache: ResultCache,
        cassette: Cassette | None = None,
        resolver: AbstractResolver | None = None,
    ) -> None:
        self.config = config
        self._cache = cache
        self._fetcher = PageFetcher(config.fetch, cassette, resolver)
        self._extractor = TextExtractor(config.num_workers, config.extract_timeout_s)
        self._jina = Upstream("jina", config.jina_traffic, cassette)
        self._flight: SingleFlight[str] = SingleFlight()

    async def text(self, url: str) -> str:
        """The page's text, at most `max_page_chars`. Raises ToolError or InfraError."""
        key = f"page:{self.config.reader}:{url}"
        known = self._cache.get(key)
        if known is not None:
            return known.decode()
        return await self._flight.run(key, lambda: self._read(key, url))

    async def close(self) -> None:
        """Stop what is in the air, kill the workers and close the connections; idempotent."""
        await self._flight.close()
        await asyncio.gather(self._fetcher.close(), self._extractor.close(), self._jina.close())

    async def _read(self, key: str, url: str) -> str:
        if self.config.reader == "jina":
            text = await self._read_by_jina(url)
        else:
            text = await self._extractor.extract(await self._fetcher.fetch(url))
        text = text[: self.config.max_page_chars].strip()
        if not text:
            raise ToolError(f"{url} holds no text.")
        self._cache.put(key, text.encode("utf-8", "replace"))
        return text

    async def _read_by_jina(self, url: str) -> str:
        if not url.startswith(("http://", "https://")):
            raise ToolError(f"{url} is not an http or https address.")
        secret_key = os.environ.get(JINA_KEY, "").strip()
        secret = {"Authorization": f"Bearer {secret_key}"} if secret_key else {}
        address = f"{self.config.jina_url.rstrip('/')}/{url}"
        reply = await self._jina.send(HttpRequest("GET", address, secret_headers=secret))
        if reply.status != 200:
            raise ToolError(f"{url} could not be read: status {reply.status}.")
        return reply.body.decode("utf-8", "replace")
