"""Web search providers and remote retrievers, against a local server with their formats.

The replies are synthetic: made by hand after the providers' documentation.
"""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from aiohttp import web
from msgspec.structs import replace

from agentenv.base.errors import ConfigError, InfraError, ToolError
from agentenv.envs.search.corpus import Hit, Query
from agentenv.envs.search.keys import TrafficConfig
from agentenv.envs.search.providers import (
    PROVIDERS,
    ProviderName,
    RemoteBackend,
    RemoteSearchConfig,
    WebBackend,
    WebConfig,
    provider_hits,
    retrieved_hits,
)
from agentenv.envs.search.upstream import Reply
from tests.envs.search_server import serving

QUICK = TrafficConfig(rate_per_s=0, num_retries=1)
KEY = "synthetic-key"
EXPECTED = [
    Hit("Lima is the capital.", "Lima", "https://a.test/lima"),
    Hit("An old city.", "Cusco", "https://a.test/cusco"),
]
LINKED = [
    {"title": "Lima", "link": "https://a.test/lima", "snippet": "Lima is the capital."},
    {"title": "Cusco", "link": "https://a.test/cusco", "snippet": "An old city."},
]


def renamed(text: str, url: str) -> list[dict[str, str]]:
    return [{"title": r["title"], url: r["link"], text: r["snippet"]} for r in LINKED]


REPLIES: dict[ProviderName, dict[str, Any]] = {
    "brightdata": {"general": {}, "organic": renamed("description", "link")},
    "serper": {"searchParameters": {"q": "peru"}, "organic": LINKED},
    "tavily": {"query": "peru", "results": renamed("content", "url")},
    "searxng": {"query": "peru", "results": renamed("content", "url")},
}
# the request of each for Query('capital "Peru"', 2): method, path, where the key is
REQUESTS: dict[ProviderName, tuple[str, str, str]] = {
    "brightdata": ("POST", "/request", "Authorization"),
    "serper": ("POST", "/search", "X-API-KEY"),
    "tavily": ("POST", "/search", "Authorization"),
    "searxng": ("GET", "/search", ""),
}


class Service:
    """Answers with `content`; keeps the last request."""

    def __init__(self, content: Any, *statuses: int) -> None:
        self.content = content
        self.statuses = list(statuses)
        self.request: web.Request
        self.json: Any = None

    async def __call__(self, request: web.Request) -> web.Response:
        self.request = request
        self.json = await request.json() if request.can_read_body else None
        status = self.statuses.pop(0) if self.statuses else 200
        text = self.content if isinstance(self.content, str) else json.dumps(self.content)
        return web.Response(status=status, text=text, content_type="application/json")


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for provider in PROVIDERS.values():
        if provider.key_variable:
            monkeypatch.setenv(provider.key_variable, KEY)


async def ask(service: Service, name: ProviderName, query: Query) -> list[Hit]:
    async with serving(service) as url:
        backend = WebBackend(WebConfig(name, url=url, traffic=QUICK))
        try:
            return await backend.search(query)
        finally:
            await backend.close()


@pytest.mark.parametrize("name", PROVIDERS)
async def test_a_provider_receives_the_query_and_its_results_are_read(name: ProviderName) -> None:
    service = Service(REPLIES[name], 503)  # the first try fails, as infrastructure does
    assert await ask(service, name, Query('capital "Peru"', 2)) == EXPECTED
    method, path, key = REQUESTS[name]
    assert (service.request.method, service.request.path) == (method, path)
    if key:
        assert service.request.headers[key].removeprefix("Bearer ") == KEY
    sent = {**service.request.query, **(service.json or {})}
    if name == "brightdata":
        sent = {key: values[0] for key, values in parse_qs(urlsplit(sent["url"]).query).items()}
        assert sent["q"] == "capital Peru"
    else:
        assert 'capital "Peru"' in sent.values()


