"""The retriever serves a corpus to our own client and to others', in both dialects."""

from __future__ import annotations

import json
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from agentenv.base.errors import ConfigError, InfraError, ToolError
from agentenv.base.types import Message, Task, ToolCall
from agentenv.contract.env import close_shared
from agentenv.envs.search.bm25 import BM25Backend
from agentenv.envs.search.corpus import CORPUS_SCHEME, Query, document_of
from agentenv.envs.search.faiss_index import FaissBackend
from agentenv.envs.search.providers import HttpBackend, RemoteBackend, RemoteSearchConfig
from agentenv.envs.web_search import WebSearchEnv
from agentenv.launchers.retriever import Retriever, RetrieverConfig, main, read_config
from tests.support.dense import TEXTS, make, save_encoder
from tests.support.retriever import interrupted
from tests.support.warehouse import ROOT

EVALUATION = tomllib.loads((ROOT / "configs" / "eval_tool_star.toml").read_text(encoding="utf-8"))

ROWS = [
    {"id": "lima", "title": "Lima", "text": "Lima is the capital of Peru."},
    {"id": "oslo", "title": "Oslo", "text": "Oslo is the capital of Norway."},
]
LIMA = {"id": "lima", "title": "Lima", "contents": '"Lima"\nLima is the capital of Peru.'}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)))
    return path


@asynccontextmanager
async def served(corpus: Any, **keys: Any) -> AsyncIterator[Any]:
    """A client of a retriever with a key."""
    config = RetrieverConfig(port=0, api_key_env="RETRIEVER_KEY", **keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RETRIEVER_KEY", "a-key")
        retriever = Retriever(config, corpus)
        await retriever.start()
        url, headers = f"http://127.0.0.1:{retriever.port}", {"x-api-key": "a-key"}
        async with aiohttp.ClientSession(url, headers=headers) as client:
            yield client
    await retriever.close()
    await corpus.close()


def remote(client: Any, dialect: Any = "search_r1") -> RemoteBackend:
    url = str(client._base_url)
    return RemoteBackend(RemoteSearchConfig(url, dialect, api_key_env="RETRIEVER_KEY"))


@pytest.fixture
async def client(corpus: Path) -> AsyncIterator[Any]:
    async with served(BM25Backend(corpus)) as client:
        yield client


async def post(client: Any, path: str, body: Any) -> Any:
    async with client.post(path, json=body) as response:
        return response.status, await response.json()


async def retrieve(client: Any, body: Any) -> Any:
    return await post(client, "/retrieve", body)


async def test_the_retriever_serves_both_dialects(client: Any) -> None:
    status, found = await retrieve(client, {"queries": ["peru", "norway"], "topk": 1})
    assert status == 200
    assert [rows[0]["document"]["id"] for rows in found["result"]] == ["lima", "oslo"]
    assert found["result"][0] == [{"document": LIMA}]
    body = {"query": "peru capital", "topk": 2, "return_scores": True}
    status, found = await retrieve(client, body)
    first, second = found["result"][0]
    assert first["document"] == LIMA
    assert first["score"] > second["score"] > 0
    assert await retrieve(client, {"query": "zebra"}) == (200, {"result": [[]]})
    async with client.get("/health") as response:
        assert await response.json() == {"status": "ok"}


async def test_documents_come_back_as_stored(tmp_path: Path) -> None:
    """To clients and, over a remote backend, as the contents that the policy reads."""
    texts = ['"Lima"\nof Peru.', "Lima\n\nPeru", "Peru alone", '""\nPeru', " Peru \n"]
    rows: list[Any] = [{"id": place, "contents": text} for place, text in enumerate(texts)]
    rows[4] |= {"id": "4", "title": "The capital", "url": "http://lima", "document": [1]}
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    async with served(BM25Backend(path)) as client:
        _, found = await post(client, "/search", {"query": "peru"})
        _, again = await retrieve(client, {"query": "peru"})
        assert [{"document": one} for one in found] == again["result"][0]
        assert sorted(found, key=lambda one: int(one["id"])) == rows
        backend = remote(client, "tool_star")
        hits = await backend.search(Query("peru", 9))
        await backend.close()
        assert sorted(document_of(hit)["contents"] for hit in hits) == sorted(texts)


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/retrieve", {}, "one of query and queries"),
        ("/retrieve", {"query": "a", "queries": ["a"]}, "one of query and queries"),
        ("/retrieve", {"query": 3}, "Expected `str"),
        ("/retrieve", {"query": "a", "topk": 0}, ">= 1"),
        ("/retrieve", {"queries": ["a"] * 513}, "513 queries, at most 512"),
        ("/retrieve", "text", "Expected `object`"),
        ("/search", {"query": ["a"]}, "query is a list"),
        ("/search", {"query": " "}, "query is empty"),
        ("/search", {}, "missing required field `query`"),
        ("/batch_search", {"query": "a"}, "query is not a list"),
        ("/batch_search", {"query": ["a"], "top_n": 0}, ">= 1"),
        ("/batch_search", {"query": ["a"] * 513}, "513 queries, at most 512"),
    ],
)
async def test_an_invalid_request_is_refused_with_the_expected_form(
    client: Any, path: str, body: Any, says: str
) -> None:
    status, found = await post(client, path, body)
    assert status == 400
    assert says in found["error"]["message"]
    assert 'expected {"quer' in found["error"]["message"]


