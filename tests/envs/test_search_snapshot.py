"""The frozen web: a run is recorded, met again without a network, and says what it missed."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest
from aiohttp import web

from agentenv.envs.search.corpus import Hit, Query
from agentenv.envs.search.keys import SearchConfig
from agentenv.envs.search.service import Episode, SearchService
from agentenv.envs.search.snapshot import Snapshot
from agentenv.envs.web_search import WebSearchEnv, search_config
from agentenv.errors import AgentEnvError, DataError, EnvError, InfraError, ToolError
from agentenv.launchers.snapshot import main
from agentenv.types import Message, Task, ToolCall
from tests.envs.search_server import serving
from tests.envs.search_site import SNIPPET, Web


@contextmanager
def no_network() -> Iterator[None]:
    """Whoever resolves a name or opens a connection meanwhile gets an AssertionError."""

    def forbidden(*arguments: Any, **keys: Any) -> NoReturn:
        raise AssertionError(f"the network was touched: {arguments}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", forbidden)
        patch.setattr(socket.socket, "connect_ex", forbidden)
        patch.setattr(socket, "getaddrinfo", forbidden)
        yield


async def played(config: SearchConfig, site: str) -> list[str]:
    """What a policy reads that searches, opens three pages and searches again."""
    service = SearchService(config)
    episode = Episode()

    async def said(call: Any) -> str:
        try:
            return str((await call).text)
        except ToolError as error:
            return f"{type(error).__name__}: {error}"

    try:
        await service.start()
        return [
            await said(service.search("lima", episode)),
            await said(service.open_page(f"{site}/article", "founded", episode)),
            await said(service.open_page(f"{site}/gone", "", episode)),
            await said(service.open_page("file:///etc/passwd", "", episode)),
            await said(service.search("?", episode)),
        ]
    finally:
        await service.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["snippets", "pages"])
async def test_a_run_is_recorded_and_met_again_without_a_network(mode: str, tmp_path: Path) -> None:
    path, site = tmp_path / "new" / "lima.jsonl", Web()
    keys: dict[str, Any] = {"mode": mode, "snapshot": str(path)}
    async with serving(site) as site.url:
        recorded = await played(site.config(snapshot_mode="record", **keys), site.url)
        with no_network(), pytest.raises(AssertionError, match="network was touched"):
            await played(site.config(), site.url)
    assert SNIPPET in recorded[0]
    assert recorded[2] == f"ToolError: {site.url}/gone answered with status 404."
    assert recorded[4] == "No search results found."
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    with no_network():
        config = site.config(snapshot_sha256=digest, **keys)
        assert await played(config, site.url) == recorded
        service = SearchService(config)
        await service.start()
        with pytest.raises(
            InfraError, match=r"lima\.jsonl is a frozen web without search 'oslo' \(en-US\)"
        ):
            await service.search("oslo", Episode())
        with pytest.raises(InfraError, match=r"without page http://a\.test/"):
            await service.open_page("http://a.test/", "", Episode())
        assert service.stats()["snapshot/num_missed"] == 2
        await service.close()


@pytest.mark.slow
async def test_a_run_tells_what_it_missed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, site: Web
) -> None:
    path = tmp_path / "lima.jsonl"
    await played(site.config(snapshot=str(path), snapshot_mode="record"), site.url)
    service = SearchService(site.config(snapshot=str(path), on_miss="tell"))
    await service.start()
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    assert f"'lima' with 2 searches and 3 pages; with search.snapshot_sha256 = \"{digest}\"" in (
        caplog.text
    )
    for _ in range(2):
        with pytest.raises(ToolError, match="not part of the web that can be reached") as told:
            await service.search("oslo", Episode())
        assert told.value.info == {"missed": "search 'oslo' (en-US)"}
    with caplog.at_level(logging.WARNING):
        await service.close()
    assert "lima.jsonl missed 1 searches and pages:\n  search 'oslo' (en-US)" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("on_miss", ["fail", "tell"])
async def test_a_miss_is_told_or_fails_the_rollout(on_miss: str, tmp_path: Path, site: Web) -> None:
    path = tmp_path / "lima.jsonl"
    await played(site.config(snapshot=str(path), snapshot_mode="record"), site.url)
    task = Task("1", "agentenv/WebSearch-v0", "When?", ("1535",))
    config = site.config(snapshot=str(path), on_miss=on_miss)
    env = WebSearchEnv(task, config, num_retries=0)
    await env.reset(seed=1)
    calls = [ToolCall("search", {"query": query}) for query in ("lima", "oslo")]
    action = Message("assistant", "", tool_calls=calls)
    if on_miss == "fail":
        with pytest.raises(EnvError, match=r"the tool 'search' failed .*without search 'oslo'"):
            await env.step(action)
    else:
        _, _, _, _, info = await env.step(action)
        found, missed = info["tool_calls"]
        assert (found["ok"], found["info"]["cached"]) == (True, True)
        assert (missed["ok"], missed["info"]) == (False, {"missed": "search 'oslo' (en-US)"})
    await env.close()


@pytest.mark.slow
async def test_what_the_cache_knows_is_recorded_too(tmp_path: Path, site: Web) -> None:
    path, cache = str(tmp_path / "lima.jsonl"), str(tmp_path / "cache.db")
    first = await played(site.config(cache=cache), site.url)
    num_searches = site.num_searches
    keys = {"cache": cache, "snapshot": path}
    assert await played(site.config(snapshot_mode="record", **keys), site.url) == first
    assert site.num_searches == num_searches
    assert await played(site.config(snapshot=path), site.url) == first


async def test_no_key_is_in_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "s3cret-key")

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["X-API-KEY"] == "s3cret-key"
        return web.json_response({"organic": []})

    async with serving(answer) as url:
        backend = {"name": "web", "provider": "serper", "url": url}
        keys = {"snapshot": str(tmp_path / "a.jsonl"), "snapshot_mode": "record"}
        service = SearchService(search_config({"backend": backend, **keys}))
        await service.search("lima", Episode())
        await service.close()
    text = (tmp_path / "a.jsonl").read_text()
    assert '"text":"lima"' in text
    assert "s3cret" not in text


# the file


async def fails() -> NoReturn:
    raise InfraError("status 503")


async def never() -> NoReturn:
    raise AssertionError("what was recorded was fetched")


def finding(*texts: str) -> Any:
    async def find() -> list[Hit]:
        return [Hit(text) for text in texts]

    return find


async def test_failures_are_not_kept_and_fewer_results_are_a_part_of_more(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tape = Snapshot(path, "record")
    with pytest.raises(InfraError):
        await tape.hits(Query("peru", 2), fails)
    with pytest.raises(InfraError):
        await tape.page("http://a.test/", fails)
    assert (tape.num_searches, tape.num_pages) == (0, 0)
    await tape.hits(Query("peru", 2), finding("a", "b"))
    assert len(await tape.hits(Query("peru", 3), finding("a", "b", "c"))) == 3
    assert len(await tape.hits(Query("peru", 2), never)) == 2
    await tape.hits(Query("few", 5), finding("a"))
    tape.close()
    tape.close()
    again = Snapshot(path)
    for most in (1, 2, 3):
        assert len(await again.hits(Query("peru", most), never)) == most
    with pytest.raises(InfraError):
        await again.hits(Query("peru", 4), never)
    with pytest.raises(InfraError):
        await again.hits(Query("peru", 1, "zh-CN"), never)
    assert await again.hits(Query("few", 99), never) == [Hit("a")]
    again.close()


async def test_two_that_record_into_one_file_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    tapes = [Snapshot(path, "record") for _ in range(2)]

    async def text(number: int) -> str:
        return f"text {number} \U0001f600\ud800"

    for number in range(6):
        await tapes[number % 2].page(f"http://a.test/{number}", lambda n=number: text(n))
    for tape in tapes:
        tape.close()
    again = Snapshot(path)
    for number in range(6):
        assert await again.page(f"http://a.test/{number}", never) == f"text {number} \U0001f600?"
    again.close()


async def test_a_cut_row_is_left_out_and_recorded_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As a recording leaves it that is killed while it writes."""
    path = tmp_path / "a.jsonl"
    tape = Snapshot(path, "record")
    for query in ("peru", "chile"):
        await tape.hits(Query(query), finding(query))
    tape.close()
    path.write_bytes(path.read_bytes()[:-7])
    read = Snapshot(path)
    assert await read.hits(Query("peru"), never) == [Hit("peru")]
    with pytest.raises(InfraError, match="without search 'chile'"):
        await read.hits(Query("chile"), never)
    read.close()
    assert "row 3 is cut off" in caplog.text
    more = Snapshot(path, "record")
    assert await more.hits(Query("chile"), finding("again")) == [Hit("again")]
    more.close()
    assert len([json.loads(line) for line in path.read_bytes().splitlines()]) == 3