@pytest.mark.parametrize("name", PROVIDERS)
async def test_an_empty_reply_means_no_results(name: ProviderName) -> None:
    assert await ask(Service({}), name, Query("x")) == []
    assert await ask(Service({key: [] for key in REPLIES[name]}), name, Query("x")) == []


@pytest.mark.parametrize("name", PROVIDERS)
@pytest.mark.parametrize("content", ["<html>", "[]", "nonsense"])
async def test_a_malformed_reply_is_an_infra_error(name: ProviderName, content: str) -> None:
    with pytest.raises(InfraError, match=f"{name}: the reply has an unexpected form"):
        await ask(Service(content), name, Query("x"))


# refusals of a provider, and replies that only seem to be answers


@pytest.mark.parametrize(
    ("name", "status", "content", "kind", "message"),
    [
        ("tavily", 400, {"detail": {"error": "Query is too long."}}, ToolError, "Query is too"),
        ("searxng", 414, "Request-URI Too Large", ToolError, "status 414: Request-URI Too"),
        ("serper", 422, {"error": {"detail": f"bad q for {KEY}"}}, ToolError, r"q for \[redacted"),
        ("serper", 400, {"error": "Too long: where is my api key"}, ToolError, "400"),
        ("tavily", 432, {}, ConfigError, "432"),  # the plan is used up
        ("tavily", 433, {}, ConfigError, "433"),
        *(("serper", status, {}, ConfigError, "check the key") for status in (401, 402, 403)),
        ("serper", 422, {"error": {"code": "SUBSCRIPTION_TOKEN_INVALID"}}, ConfigError, "422"),
        ("serper", 400, {"message": "Not enough credits"}, ConfigError, "400"),
        ("serper", 429, {"error": "Your account has run out of searches."}, ConfigError, "429"),
        ("brightdata", 400, "zone serp_api not found", ConfigError, "400"),
    ],
)
async def test_a_refused_query_is_a_tool_error_and_a_spent_plan_or_wrong_key_one_of_configuration(
    name: ProviderName, status: int, content: Any, kind: type[Exception], message: str
) -> None:
    service = Service(content, status, status)
    with pytest.raises(kind, match=message):
        await ask(service, name, Query("where is my api key"))
    assert len(service.statuses) == 1  # not asked again, nor paid for twice


async def test_a_provider_that_refuses_every_query_is_a_configuration_error() -> None:
    service = Service({"error": "unknown parameter"}, *[400] * 99)
    async with serving(service) as url:
        backend = WebBackend(WebConfig("serper", url=url, traffic=QUICK))
        for _ in range(19):
            with pytest.raises(ToolError):
                await backend.search(Query("x"))
        with pytest.raises(ConfigError, match="rejected 20 searches"):
            await backend.search(Query("x"))
        await backend.close()


async def test_a_query_beyond_the_limit_of_a_provider_is_not_sent() -> None:
    service = Service(REPLIES["tavily"])
    with pytest.raises(ToolError, match=r"401.*400"):
        await ask(service, "tavily", Query("x" * 401))
    assert not hasattr(service, "request")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("searxng", {"results": [], "unresponsive_engines": [["google", "CAPTCHA"]]}),
        ("serper", {"error": "Google is blocked", "organic": []}),
    ],
)
async def test_empty_results_of_a_blocked_engine_are_an_infra_error(
    name: ProviderName, content: Any
) -> None:
    with pytest.raises(InfraError, match=f"{name}: no results, but .*(CAPTCHA|blocked)"):
        await ask(Service(content), name, Query("x"))


async def test_results_of_some_engines_count_when_others_are_blocked() -> None:
    content = REPLIES["searxng"] | {"unresponsive_engines": [["google", "CAPTCHA"]]}
    assert await ask(Service(content), "searxng", Query("x")) == EXPECTED