async def test_a_failing_backend_is_unavailable_and_not_empty() -> None:
    class Failing(HttpBackend):
        def __init__(self) -> None:
            pass

        async def search(self, query: Query) -> Any:
            raise ToolError("too long") if query.text == "long" else InfraError("down")

        async def close(self) -> None:
            pass

    async with served(Failing()) as client:
        for text, status, says in (("a", 503, "down"), ("long", 400, "too long")):
            found = await retrieve(client, {"query": text})
            assert (found[0], found[1]["error"]["message"]) == (status, says)
        backend = remote(client)
        with pytest.raises(ToolError, match="with status 400"):
            await backend.search(Query("long"))
        await backend.close()


@pytest.mark.parametrize("dialect", ["search_r1", "skyrl", "tool_star"])
async def test_our_client_finds_documents_of_the_corpus(client: Any, dialect: Any) -> None:
    backend = remote(client, dialect)
    (hit,) = await backend.search(Query("peru", 1))
    assert (hit.id, hit.title, hit.text) == ("lima", "Lima", ROWS[0]["text"])
    assert not hit.url.startswith(CORPUS_SCHEME)  # no document is to be had from afar
    await backend.close()


# Tool-Star's server (evaluation/search/host_wiki.py at d12222c): documents of id and contents


async def test_the_dialects_of_tool_star(client: Any) -> None:
    """As its client reads them: `contents` of each document of each query."""
    told = {"id": "lima", "contents": LIMA["contents"]}
    body = {"query": ["peru", "norway"], "top_n": 1}
    status, found = await post(client, "/batch_search", body)
    assert (status, found[0]) == (200, [told])
    assert [rows[0]["id"] for rows in found] == ["lima", "oslo"]
    status, (same, scores) = await post(client, "/batch_search", {**body, "return_score": True})
    assert same == found
    assert [len(values) for values in scores] == [1, 1]
    assert await post(client, "/search", {"query": "peru", "top_n": 1}) == (200, [told])
    body = {"query": "capital", "return_score": True}
    status, (documents, scores) = await post(client, "/search", body)
    assert sorted(one["id"] for one in documents) == ["lima", "oslo"]
    assert len(scores) == 2
    assert scores[0] >= scores[1] > 0


async def test_the_sets_of_tool_star_get_e5_and_faiss_passages_over_the_server(
    tmp_path: Path,
) -> None:
    """The whole path of configs/eval_tool_star.toml with random weights: index, server, remote
    backend, and the observation of the policy, which is `contents` separated by blank lines."""
    pytest.importorskip("faiss")
    (tmp_path / "encoder").mkdir()
    keys = make(tmp_path, save_encoder(tmp_path / "encoder"))
    config = EVALUATION["sets"]["hotpotqa"]["search"]
    async with served(FaissBackend(keys), backend=keys) as client:
        config["backend"] |= {"url": str(client._base_url), "api_key_env": "RETRIEVER_KEY"}
        env = WebSearchEnv(Task("t", "e", TEXTS[1], ("norway",)), config, open_page=False)
        await env.reset(seed=0)
        asked = Message("assistant", "", (ToolCall("search", {"query": TEXTS[1]}),))
        observation, *_ = await env.step(asked)
        passages = observation[0].content.split("\n\n")
        assert passages[0] == f'"T1"\n{TEXTS[1]}'
        assert sorted(passages) == [f'"T{n}"\n{text}' for n, text in enumerate(TEXTS)]
        await env.close()
        await close_shared()


@pytest.mark.parametrize("reply", ["{}", "[[], []]", '[[[{"id": "a"}]], [[1]]]'])
async def test_a_reply_without_a_batch_is_an_infrastructure_error(reply: str) -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text=reply)

    app = web.Application()
    app.router.add_post("/batch_search", answer)
    async with TestServer(app) as server:
        backend = RemoteBackend(RemoteSearchConfig(str(server.make_url("/")), "tool_star"))
        with pytest.raises(InfraError, match="contents"):
            await backend.search(Query("a"))
        await backend.close()


def test_the_configuration_of_the_retriever(tmp_path: Path) -> None:
    path = tmp_path / "retriever.toml"
    path.write_text('port = 9000\n[backend]\nname = "bm25"\ncorpus = "a.jsonl"\n')
    assert read_config([str(path), "topk=3"]) == RetrieverConfig(
        backend=read_config(["backend.corpus=a.jsonl"]).backend, port=9000, topk=3
    )
    with pytest.raises(ConfigError, match="prot"):
        read_config(["prot=1"])


def test_the_address_and_the_next_command_are_printed(
    corpus: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """And nothing of other packages before, such as the loggers of BM25."""
    first, *rest = interrupted("retriever", f"backend.corpus={corpus}", at="search.backend")
    assert capfd.readouterr().err == ""
    assert first.startswith("serving on http://127.0.0.1:")
    address = first.split()[2]
    assert f"{address}/retrieve" in rest[1]
    assert f'url = "{address}"' in rest[3]


def test_errors_and_help_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["backend.corpus=/nowhere.jsonl", "port=0"]) == 2
    assert "corpus /nowhere.jsonl cannot" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help-keys"])
    assert "backend[faiss].pooling" in capsys.readouterr().out