async def test_a_file_that_changes_meanwhile_is_a_failure_of_machinery(tmp_path: Path) -> None:
    tape = Snapshot(tmp_path / "a.jsonl", "record")
    await tape.hits(Query("peru"), finding("a"))
    for damage in (b"", b"?" * 1000):
        (tmp_path / "a.jsonl").write_bytes(damage)
        with pytest.raises(InfraError, match="was changed meanwhile"):
            await tape.hits(Query("peru"), never)
    tape.close()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", None),
        ("{\n", "row 1: .*expected a row of a snapshot"),
        ('{"row": "page", "url": "http://a.test/"}\n', "row 1: expected the head"),
        ('{"row": "snapshot", "name": "a", "format": 9}\n', "is of format 9; expected 1"),
        ('{"row": "snapshot", "name": "a"}\n{"row": "page"}\n', "row 2: .*url.*expected"),
        ('{"row": "snapshot", "name": "a"}\n' + "[" * 100_000 + "\n", "row 2: .*expected"),
        ('{"row": "snapshot", "name": "a"}\n"\udcff"\n', "row 2: .*expected"),
    ],
)
async def test_a_bad_file_is_refused(tmp_path: Path, text: str, says: str | None) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.encode(errors="surrogateescape"))
    tape = Snapshot(path)
    with pytest.raises(DataError, match=says or "row 1: expected the head"):
        await tape.start()
    tape.close()


