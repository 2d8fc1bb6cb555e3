"""The shared cache of search traffic."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import ConfigError, DataError, InfraError
from agentenv.base.result_cache import ResultCache
from agentenv.envs.search.corpus import Hit, Query
from agentenv.envs.search.providers import HttpBackend
from agentenv.envs.search.service import CachedBackend, read_arpo_cache
from agentenv.envs.web_search import search_config

# cache


async def test_the_cache_is_kept_and_shared(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cache.db"
    cache = ResultCache(path, max_memory_entries=2)
    for number in range(10):
        cache.put(str(number), b"%d" % number)
    assert [cache.get(str(number), bytes) for number in range(10)] == [b"%d" % n for n in range(10)]
    other = ResultCache(path)
    await cache.close()
    await cache.close()
    assert other.get("7", bytes) == b"7"  # written by another, read by one that was open before
    assert other.get("nothing", bytes) is None
    assert other.stats() == {"cache/num_hits": 1, "cache/num_misses": 1}
    await other.close()


async def test_a_cache_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cache.db"
    path.write_text("this is no database" * 100)
    with pytest.raises(ConfigError, match=r"search\.cache: .*cache\.db: .*expected"):
        ResultCache(path)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


async def test_damaged_pages_are_misses_and_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cache.db"
    cache = ResultCache(path)
    for number in range(300):
        cache.put(str(number), b"%d" % number * 200)
    await cache.close()
    data = bytearray(path.read_bytes())
    for start in range(3 * 4096, len(data), 7 * 4096):
        data[start : start + 4096] = b"\xa5" * 4096
    path.write_bytes(data)
    cache = ResultCache(path)
    found = [cache.get(str(number), bytes) for number in range(300)]
    assert {value for value in found if value is not None} < {b"%d" % n * 200 for n in range(300)}
    assert 0 < found.count(None) < 300
    (warning,) = warnings(caplog)
    assert "search.cache" in warning
    assert "cache.db is damaged" in warning
    cache.put("0", b"new")
    assert cache.get("0", bytes) == b"new"
    await cache.close()


async def test_a_damaged_schema_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """SQLite's message about it quotes bytes that are no text."""
    path = tmp_path / "cache.db"
    cache = ResultCache(path)
    cache.put("a", b"value")
    await cache.close()
    data = bytearray(path.read_bytes())
    data[4082:4091] = b"\xff" * 9
    path.write_bytes(data)
    cache = ResultCache(path)
    (warning,) = warnings(caplog)
    assert "cache.db is unusable" in warning
    cache.put("a", b"new")
    assert cache.get("a", bytes) == b"new"
    await cache.close()
    assert path.read_bytes() == data


@pytest.mark.parametrize("value", [b'[{"another": "form"}]', b"\xff", b"[" * 5000, "text", 5, None])
async def test_a_malformed_entry_is_fetched_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: Any
) -> None:
    path, backend = tmp_path / "cache.db", Counting([Hit("Lima")])
    first = CachedBackend("test", backend, ResultCache(path))
    await first.search(Query("peru"))
    await first.cache.close()
    with sqlite3.connect(path) as file:
        file.execute("UPDATE entries SET value = ?", (value,))
    file.close()
    again = CachedBackend("test", backend, ResultCache(path))
    assert await again.search(Query("peru")) == [Hit("Lima")] == await again.search(Query("peru"))
    assert backend.num_calls == 2
    assert again.cache.stats() == {"cache/num_hits": 1, "cache/num_misses": 1}
    assert len(warnings(caplog)) == 1
    await again.cache.close()


@pytest.mark.parametrize(
    ("statement", "problem"),
    [
        ("PRAGMA user_version = 99", "of version 99, not 2"),
        ("ALTER TABLE entries RENAME COLUMN value TO content", "no such column: value"),
    ],
)
async def test_a_file_of_another_version_is_not_changed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, statement: str, problem: str
) -> None:
    path = tmp_path / "cache.db"
    cache = ResultCache(path)
    cache.put("a", b"1")
    await cache.close()
    with sqlite3.connect(path) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (2,)
        file.execute(statement)
    file.close()
    cache = ResultCache(path)
    assert cache.get("a", bytes) is None
    cache.put("a", b"2")
    assert cache.get("a", bytes) == b"2"
    await cache.close()
    assert problem in warnings(caplog)[0]
    with sqlite3.connect(path) as file:
        assert file.execute("SELECT * FROM entries").fetchone()[1] == b"1"
    file.close()


