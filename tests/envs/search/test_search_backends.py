"""Embedded BM25 over a corpus, and what the backends share."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import ConfigError
from agentenv.envs.search.bm25 import BM25Backend, BM25Index
from agentenv.envs.search.corpus import SHIPPED_CORPUS, Hit, Passage, Query, market_of, read_corpus
from agentenv.envs.search.faiss_index import FaissConfig, VectorEncoder
from agentenv.envs.web_search import search_config
from tests.support.begun import closing

XQUAD_QUESTION = "How many points did the Panthers defense surrender?"


def corpus(directory: Path, rows: list[dict[str, Any]]) -> Path:
    path = directory / "corpus.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


async def test_the_shipped_corpus_answers_a_question() -> None:
    async with closing(BM25Backend(SHIPPED_CORPUS)) as backend:
        hits = await backend.search(Query(XQUAD_QUESTION, max_results=3))
        assert "308 points" in hits[0].text
        assert hits[0].score >= hits[1].score >= hits[2].score > 0
        whole = await backend.document(hits[0].url)
        assert whole is not None
        assert whole.text == hits[0].text
        assert await backend.document("corpus:nothing") is None


def test_the_shipped_corpus_is_attributed() -> None:
    passages = read_corpus(SHIPPED_CORPUS)
    sources = {passage.id.partition("-")[0] for passage in passages}
    note = (SHIPPED_CORPUS.parent / "LICENSES.md").read_text()
    assert sources == {"xquad", "clapnq"}
    assert all(f"`{source}-0`" in note for source in sources)
    assert f"{len(passages)} passages" in note


async def test_building_leaves_the_event_loop_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    ticked = asyncio.Event()

    def read(path: Path) -> list[Passage]:
        # returns only once the event loop has run something else
        asyncio.run_coroutine_threadsafe(_set(ticked), loop).result(timeout=600)
        return read_corpus(path)

    monkeypatch.setattr("agentenv.envs.search.bm25.read_corpus", read)
    path = corpus(tmp_path, [{"id": "a", "title": "", "text": "lima"}])
    async with closing(BM25Backend(path)) as backend:
        first, second = await asyncio.gather(*(backend.search(Query("lima")) for _ in range(2)))
        assert first == second == [Hit("lima", "", "corpus:a", "a", first[0].score)]


async def _set(event: asyncio.Event) -> None:
    event.set()


async def test_a_cancelled_caller_does_not_stop_the_build(tmp_path: Path) -> None:
    path = corpus(tmp_path, [{"id": "a", "title": "", "text": "lima"}])
    async with closing(BM25Backend(path)) as backend:
        starting = asyncio.ensure_future(backend.start())
        await asyncio.sleep(0)
        starting.cancel()
        assert [hit.id for hit in await backend.search(Query("lima"))] == ["a"]


BEIJING = "\u5317\u4eac\u662f\u4e2d\u56fd\u7684\u9996\u90fd"  # Beijing is the capital of China
TOKYO = "\u6771\u4eac\u306f\u65e5\u672c\u306e\u9996\u90fd"  # Tokyo is the capital of Japan
NANJING = "\u5357\u4eac\u662f\u4e2d\u56fd\u7684\u57ce\u5e02"  # Nanjing is a city in China


async def test_chinese_is_found_by_its_words(tmp_path: Path) -> None:
    texts = {"nanjing": NANJING, "tokyo": TOKYO, "beijing": BEIJING}
    rows = [{"id": name, "title": "", "text": text} for name, text in texts.items()]
    async with closing(BM25Backend(corpus(tmp_path, rows))) as backend:
        asked = {
            "\u5317\u4eac": "beijing",
            "\u4e2d\u56fd\u9996\u90fd": "beijing",  # "capital of China", nowhere in one piece
            "\u65e5\u672c": "tokyo",
            "\u5357": "nanjing",
        }
        for query, expected in asked.items():
            assert (await backend.search(Query(query)))[0].id == expected


@pytest.mark.parametrize(
    ("text", "market", "expected"),
    [
        ("capital of Peru", "auto", "en-US"),
        (BEIJING, "auto", "zh-CN"),
        (TOKYO, "auto", "ja-JP"),
        ("\uc11c\uc6b8", "auto", "ko-KR"),
        (BEIJING, "en-GB", "en-GB"),
    ],
)
def test_the_market_follows_the_script_of_the_query(text: str, market: str, expected: str) -> None:
    assert market_of(text, market) == expected


@pytest.mark.parametrize(("key", "value"), [("market", "english"), ("country", "China")])
def test_a_wrong_market_or_country_is_refused(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf"search.*{key}: .*regex.*{value}"):
        search_config({key: value})


@pytest.mark.parametrize(("module", "extra"), [("bm25s", "search"), ("torch", "train")])
def test_each_backend_names_the_extra_of_a_missing_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    faiss = FaissConfig(index=str(tmp_path), corpus=str(tmp_path), encoder="e")
    build = {"bm25s": lambda: BM25Index([]), "torch": lambda: VectorEncoder(faiss)}[module]
    with pytest.raises(ConfigError, match=rf"requires the package '{module}'.*\[{extra}\]"):
        build()
