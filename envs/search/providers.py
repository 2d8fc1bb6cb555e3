"""HTTP search backends: web search providers, and retrievers with /retrieve.

Keys come only from environment variables. A provider is a pair of pure functions, which can be
compared with its documentation.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar
from urllib.parse import urlencode

from msgspec import Struct
from msgspec.structs import asdict, replace

from agentenv.base.config import ESSENTIAL, about
from agentenv.base.errors import ConfigError, ForeignError, InfraError, ToolError, reported_as
from agentenv.base.secrets import SECRETS
from agentenv.base.untrusted import convert, decode
from agentenv.base.urls import public_url
from agentenv.contract.server_config import read_key
from agentenv.envs.search.corpus import BackendConfig, Hit, Query, split_contents
from agentenv.envs.search.keys import TrafficConfig
from agentenv.envs.search.upstream import HttpRequest, Reply, Upstream

T = TypeVar("T")

ProviderName = Literal["brightdata", "serper", "tavily", "searxng"]


UNEXPECTED = "the reply has an unexpected form"
MAX_REASON_CHARS = 300  # of a provider's message to the policy
MAX_REFUSED = 20  # consecutive rejected searches, after which the configuration must be wrong

# messages about an account or a key, if the status does not show it
_OF_ACCOUNT = re.compile(
    r"credits|run out of|usage limit|insufficient balance|billing|api.?key|subscription|unauthori"
    r"|\bzone\b",
    re.IGNORECASE,
)


class Provider:
    """One provider. `rows` is the key of the results in the reply, `failure` the
    key of an error message, if missing results alone are not an error."""

    url = ""
    key_variable = ""
    rows = "results"
    failure = "error"
    text_field = "content"
    url_field = "url"
    date_field = "publishedDate"
    max_chars = 2000  # of a query

    @staticmethod
    def request(url: str, key: str, zone: str, query: Query) -> HttpRequest:
        """The search request to `url`, with the account's key."""
        raise NotImplementedError


class WebConfig(BackendConfig, frozen=True, forbid_unknown_fields=True, tag="web"):
    """A web search provider."""

    provider: Annotated[ProviderName, about("search service", ESSENTIAL)]
    url: Annotated[str, about("custom address of the service; required for SearXNG")] = ""
    zone: Annotated[str, about("Bright Data: the SERP zone")] = "serp_api"
    quotes: Annotated[bool, about("Bright Data: keep the quotes in a query")] = False
    traffic: Annotated[TrafficConfig, about("rate limit and retries")] = TrafficConfig()

    @property
    def cache_name(self) -> str:
        name = f"{self.provider} {public_url(self.url)}" if self.url else self.provider
        return f"{name} with quotes" if self.quotes else name

    def build(self) -> WebBackend:
        """The provider, with the key from the environment variable."""
        return WebBackend(self)


class HttpBackend(Upstream):
    """Base of the backends on one service: its client, without an index and without documents."""

    _num_refused = 0  # searches in a row

    async def start(self) -> None:
        """Do nothing."""

    async def document(self, url: str) -> Hit | None:
        """None, since pages are fetched from their addresses."""
        return None

    async def ask(self, request: HttpRequest, query: Query) -> Reply:
        """The reply to a search request. Raises ToolError for a rejected search, and ConfigError
        for a rejected account or key, or if every search is rejected."""
        reply = await self.send(request)
        if reply.status not in (400, 414, 422):
            self._num_refused = 0
            return reply
        self._num_refused += 1
        text = SECRETS.known(reply.body[:10_000].decode("utf-8", "replace"))
        text = " ".join(text.split())
        reason = f"status {reply.status}: {text[:MAX_REASON_CHARS]}"
        if _OF_ACCOUNT.search(text.replace(query.text, "")):
            raise ConfigError(f"{self.name} rejects the account or the key, {reason}")
        if self._num_refused >= MAX_REFUSED:
            raise ConfigError(
                f"{self.name} rejected {self._num_refused} searches in a row, the last with "
                f"{reason}; check the keys of search.backend and search.market"
            )
        raise ToolError(f"The search was refused with {reason}")


