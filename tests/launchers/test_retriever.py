"""The retriever serves a corpus to our own client and to others', in both dialects."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer

import launchers.retriever
from agentenv.errors import ConfigError, InfraError
from envs.search.bm25 import BM25Backend
from envs.search.corpus import CORPUS_SCHEME, Query
from envs.search.providers import HttpBackend, RemoteBackend, RemoteSearchConfig
from launchers.retriever import Retriever, RetrieverConfig, main, read_config

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


@pytest.fixture
async def client(corpus: Path) -> AsyncIterator[Any]:
    backend = BM25Backend(corpus)
    async with TestClient(TestServer(Retriever(RetrieverConfig(), backend).app())) as client:
        yield client
    await backend.close()


async def retrieve(client: Any, body: Any) -> Any:
    async with client.post("/retrieve", json=body) as response:
        return response.status, await response.json()


async def test_both_dialects(client: Any) -> None:
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


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({}, "one of query and queries"),
        ({"query": "a", "queries": ["a"]}, "one of query and queries"),
        ({"query": 3}, "Expected `str"),
        ({"query": "a", "topk": 0}, ">= 1"),
        ({"queries": ["a"] * 513}, "513 queries, at most 512"),
        ("text", "Expected `object`"),
    ],
)
async def test_a_wrong_request_is_told_what_is_expected(client: Any, body: Any, says: str) -> None:
    status, found = await retrieve(client, body)
    assert status == 400
    assert says in found["error"]
    assert 'expected {"queries"' in found["error"]


async def test_a_failing_backend_is_unavailable_and_not_empty() -> None:
    class Failing(HttpBackend):
        def __init__(self) -> None:
            pass

        async def search(self, query: Query) -> Any:
            raise InfraError("down")

    server = TestServer(Retriever(RetrieverConfig(), Failing()).app())
    async with TestClient(server) as client:
        assert await retrieve(client, {"query": "a"}) == (503, {"error": "down"})


@pytest.mark.parametrize("dialect", ["search_r1", "skyrl"])
async def test_our_client_finds_what_the_corpus_holds(client: Any, dialect: Any) -> None:
    backend = RemoteBackend(RemoteSearchConfig(str(client.make_url("/")), dialect))
    (hit,) = await backend.search(Query("peru", 1))
    assert (hit.id, hit.title, hit.text) == ("lima", "Lima", ROWS[0]["text"])
    assert not hit.url.startswith(CORPUS_SCHEME)  # no document is to be had from afar
    await backend.close()


def test_the_command_serves_until_it_is_told_to_stop(corpus: Path) -> None:
    command = [sys.executable, str(Path(launchers.retriever.__file__))]
    with subprocess.Popen(
        [*command, "port=0", f"backend.corpus={corpus}"], stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        try:
            address = ""
            for line in process.stderr:
                if line.startswith("serving on "):
                    address = line.removeprefix("serving on ").strip()
                    break
            found = asyncio.run(_post(address, {"query": "norway"}))
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert found["result"][0][0]["document"]["id"] == "oslo"


async def _post(address: str, body: Any) -> Any:
    async with aiohttp.ClientSession() as session, session.post(address, json=body) as response:
        return await response.json()


def test_its_configuration(tmp_path: Path) -> None:
    path = tmp_path / "retriever.toml"
    path.write_text('port = 9000\n[backend]\nname = "bm25"\ncorpus = "a.jsonl"\n')
    assert read_config([str(path), "topk=3"]) == RetrieverConfig(
        backend=read_config(["backend.corpus=a.jsonl"]).backend, port=9000, topk=3
    )
    with pytest.raises(ConfigError, match="prot"):
        read_config(["prot=1"])


def test_errors_and_help_of_the_command(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert main(["backend.corpus=/nowhere.jsonl", "port=0"]) == 2
    assert "error: corpus /nowhere.jsonl cannot be read" in caplog.text
    assert main(["--help"]) == 0
    assert "backend[faiss].pooling" in caplog.text
