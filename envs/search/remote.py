"""Backends that are asked over HTTP: web search providers, and retrievers with /retrieve."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from agentenv.errors import InfraError
from envs.search.corpus import Hit, Query, split_contents
from envs.search.providers import (
    WebConfig,
    provider_hint,
    provider_hits,
    provider_key,
    provider_request,
)
from envs.search.upstream import Cassette, HttpRequest, Reply, TrafficConfig, Upstream

Dialect = Literal["search_r1", "skyrl"]


class RemoteConfig(Struct, frozen=True, forbid_unknown_fields=True, tag="remote", tag_field="name"):
    """A retriever that serves POST /retrieve, e.g. launchers/retriever.py."""

    url: Annotated[str, Meta(description='e.g. "http://localhost:8000"')]
    dialect: Annotated[Dialect, Meta(description="form of the request: queries, or query")] = (
        "search_r1"
    )
    traffic: Annotated[TrafficConfig, Meta(description="rate limit and retries")] = TrafficConfig(
        rate_per_s=0
    )


class _Found(Struct):
    document: dict[str, Any]
    score: float | None = None


class _Retrieved(Struct):
    result: list[Any]


class HttpBackend:
    """Base of the backends that ask one service: they have nothing to build and no documents."""

    def __init__(self, upstream: Upstream) -> None:
        self.upstream = upstream

    async def start(self) -> None:
        """Nothing to do."""

    async def document(self, url: str) -> Hit | None:
        """None: pages are fetched from where they are."""
        return None

    def stats(self) -> dict[str, float]:
        """Requests of the service."""
        return self.upstream.stats()

    async def close(self) -> None:
        """Close the connections."""
        await self.upstream.close()


class WebBackend(HttpBackend):
    """A web search provider."""

    def __init__(self, config: WebConfig, cassette: Cassette | None = None) -> None:
        upstream = Upstream(
            config.provider, config.traffic, cassette, refused_hint=provider_hint(config)
        )
        super().__init__(upstream)
        self._config = config
        replayed = cassette is not None and cassette.mode == "replay"
        self._key = "" if replayed else provider_key(config)
        provider_request(config, self._key, Query("?"))  # a missing address is refused now

    async def search(self, query: Query) -> list[Hit]:
        """Ask the provider."""
        reply = await self.upstream.send(provider_request(self._config, self._key, query))
        return provider_hits(self._config, reply, query.max_results)


class RemoteBackend(HttpBackend):
    """A retriever in one of the two dialects of /retrieve."""

    def __init__(self, config: RemoteConfig, cassette: Cassette | None = None) -> None:
        super().__init__(Upstream(f"retriever {config.url}", config.traffic, cassette))
        self._url = config.url.rstrip("/").removesuffix("/retrieve") + "/retrieve"
        self._dialect = config.dialect

    async def search(self, query: Query) -> list[Hit]:
        """Ask the retriever."""
        asked = {"query": query.text} if self._dialect == "skyrl" else {"queries": [query.text]}
        body = {**asked, "topk": query.max_results, "return_scores": True}
        reply = await self.upstream.send(HttpRequest("POST", self._url, json=body))
        return retrieved_hits(reply, self._url)[: query.max_results]


def retrieved_hits(reply: Reply, url: str) -> list[Hit]:
    """The hits of one query. With and without scores, and with a flat or a nested list."""
    if reply.status != 200:
        raise InfraError(f"retriever {url}: status {reply.status}, expected 200")
    try:
        rows = msgspec.json.decode(reply.body, type=_Retrieved).result
        if rows and isinstance(rows[0], list):
            rows = rows[0]
        return [_hit(row) for row in rows]
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InfraError(
            f"retriever {url}: {error}; expected "
            '{"result": [[{"document": {"contents": text}, "score": number}]]}'
        ) from error


def _hit(row: Any) -> Hit:
    if isinstance(row, dict) and "document" not in row:
        row = {"document": row}
    found = msgspec.convert(row, _Found)
    document = found.document
    title, text = split_contents(str(document.get("contents") or ""))
    return Hit(
        str(document.get("text") or text),
        str(document.get("title") or title),
        str(document.get("url") or ""),
        str(document.get("id") or ""),
        found.score or 0.0,
    )
