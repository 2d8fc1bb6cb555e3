"""From pages to text: extraction, reading, and which part the policy gets."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from agentenv.base.errors import ToolError
from agentenv.base.result_cache import ResultCache
from agentenv.contract.env import tally
from agentenv.envs.search.corpus import Hit
from agentenv.envs.search.pages import PageReader, PageText
from agentenv.envs.search.service import SearchService, passages, window
from agentenv.envs.search.upstream import Reply
from tests.envs.search_server import ONLY_127_0_0_1, PAGE
from tests.envs.search_site import SNIPPET, Web
from tests.support.begun import closing
from tests.support.pdfs import SAYS, hostile, pages

SENTENCE = "Lima was founded in 1535."

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


# reading


async def test_a_page_is_fetched_once_and_a_dead_one_again_after_a_while(
    site: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with closing(PageReader(ONLY_127_0_0_1, ResultCache())) as reader:
        texts = await asyncio.gather(*(reader.text(f"{site.url}/article") for _ in range(5)))
        assert await reader.text(f"{site.url}/article") == texts[0]
        for dead, problem in (("/gone", "with status 404"), ("/photo", "image/png")):
            for _ in range(5):
                with pytest.raises(ToolError, match=problem):
                    await reader.text(site.url + dead)
        assert site.requests == {"/article": 1, "/gone": 1, "/photo": 1}
        monkeypatch.setattr("agentenv.envs.search.pages.DEAD_S", -1.0)
        for _ in range(3):
            with pytest.raises(ToolError):
                await reader.text(f"{site.url}/copy")
    assert site.requests["/copy"] == 3
    assert SNIPPET in texts[0]
    assert tally("pages/refused/image").number == 1


async def test_a_pdf_is_read_page_by_page_and_600_words_of_it_in_the_evaluation_of_arpo(
    site: Web,
) -> None:
    service = SearchService(site.browser())
    text = await service.reader.text(f"{site.url}/paper")
    assert text == SENTENCE + f"\f{SENTENCE}" * 199 + "\f"
    hit = Hit("a paper", url=f"{site.url}/paper")
    assert await service._window(hit, {}) == " ".join([SENTENCE] * 120)
    await service.close()


def _peaks() -> Iterator[int]:
    """The most memory of each process started here, in kB."""
    for process in psutil.Process().children(recursive=True):
        with suppress(OSError):
            status = Path(f"/proc/{process.pid}/status").read_text()
            yield from map(int, re.findall(r"VmHWM:\s+(\d+)", status))


async def test_hostile_pdfs_are_errors_within_64_mb() -> None:
    async with closing(PageReader(ONLY_127_0_0_1, ResultCache(), 1.0)) as reader:
        fine = Reply(200, pages(SAYS), "application/octet-stream", "http://x/")
        assert await reader.extract(fine) == f"{SENTENCE}\f"
        before = max(_peaks())
        for name, body in hostile().items():
            with pytest.raises(ToolError, match=r"\Ahttp://x/ could not"):
                await reader.extract(Reply(200, body, "application/pdf", "http://x/"))
            assert max(_peaks()) - before < 64_000, name
        assert await reader.extract(fine) == f"{SENTENCE}\f"
        assert reader.stats()["pages/num_killed"] > 0


# parts of a page

LONG = "\n".join(f"Line {number} speaks of nothing at all." for number in range(400))
NEEDLE = "The treaty of Tordesillas was signed in June 1494."
WITH_NEEDLE = f"{LONG}\n{NEEDLE}\n{LONG}"


def test_the_window_surrounds_the_snippet() -> None:
    found = window(WITH_NEEDLE, "... treaty of Tordesillas, signed 1494 ...", 3000)
    before, after = found.split(NEEDLE)
    assert len(before) == len(after) == 3000
    assert window(f"Before. {NEEDLE} After.", NEEDLE.upper(), 1) == f" {NEEDLE} "
    assert window("\u4e2d\u56fd\u3002\u5317\u4eac\u3002", "\u5317\u4eac", 0) == "\u5317\u4eac\u3002"


@pytest.mark.parametrize("snippet", ["", "something quite unlike this page"])
def test_the_window_is_the_beginning_when_the_snippet_is_not_found(snippet: str) -> None:
    assert window(WITH_NEEDLE, snippet, 1000) == WITH_NEEDLE[:6000]
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