class Counting(HttpBackend):
    def __init__(self, hits: list[Hit], failures: int = 0) -> None:
        self.hits, self.failures, self.num_calls = hits, failures, 0

    async def search(self, query: Query) -> list[Hit]:
        self.num_calls += 1
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise InfraError("status 429")
        return self.hits

    async def close(self) -> None:
        pass


async def test_answers_are_cached_and_failures_are_not() -> None:
    backend = Counting([Hit("Lima", "t", "u", "i", 0.5)], failures=1)
    cached = CachedBackend("test", backend, ResultCache())
    with pytest.raises(InfraError):
        await cached.search(Query("peru"))
    first = await cached.search(Query("peru"))
    assert first == await cached.search(Query("peru")) == backend.hits
    assert backend.num_calls == 2
    await cached.search(Query("peru", market="zh-CN"))
    assert backend.num_calls == 3
    await cached.close()


@pytest.mark.parametrize(("hits", "lasts"), [([], True), ([Hit("Lima")], False)])
async def test_empty_results_and_those_without_a_lasting_name_are_cached_for_the_run(
    tmp_path: Path, hits: list[Hit], lasts: bool
) -> None:
    backend = Counting(hits)
    for number in (1, 2):
        cached = CachedBackend("test", backend, ResultCache(tmp_path / "c.db"), lasts=lasts)
        assert await cached.search(Query("x")) == await cached.search(Query("x")) == hits
        assert backend.num_calls == number
        await cached.cache.close()


def name_of(**keys: object) -> tuple[str, bool]:
    config = search_config({"backend": keys}).backend
    return config.cache_name, config.cache_lasts


def test_each_setting_that_changes_results_changes_their_name(tmp_path: Path) -> None:
    index = tmp_path / "index"
    faiss = {"name": "faiss", "index": str(index), "corpus": "c.jsonl", "encoder": "e5"}
    names = [name_of(**faiss)]
    index.write_bytes(b"1")
    names += [name_of(**faiss), name_of(**faiss, prefix="")]
    names += [name_of(**faiss, pooling="cls"), name_of(**faiss | {"corpus": "d.jsonl"})]
    index.write_bytes(b"12")
    names += [name_of(**faiss)]
    one = {"name": "web", "provider": "searxng", "url": "http://me:s3cret@one.test"}
    names += [name_of(**one), name_of(**one | {"url": "http://two.test"})]
    remote = {"name": "remote", "url": "http://me:s3cret@one.test"}
    names += [name_of(**remote), name_of(**remote, corpus="wiki"), name_of(**remote, corpus="x")]
    names += [name_of(**remote, dialect="skyrl")]
    assert len(set(names)) == len(names)
    assert "s3cret" not in str(names)
    assert [name for name, lasts in names if not lasts] == [names[-4][0], names[-1][0]]


async def test_a_cache_of_arpo_is_imported(tmp_path: Path) -> None:
    entries = {
        "amy smart": "Page 1: The film Page 7: is\nof three segments \nPage 2: Nov 5",
        "nothing": "No search results found.",
    }
    path = tmp_path / "search_cache.json"
    path.write_text(json.dumps(entries))
    backend = Counting([Hit("fetched")])
    cached = CachedBackend("test", backend, ResultCache(tmp_path / "c.db"), path)
    await cached.start()
    first, second = await cached.search(Query("amy smart"))
    assert (first.text, second.text) == ("The film Page 7: is\nof three segments", "Nov 5")
    assert len(await cached.search(Query('"amy" smart"', max_results=1))) == 1
    assert await cached.search(Query("nothing")) == []
    assert backend.num_calls == 0
    assert await cached.search(Query("other")) == [Hit("fetched")]
    await cached.cache.close()
    again = ResultCache(tmp_path / "c.db")
    assert again.get("arpo:nothing", bytes) == b"No search results found."
    await again.close()


@pytest.mark.parametrize("text", ["[]", "{", '{"a": 1}'])
def test_a_bad_cache_of_arpo_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "search_cache.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"search_cache\.json"):
        read_arpo_cache(path)
