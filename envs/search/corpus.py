"""A corpus: JSONL rows with id, title and text, or with id and contents as FlashRAG has them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from agentenv.errors import DataError

SHIPPED_CORPUS = Path(__file__).parents[1] / "data" / "wikipedia_passages.jsonl"

_WORD = re.compile(r"\w+")
# Han and kana are written without spaces, so each run becomes its characters and bigrams
_UNSPACED = re.compile(
    "[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]+"
)
_EXPECTED = 'expected {"id": text, "title": text, "text": text} or {"id": ..., "contents": text}'


class Passage(Struct, frozen=True):
    """One row of a corpus."""

    id: str
    title: str
    text: str


class _FlashRagRow(Struct):
    id: str | int
    contents: str
    title: str | None = None


def words(text: str) -> list[str]:
    """Lower-case words of any script; no stemming, no stop words.

    Chinese and Japanese, which have no spaces, give their characters and pairs of characters.
    """
    found = _WORD.findall(text.lower())
    if text.isascii() or not _UNSPACED.search(text):
        return found
    return [part for word in found for part in _segments(word)]


def _segments(word: str) -> Iterator[str]:
    end = 0
    for run in _UNSPACED.finditer(word):
        if run.start() > end:
            yield word[end : run.start()]
        characters = run.group()
        yield from characters
        yield from (characters[i : i + 2] for i in range(len(characters) - 1))
        end = run.end()
    if end < len(word):
        yield word[end:]


def read_corpus(path: Path) -> list[Passage]:
    """The rows of a JSONL corpus; a DataError names file, row and what was expected."""
    return list(each_passage(path))


def each_passage(path: Path) -> Iterator[Passage]:
    """The rows of a JSONL corpus one by one, for corpora that do not fit into memory."""
    seen: dict[str, int] = {}
    for number, passage in _rows(path):
        if not words(f"{passage.title} {passage.text}"):
            raise DataError(f"corpus {path}, row {number}: no word to search for; {_EXPECTED}")
        if passage.id in seen:
            raise DataError(
                f"corpus {path}, row {number}: id {passage.id!r} is already that of row "
                f"{seen[passage.id]}; expected a different id for each row"
            )
        seen[passage.id] = number
        yield passage
    if not seen:
        raise DataError(f"corpus {path} is empty; {_EXPECTED} on each line")


def _rows(path: Path) -> Iterator[tuple[int, Passage]]:
    decoder = msgspec.json.Decoder()
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _passage(decoder, line, f"corpus {path}, row {number}")
    except OSError as error:
        raise DataError(f"corpus {path} cannot be read: {error.strerror}") from error


def _passage(decoder: msgspec.json.Decoder[Any], line: bytes, where: str) -> Passage:
    try:
        row = decoder.decode(line)
        if not (isinstance(row, dict) and "contents" in row and "text" not in row):
            return msgspec.convert(row, Passage)
        flash = msgspec.convert(row, _FlashRagRow)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{where}: {error}; {_EXPECTED}") from error
    title, text = split_contents(flash.contents)
    return Passage(str(flash.id), flash.title or title, text)


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of a FlashRAG passage, which holds '"Title"' on its first line."""
    head, newline, rest = contents.partition("\n")
    return (head.strip().strip('"'), rest) if newline else ("", contents)


def joined_contents(title: str, text: str) -> str:
    """The FlashRAG form of a passage."""
    return f'"{title}"\n{text}'
