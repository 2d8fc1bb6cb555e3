"""Web search providers: how each is asked, and where its results are.

Keys come from the environment only. A provider is a pair of pure functions, so that each can be
read beside its documentation.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

import msgspec
from msgspec import Meta, Struct

from agentenv.errors import ConfigError, InfraError
from envs.search.corpus import Hit, Query
from envs.search.upstream import HttpRequest, Reply, TrafficConfig

ProviderName = Literal["brightdata", "serper", "serpapi", "tavily", "brave", "searxng"]


class Provider(Struct, frozen=True):
    """One provider. `request(url, key, zone, query)`; `results` finds the list in the reply."""

    url: str
    key_variable: str
    request: Callable[[str, str, str, Query], HttpRequest]
    results: Callable[[dict[str, Any]], Any]
    text_field: str
    url_field: str = "link"


class WebConfig(Struct, frozen=True, forbid_unknown_fields=True, tag="web", tag_field="name"):
    """A web search provider."""

    provider: Annotated[ProviderName, Meta(description="who is asked")]
    url: Annotated[str, Meta(description="another address of the service; SearXNG needs one")] = ""
    zone: Annotated[str, Meta(description="Bright Data: the SERP zone")] = "serp_api"
    traffic: Annotated[TrafficConfig, Meta(description="rate limit and retries")] = TrafficConfig()


def api_key(variable: str, needed_by: str) -> str:
    """The key in an environment variable; a ConfigError names the variable if it is not set."""
    if not variable:  # it needs none
        return ""
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"{needed_by} needs a key in the environment variable {variable}, which is not set; "
            f"set it before starting: export {variable}=..."
        )
    return key


def provider_key(config: WebConfig) -> str:
    """The key of the provider from the environment, "" if it needs none; raises ConfigError."""
    needed_by = f"search.backend.provider = {config.provider!r}"
    return api_key(PROVIDERS[config.provider].key_variable, needed_by)


def provider_hint(config: WebConfig) -> str:
    """What to do when the provider refuses requests."""
    variable = PROVIDERS[config.provider].key_variable
    if not variable:
        return "expected an instance with json among search.formats in its settings.yml"
    return f"check the key in {variable}, and what the account may do"


def provider_request(config: WebConfig, key: str, query: Query) -> HttpRequest:
    """What to send for a query."""
    provider = PROVIDERS[config.provider]
    url = config.url or provider.url
    if not url:
        raise ConfigError(
            f"search.backend.url: {config.provider} has no public address; "
            'expected the address of your instance, e.g. "http://localhost:8080"'
        )
    return provider.request(url.rstrip("/"), key, config.zone, query)


def provider_hits(config: WebConfig, reply: Reply, max_results: int) -> list[Hit]:
    """The hits of a reply; InfraError if it is not of the provider's form.

    A reply without a list of results means "no results"; one that is no JSON object does not.
    """
    provider = PROVIDERS[config.provider]
    if reply.status != 200:
        raise InfraError(f"{config.provider}: status {reply.status}, expected 200")
    try:
        content = msgspec.json.decode(reply.body, type=dict[str, Any])
        rows = msgspec.convert(provider.results(content) or [], list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, AttributeError) as error:
        raise InfraError(f"{config.provider}: the reply has another form: {error}") from error
    hits: list[Hit] = []
    for row in rows:
        text = str(row.get(provider.text_field) or "").strip()
        title = str(row.get("title") or "").strip()
        if text or title:
            hits.append(Hit(text or title, title, str(row.get(provider.url_field) or "")))
    return hits[:max_results]


def _bright_data(url: str, key: str, zone: str, query: Query) -> HttpRequest:
    """Bing through Bright Data, as ARPO asks it: quotes are left out of the query."""
    search = urlencode(
        {
            "q": query.text.replace('"', ""),
            "mkt": query.market,
            "setLang": query.language,
            "brd_json": "1",
            "cc": query.country,
        }
    )
    body = {"zone": zone, "url": f"https://www.bing.com/search?{search}", "format": "raw"}
    secret = {"Authorization": f"Bearer {key}"}
    return HttpRequest("POST", f"{url}/request", json=body, secret_headers=secret)


def _serper(url: str, key: str, zone: str, query: Query) -> HttpRequest:
    body = {
        "q": query.text,
        "num": query.max_results,
        "gl": query.country,
        "hl": query.market.lower() if query.language == "zh" else query.language,
    }
    return HttpRequest("POST", f"{url}/search", json=body, secret_headers={"X-API-KEY": key})


def _serpapi(url: str, key: str, zone: str, query: Query) -> HttpRequest:
    params = {
        "engine": "google",
        "q": query.text,
        "num": str(query.max_results),
        "gl": query.country,
        "hl": query.market.lower() if query.language == "zh" else query.language,
    }
    return HttpRequest("GET", f"{url}/search.json", params, secret_params={"api_key": key})


def _tavily(url: str, key: str, zone: str, query: Query) -> HttpRequest:
    body = {
        "query": query.text,
        "max_results": query.max_results,
        "search_depth": "basic",
        "include_raw_content": False,
    }
    secret = {"Authorization": f"Bearer {key}"}
    return HttpRequest("POST", f"{url}/search", json=body, secret_headers=secret)


def _brave(url: str, key: str, zone: str, query: Query) -> HttpRequest:
    params = {
        "q": query.text,
        "count": str(min(20, query.max_results)),
        "country": query.country,
        "search_lang": "zh-hans" if query.market == "zh-CN" else query.language,
    }
    secret = {"X-Subscription-Token": key}
    return HttpRequest("GET", f"{url}/res/v1/web/search", params, secret_headers=secret)


def _searxng(url: str, key: str, zone: str, query: Query) -> HttpRequest:
    """An instance has JSON off by default and then answers 403."""
    params = {"q": query.text, "format": "json", "language": query.market}
    return HttpRequest("GET", f"{url}/search", params)


PROVIDERS: dict[ProviderName, Provider] = {
    "brightdata": Provider(
        "https://api.brightdata.com",
        "BRIGHTDATA_API_KEY",
        _bright_data,
        lambda reply: reply.get("organic"),
        "description",
    ),
    "serper": Provider(
        "https://google.serper.dev",
        "SERPER_API_KEY",
        _serper,
        lambda reply: reply.get("organic"),
        "snippet",
    ),
    "serpapi": Provider(
        "https://serpapi.com",
        "SERPAPI_API_KEY",
        _serpapi,
        lambda reply: reply.get("organic_results"),
        "snippet",
    ),
    "tavily": Provider(
        "https://api.tavily.com",
        "TAVILY_API_KEY",
        _tavily,
        lambda reply: reply.get("results"),
        "content",
        "url",
    ),
    "brave": Provider(
        "https://api.search.brave.com",
        "BRAVE_API_KEY",
        _brave,
        lambda reply: (reply.get("web") or {}).get("results"),
        "description",
        "url",
    ),
    "searxng": Provider("", "", _searxng, lambda reply: reply.get("results"), "content", "url"),
}