class WebBackend(HttpBackend):
    """A web search provider."""

    def __init__(self, config: WebConfig) -> None:
        self._config = config
        self._provider = provider = PROVIDERS[config.provider]
        hint = "expected an instance with json among search.formats in its settings.yml"
        if provider.key_variable:
            hint = f"check the key in {provider.key_variable} and the permissions of the account"
        self._url = (config.url or provider.url).rstrip("/")
        if not self._url:
            raise ConfigError(
                f"search.backend.url: {config.provider} has no public address; "
                'expected the address of your instance, e.g. "http://localhost:8080"'
            )
        needed_by = f"search.backend.provider = {config.provider!r}"
        super().__init__(config.provider, config.traffic, hint)
        self._key = read_key(provider.key_variable, needed_by)

    async def search(self, query: Query) -> list[Hit]:
        """Search with the provider. Raises ToolError for a query beyond its length limit."""
        provider, found = self._provider, len(query.text)
        if found > provider.max_chars:
            raise ToolError(
                f"The query has {found} characters; at most {provider.max_chars} are searched for."
            )
        if provider is _BrightData and not self._config.quotes:
            query = replace(query, text=query.text.replace('"', ""))
        request = provider.request(self._url, self._key, self._config.zone, query)
        return provider_hits(self._config, await self.ask(request, query), query.max_results)


def provider_hits(config: WebConfig, reply: Reply, max_results: int) -> list[Hit]:
    """The hits of a reply. Raises InfraError if it does not have the provider's form.

    A reply without a list of results means "no results"; one that is not a JSON object does not.
    """
    provider = PROVIDERS[config.provider]
    content = _decoded(reply, dict[str, Any], config.provider, "a JSON object")
    with reported_as(InfraError, f"{config.provider}: {UNEXPECTED}", ForeignError):
        rows = convert(content.get(provider.rows) or [], list[dict[str, Any]])
    failure = content.get(provider.failure)
    if not rows and failure:
        reason = SECRETS.known(str(failure))[:MAX_REASON_CHARS]
        raise InfraError(f"{config.provider}: no results, but {reason}")
    hits: list[Hit] = []
    for row in rows:
        text = str(row.get(provider.text_field) or "").strip()
        title = str(row.get("title") or "").strip()
        if text or title:
            url, site = str(row.get(provider.url_field) or ""), str(row.get("site_name") or "")
            date = str(row.get(provider.date_field) or "").partition("T")[0]
            hits.append(Hit(text or title, title, url, site=site, date=date))
    return hits[:max_results]


def _decoded(reply: Reply, form: type[T], name: str, expected: str) -> T:
    """The reply decoded as `form`. Raises InfraError for another status or form."""
    if reply.status != 200:
        raise InfraError(f"{name}: status {reply.status}, expected 200")
    with reported_as(
        InfraError, f"{name}: {UNEXPECTED}", ForeignError, end=f"; expected {expected}"
    ):
        return decode(reply.body, form)


class _BrightData(Provider):
    """Bing through Bright Data, as in ARPO: in its training without quotes in the query."""

    url, key_variable = "https://api.brightdata.com", "BRIGHTDATA_API_KEY"
    rows, text_field, url_field = "organic", "description", "link"
    date_field = "datePublished"

    @staticmethod
    def request(url: str, key: str, zone: str, query: Query) -> HttpRequest:
        params = {"q": query.text, "mkt": query.market, "setLang": query.language}
        search = urlencode({**params, "brd_json": "1", "cc": query.country})
        body = {"zone": zone, "url": f"https://www.bing.com/search?{search}", "format": "raw"}
        return HttpRequest("POST", f"{url}/request", json=body, secret_headers=_bearer(key))


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


class _Serper(Provider):
    url, key_variable = "https://google.serper.dev", "SERPER_API_KEY"
    rows, text_field, url_field, date_field = "organic", "snippet", "link", "date"

    @staticmethod
    def request(url: str, key: str, zone: str, query: Query) -> HttpRequest:
        # Chinese has several variants
        language = query.market.lower() if query.language == "zh" else query.language
        params = {"q": query.text, "gl": query.country, "hl": language}
        body = {**params, "num": query.max_results}
        return HttpRequest("POST", f"{url}/search", json=body, secret_headers={"X-API-KEY": key})


class _Tavily(Provider):
    url, key_variable, max_chars = "https://api.tavily.com", "TAVILY_API_KEY", 400
    date_field = "published_date"

    @staticmethod
    def request(url: str, key: str, zone: str, query: Query) -> HttpRequest:
        params = {"query": query.text, "max_results": query.max_results}
        body = {**params, "search_depth": "basic", "include_raw_content": False}
        return HttpRequest("POST", f"{url}/search", json=body, secret_headers=_bearer(key))


class _SearXng(Provider):
    """By default, JSON is disabled in an instance, which then answers 403."""

    failure = "unresponsive_engines"

    @staticmethod
    def request(url: str, key: str, zone: str, query: Query) -> HttpRequest:
        language = f"{query.language}-{query.country.upper()}"
        params = {"q": query.text, "format": "json", "language": language}
        return HttpRequest("GET", f"{url}/search", params)


