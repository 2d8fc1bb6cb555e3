"""The search tool over a local corpus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import DataError
from agentenv.envs.search.corpus import words
from agentenv.envs.web_search import SearchTool

pytestmark = pytest.mark.usefixtures("services")

ROWS = [
    {"id": "lima", "title": "Lima", "text": "Lima is the capital of Peru."},
    {"id": "peru", "title": "Peru", "text": "Peru is a country of the Andes."},
    {"id": "oslo", "title": "Oslo", "text": "Oslo, the capital of Norway, lies on a fjord."},
    {"id": "copy", "title": "Oslo", "text": "Oslo, the capital of Norway, lies on a fjord."},
    {
        "id": "ort",
        "title": "Stra\u00dfe",
        "text": "Gr\u00f6\u00dfe und L\u00e4nge der Stra\u00dfe, \u6771\u4eac, 42.",
    },
]


def write(directory: Path, rows: list[Any]) -> Path:
    path = directory / "corpus.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


async def search(tool: SearchTool, query: str) -> str:
    return (await tool.call({"query": query}, None)).text


async def test_the_best_passage_comes_first(tmp_path: Path) -> None:
    tool = SearchTool(write(tmp_path, ROWS))
    assert await search(tool, "capital of Peru?") == ROWS[0]["text"]
    assert await search(tool, "ANDES") == ROWS[1]["text"]
    assert await search(tool, "gr\u00f6\u00dfe stra\u00dfe") == ROWS[4]["text"]
    result = await tool.call({"query": "fjord"}, None)
    assert result.info == {"ids": ["oslo"]}  # of equals the first in the corpus


async def test_results_are_lines_cut_to_the_limit(tmp_path: Path) -> None:
    tool = SearchTool(write(tmp_path, ROWS), top_k=3, max_chars_per_result=9)
    assert await search(tool, "norway fjord") == "Oslo, the\nOslo, the"
    assert len((await search(tool, "capital of")).splitlines()) == 3


@pytest.mark.parametrize("query", ["", "   ", "?!", "zebra", "ZEBRA's stripes"])
async def test_a_query_without_hits_returns_a_notice(tmp_path: Path, query: str) -> None:
    assert await search(SearchTool(write(tmp_path, ROWS)), query) == "No results."


def test_tools_over_one_corpus_share_an_index(tmp_path: Path) -> None:
    path = write(tmp_path, ROWS)
    assert SearchTool(path).index is SearchTool(str(path), top_k=2).index


def test_text_of_any_script_is_split_into_words() -> None:
    # text without spaces: characters and pairs
    expected = ["the", "zorvex", "labs", "ete", "\u6771", "\u4eac", "\u6771\u4eac", "_1"]
    assert words("The Zorvex-Labs' \u00c9T\u00c9, \u6771\u4eac_1!") == expected


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\uff21\uff22\uff23 \uff11", "abc 1"),  # full width
        ("na\u00efve", "NAIVE"),
        ("nai\u0308ve", "na\u00efve"),  # the accent as a character of its own
        ("Vi\u1ec7t Nam", "viet nam"),
        ("\u0395\u03bb\u03bb\u03ac\u03b4\u03b1", "\u03b5\u03bb\u03bb\u03b1\u03b4\u03b1"),
        ("Stra\u00dfe", "STRASSE"),
        ("\ufb01ne", "fine"),
        ("\uff76\uff9e\uff97\uff7d", "\u30ac\u30e9\u30b9"),  # half width kana
        ("\u1112\u1161\u11ab", "\ud55c"),  # Hangul in parts
    ],
)
def test_spellings_of_one_word_are_equal(one: str, other: str) -> None:
    assert words(one) == words(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("\u30ac", "\u30ab"),  # ga and ka
        ("\u0439", "\u0438"),  # Russian i short and i
    ],
)
def test_marks_that_form_another_letter_are_kept(one: str, other: str) -> None:
    assert words(one) != words(other)


async def test_korean_is_found_without_its_particles(tmp_path: Path) -> None:
    """ "Korea capital" in "Korea's capital is Seoul", which has particles on both words."""
    seoul = "\ub300\ud55c\ubbfc\uad6d\uc758 \uc218\ub3c4\ub294 \uc11c\uc6b8\uc774\ub2e4"
    other = "\ubbf8\uad6d\uc758 \ub300\ud1b5\ub839"  # "America's president"
    rows = [{"id": text, "title": "", "text": text} for text in (other, seoul)]
    tool = SearchTool(write(tmp_path, rows))
    assert await search(tool, "\ub300\ud55c\ubbfc\uad6d \uc218\ub3c4") == seoul


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "row 2"),
        ('["a"]', "row 2.*object"),
        ({"id": "a", "title": "b"}, "row 2.*text"),
        ({"id": 1, "title": "b", "text": "c"}, "row 2.*id"),
        ({"id": "a", "title": "", "text": "..."}, "row 2: no searchable word"),
        (ROWS[0], "row 2: id 'lima' is already that of row 1"),
    ],
)
def test_a_bad_row_is_refused(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path, [ROWS[0], row])
    with pytest.raises(DataError, match=message) as raised:
        SearchTool(path)
    assert str(path) in str(raised.value)
    assert "expected" in str(raised.value)


def test_a_missing_or_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.jsonl"):
        SearchTool(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="is empty"):
        SearchTool(write(tmp_path, [""]))
