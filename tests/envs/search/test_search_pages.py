"""From pages to text: extraction, reading, and which part the policy gets."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web

from agentenv.base.errors import ToolError
from agentenv.base.result_cache import ResultCache
from agentenv.envs.search.pages import PageReader, PageText
from agentenv.envs.search.service import passages, window
from agentenv.envs.search.upstream import Reply
from tests.envs.search_server import ONLY_127_0_0_1, PAGE, serving

# extraction


def test_the_text_of_a_page_has_no_boilerplate() -> None:
    text_of = PageText()
    text = text_of({"kind": "text/html", "body": PAGE.encode()})
    assert "founded in 1535" in text
    assert "ten million" in text
    for junk in ("track", "Home", "rights"):
        assert junk not in text
    assert text_of({"kind": "text/html", "body": b"no main text"}) == "no main text"


async def test_pages_are_extracted_in_workers() -> None:
    extractor = PageReader(ONLY_127_0_0_1, ResultCache(), 60)
    umlauts = "<html><p>Gr\u00f6\u00dfe</p>" + "<p>L\u00e4nge und Breite</p>" * 3
    try:
        page = Reply(200, umlauts.encode("latin-1"), "text/html; charset=latin-1", "http://x/")
        assert "L\u00e4nge und Breite" in await extractor.extract(page)
        plain = Reply(200, "a <b> \u4eac".encode(), "text/plain", "http://x/")
        assert await extractor.extract(plain) == "a <b> \u4eac"
        nested = Reply(200, b"<div>" * 100_000 + b"deep", "text/html", "http://x/")
        assert (await extractor.extract(nested)).strip() in ("", "deep")
    finally:
        await extractor.close()


async def test_a_page_that_hangs_or_kills_its_worker_cannot_be_read() -> None:
    extractor = PageReader(ONLY_127_0_0_1, ResultCache(), 0.3, "tests.support.jobs:read")

    def page(body: bytes) -> Reply:
        return Reply(200, body, "text/html", "http://x/")

    try:
        with pytest.raises(ToolError, match="http://x/ could not"):
            await extractor.extract(page(b"hang"))
        with pytest.raises(ToolError, match="http://x/ could not"):
            await extractor.extract(page(b"die"))
        assert extractor.stats() == {"pages/num_jobs": 2, "pages/num_killed": 2}
        assert await extractor.extract(page(b"fine")) == "fine"
    finally:
        await extractor.close()


# reading


async def test_a_page_is_fetched_once() -> None:
    num_requests = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal num_requests
        num_requests += 1
        if request.path == "/gone":
            return web.Response(status=404)
        return web.Response(text=PAGE, content_type="text/html")

    async with serving(answer) as url:
        reader = PageReader(ONLY_127_0_0_1, ResultCache())
        texts = await asyncio.gather(*(reader.text(url) for _ in range(5)))
        assert await reader.text(url) == texts[0]
        with pytest.raises(ToolError, match="with status 404"):
            await reader.text(f"{url}/gone")
        await reader.close()
    assert num_requests == 2
    assert "founded in 1535" in texts[0]


# parts of a page

LONG = "\n".join(f"Line {number} speaks of nothing at all." for number in range(400))
NEEDLE = "The treaty of Tordesillas was signed in June 1494."
WITH_NEEDLE = f"{LONG}\n{NEEDLE}\n{LONG}"


def test_the_window_surrounds_the_snippet() -> None:
    found = window(WITH_NEEDLE, "... treaty of Tordesillas, signed 1494 ...", 3000)
    assert NEEDLE in found
    assert len(found) == 3000
    assert 500 < found.index(NEEDLE) < 2500  # with text on both sides


@pytest.mark.parametrize("snippet", ["", "something quite unlike this page"])
def test_the_window_is_the_beginning_when_the_snippet_is_not_found(snippet: str) -> None:
    assert window(WITH_NEEDLE, snippet, 1000) == WITH_NEEDLE[:1000]
    assert window("short", snippet, 1000) == "short"


def test_passages_of_a_page_match_the_query() -> None:
    second = "Tordesillas lies in Spain."
    found = passages(f"{WITH_NEEDLE}\n{second}\n{LONG}", "Tordesillas treaty", 2000)
    assert NEEDLE in found
    assert second in found
    assert " ... " in found
    assert found.index(NEEDLE) < found.index(second)
    assert len(found) <= 2000
    assert passages(WITH_NEEDLE, "zebra", 300) == WITH_NEEDLE[:300]
    assert passages("short", "zebra", 300) == "short"


def test_a_chinese_page_without_spaces_has_passages_too() -> None:
    text = "\u7532\u4e59\u4e19\u4e01" * 1000 + "\u5317\u4eac\u5927\u5b66" + "\u7532" * 4000
    assert "\u5317\u4eac\u5927\u5b66" in passages(text, "\u5317\u4eac\u5927\u5b66", 1200)