PROVIDERS: dict[ProviderName, type[Provider]] = {
    "brightdata": _BrightData,
    "serper": _Serper,
    "tavily": _Tavily,
    "searxng": _SearXng,
}


# Retrievers.

Dialect = Literal["search_r1", "skyrl", "tool_star"]


class RemoteSearchConfig(BackendConfig, frozen=True, forbid_unknown_fields=True, tag="remote"):
    """A retriever that serves POST /retrieve or /batch_search, as agentenv retriever does."""

    url: Annotated[str, about('e.g. "http://localhost:8000"')]
    dialect: Annotated[
        Dialect, about("/retrieve with queries or (skyrl) query; tool_star: /batch_search")
    ] = "search_r1"
    traffic: Annotated[TrafficConfig, about("rate limit and retries")] = TrafficConfig(rate_per_s=0)

    corpus: Annotated[
        str,
        about(
            "name of the served corpus, under which search.cache keeps the results; "
            "empty: keep them in memory, for this run"
        ),
    ] = ""
    api_key_env: Annotated[str, about("environment variable with its key")] = ""

    @property
    def cache_name(self) -> str:
        return f"remote {public_url(self.url)} {self.dialect} {self.corpus}"

    @property
    def cache_lasts(self) -> bool:
        return bool(self.corpus)

    def build(self) -> RemoteBackend:
        """The retriever at the address."""
        return RemoteBackend(self)


class _Retrieved(Struct):
    """The answer of /retrieve: the results of one query, in a list or a list of lists."""

    result: list[list[dict[str, Any]] | dict[str, Any]]


class _Scored(Struct):
    document: dict[str, Any]
    score: float | None = None


class _Contents(Struct):
    id: str | int
    contents: str


class _Batch(Struct, array_like=True):
    """The answer of /batch_search: documents and scores of each query."""

    documents: list[list[_Contents]]
    scores: list[list[float]]


class RemoteBackend(HttpBackend):
    """A retriever in one of the dialects: the two of /retrieve, and Tool-Star's /batch_search."""

    def __init__(self, config: RemoteSearchConfig) -> None:
        super().__init__(f"retriever {public_url(config.url)}", config.traffic)
        path = "/batch_search" if config.dialect == "tool_star" else "/retrieve"
        self._url = config.url.rstrip("/").removesuffix(path) + path
        self._dialect = config.dialect
        key = read_key(config.api_key_env, "search.backend.api_key_env")
        self._secret = _bearer(key) if key else {}

    async def search(self, query: Query) -> list[Hit]:
        """Search with the retriever."""
        is_batch, text = self._dialect == "tool_star", query.text
        body: dict[str, Any] = {"query": text} if self._dialect == "skyrl" else {"queries": [text]}
        body |= {"topk": query.max_results, "return_scores": True}
        if is_batch:
            body = {"query": [text], "top_n": query.max_results, "return_score": True}
        request = HttpRequest("POST", self._url, json=body, secret_headers=self._secret)
        hits = batch_hits if is_batch else retrieved_hits
        return hits(await self.ask(request, query), self._url)[: query.max_results]


_RETRIEVED = '{"result": [[{"document": {"contents": text}, "score": number}]]}'
_BATCH = '[[[{"id": text, "contents": text}, ..]], [[score, ..]]]'


def retrieved_hits(reply: Reply, url: str) -> list[Hit]:
    """The hits of one query, with or without scores, in a flat or a nested list."""
    name = f"retriever {url}"
    rows: Any = _decoded(reply, _Retrieved, name, _RETRIEVED).result
    if rows and isinstance(rows[0], list):
        rows = rows[0]
    with reported_as(InfraError, name, ForeignError, end=f"; expected {_RETRIEVED}"):
        found = [convert(row if "document" in row else {"document": row}, _Scored) for row in rows]
    return [_retrieved_hit(one.document, one.score or 0.0) for one in found]


def _retrieved_hit(document: dict[str, Any], score: float) -> Hit:
    title, text = split_contents(str(document.get("contents") or ""))
    return Hit(
        str(document.get("text") or text),
        str(document.get("title") or title),
        str(document.get("url") or ""),
        str(document.get("id") or ""),
        score,
        document=document if "contents" in document else None,
    )


def batch_hits(reply: Reply, url: str) -> list[Hit]:
    """The hits of one query to /batch_search."""
    found = _decoded(reply, _Batch, f"retriever {url}", _BATCH)
    # not exactly one list of each
    with reported_as(InfraError, f"retriever {url}", ValueError, end=f"; expected {_BATCH}"):
        (rows,), (scores,) = found.documents, found.scores
    found_by = zip(rows, scores, strict=False)
    return [_retrieved_hit(asdict(row), score) for row, score in found_by]