@pytest.mark.parametrize(
    ("query", "market", "language", "country"),
    [
        (Query("\u5317\u4eac", 10, "zh-CN"), "zh-CN", "zh-cn", "cn"),
        (Query("peru", place="cn"), "en-US", "en", "cn"),  # `location: cn` of ARPO's settings
    ],
)
async def test_a_search_has_the_language_of_its_query_and_a_country(
    query: Query, market: str, language: str, country: str
) -> None:
    service = Service({})
    await ask(service, "brightdata", query)
    sent = parse_qs(urlsplit(service.json["url"]).query)
    expected = {"q": query.text, "mkt": market, "setLang": query.language, "cc": country}
    assert sent == {key: [value] for key, value in expected.items()} | {"brd_json": ["1"]}
    await ask(service, "serper", query)
    assert (service.json["hl"], service.json["gl"]) == (language, country)
    await ask(service, "searxng", query)
    assert service.request.query["language"] == f"{query.language}-CN"


def test_results_without_text_have_their_title_or_are_left_out() -> None:
    rows = [{"title": "", "snippet": None}, {"title": "Lima"}, {"snippet": "x", "link": None}]
    reply = Reply(200, json.dumps({"organic": rows}).encode())
    assert provider_hits(WebConfig("serper"), reply, 10) == [Hit("Lima", "Lima"), Hit("x")]


async def test_a_missing_key_is_refused_before_anything_is_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SERPER_API_KEY")
    with pytest.raises(ConfigError, match=r"'serper'.*SERPER_API_KEY"):
        WebBackend(WebConfig("serper"))
    with pytest.raises(ConfigError, match=r"search\.backend\.url"):
        WebBackend(WebConfig("searxng"))


@pytest.mark.parametrize("name", [name for name in PROVIDERS if PROVIDERS[name].key_variable])
async def test_no_error_names_the_key(name: ProviderName) -> None:
    for statuses in [(500, 500), (401,), (404,)]:
        with pytest.raises((InfraError, ConfigError)) as raised:
            await ask(Service({"error": KEY}, *statuses), name, Query("x"))
        assert KEY not in str(raised.value)


# /retrieve

STORED = {"id": "1", "contents": '"Lima"\nThe capital.'}
CUSCO = {"id": "2", "title": "Cusco", "text": "A city."}
NESTED = {"result": [[{"document": STORED, "score": 2.5}, {"document": CUSCO, "score": 1.0}]]}
BARE = Hit("The capital.", "Lima", "", "1", document=STORED)
RETRIEVED = [replace(BARE, score=2.5), Hit("A city.", "Cusco", "", "2", 1.0)]


@pytest.mark.parametrize(
    ("dialect", "sent"), [("skyrl", {"query": "peru"}), ("search_r1", {"queries": ["peru"]})]
)
async def test_a_retriever_is_queried_in_both_dialects(dialect: Any, sent: dict[str, Any]) -> None:
    service = Service(NESTED, 500)
    async with serving(service) as url:
        for address in (url, url + "/retrieve"):
            backend = RemoteBackend(RemoteSearchConfig(address, dialect, QUICK))
            assert await backend.search(Query("peru", 2)) == RETRIEVED
            await backend.close()
    assert service.request.path == "/retrieve"
    assert service.json == {**sent, "topk": 2, "return_scores": True}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"result": NESTED["result"][0]}, RETRIEVED),  # one query, one list
        ({"result": [[STORED]]}, [BARE]),  # no scores
        ({"result": [[]]}, []),
        ({"result": []}, []),
    ],
)
def test_replies_of_retrievers_are_read_in_each_form(content: Any, expected: list[Any]) -> None:
    hits = retrieved_hits(Reply(200, json.dumps(content).encode()), "http://x")
    assert hits == expected


@pytest.mark.parametrize("reply", [Reply(200, b"{}"), Reply(200, b"no"), Reply(404, b"{}")])
def test_a_broken_retriever_is_a_failure(reply: Reply) -> None:
    with pytest.raises(InfraError, match=r"retriever http://x: .*expected"):
        retrieved_hits(reply, "http://x")