async def test_another_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.*there is no such file; expected one that was"):
        Snapshot(tmp_path / "nowhere")
    path = tmp_path / "a.jsonl"
    tape = Snapshot(path, "record", backend="serper", reader="direct")
    await tape.start()
    tape.close()
    for wrong, says in [
        (Snapshot(path, sha256="00"), "has the sha256 [0-9a-f]{64}, expected 00"),
        (Snapshot(path, "record", backend="brave", reader="jina"), "was recorded of serper and"),
    ]:
        with pytest.raises(AgentEnvError, match=says):
            await wrong.start()
        wrong.close()


# what it covers


MISSES = ("search 'lima' (en-US)", "search 'peru' (en-US)", "page http://a.test/")


def test_the_command_says_what_a_snapshot_covers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def record() -> None:
        tape = Snapshot(tmp_path / "a.jsonl", "record", backend="serper", reader="direct")

        async def page() -> str:
            return "text"

        async def hits() -> list[Hit]:
            return [Hit("x", url="http://a.test/"), Hit("y", url="http://b.test/")]

        await tape.hits(Query("peru"), hits)
        await tape.page("http://a.test/", page)
        tape.close()

    asyncio.run(record())
    assert main([str(tmp_path / "a.jsonl")]) == 0
    told = capsys.readouterr().out
    assert hashlib.sha256((tmp_path / "a.jsonl").read_bytes()).hexdigest() in told
    asked = [("search", {"query": one}) for one in ("peru", " peru", "oslo")]
    asked += [("open_page", {"url": one}) for one in ("http://a.test/", "http://c.test/")]
    calls = [{"name": name, "arguments": arguments} for name, arguments in [*asked, ("python", {})]]
    run = tmp_path / "run"
    run.mkdir()
    errors = [f"EnvError: {tmp_path} is a frozen web without {one}" for one in MISSES]
    rows = [{"tool_calls": calls}, {"loss": 1}, *({"error": error} for error in errors)]
    (run / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert main([str(tmp_path / "a.jsonl"), str(run)]) == 3
    told = capsys.readouterr().out
    for line in ("searches: 1 of 2", "pages: 1 of 2", "pages behind the results: 1 of 2"):
        assert line in told
    missing = [line.partition(": ")[2] for line in told.splitlines() if "missing" in line]
    assert missing == ["search 'oslo'", "page http://c.test/", "search 'lima' (en-US)"]
    assert main([str(tmp_path / "a.jsonl"), str(run / "nothing")]) == 2
