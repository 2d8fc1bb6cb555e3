"""The search interface: queries, hits and backends; the rows of a corpus, and their words.

A corpus is a JSONL file of rows with id, title and text, or with id and contents as in FlashRAG.
"""

from __future__ import annotations

import asyncio
import re
import unicodedata
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from msgspec import UNSET, Struct, UnsetType

from agentenv.base.errors import DataError, ForeignError, reported_as
from agentenv.base.offload import OwnThread, check_outside
from agentenv.base.untrusted import convert, decode

_MARKETS = (  # by script, kana first, since Japanese also uses Chinese characters
    ("ja-JP", re.compile("[\u3040-\u30ff]")),
    ("ko-KR", re.compile("[\uac00-\ud7af]")),
    ("zh-CN", re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")),
)


class Hit(Struct, frozen=True, omit_defaults=True):
    """One result. `text` is a passage or a snippet; `url` may be "corpus:ID" for a local one;
    `site` and `date` are as reported by a provider, `document` is a FlashRAG row as stored."""

    text: str
    title: str = ""
    url: str = ""
    id: str = ""
    score: float = 0.0
    site: str = ""
    date: str = ""
    document: dict[str, Any] | None = None


class Query(Struct, frozen=True):
    """A query. `market` is of the form "en-US": language, then country; `place` is another country,
    such as "cn". Unset, it is no part of the key of a cached result."""

    text: str
    max_results: int = 10
    market: str = "en-US"
    place: str | UnsetType = UNSET

    @property
    def language(self) -> str:
        """The part of the market before the dash, e.g. "en"."""
        return self.market.partition("-")[0]

    @property
    def country(self) -> str:
        """The place, else the part of the market after the dash, in lower case, e.g. "us"."""
        return self.place or self.market.partition("-")[2].lower()


class Backend(Protocol):
    """A source of results. Shared by all episodes of a process."""

    async def start(self) -> None:
        """Build or load the index, off the event loop; later calls are free.

        Raises DataError or ConfigError.
        """

    async def search(self, query: Query) -> list[Hit]:
        """At most `query.max_results` hits, best first; an empty list means "no results".

        After an infrastructure failure it raises InfraError and never returns an empty list.
        """

    async def document(self, url: str) -> Hit | None:
        """The whole document of a "corpus:ID" address, or None if there is none."""

    async def close(self) -> None:
        """Free everything; idempotent."""


Index = TypeVar("Index")


class LocalBackend(Generic[Index]):
    """Base of the backends on a local corpus. `_open` opens the index once, in one of `num_threads`
    threads, which also run searches."""

    def __init__(self, name: str, num_threads: int) -> None:
        self._in_thread = OwnThread(name, num_threads)
        self._opened: asyncio.Future[Index] | None = None

    async def start(self) -> None:
        """Build or load the index; raises DataError or ConfigError."""
        await self._index()

    async def close(self) -> None:
        """Stop the threads."""
        self._in_thread.close()

    def _open(self) -> Index:
        raise NotImplementedError

    async def _index(self) -> Index:
        check_outside("a search index")
        if self._opened is None:
            self._opened = asyncio.ensure_future(self._in_thread(self._open))
        # a cancelled caller must not cancel the build for others
        return await asyncio.shield(self._opened)


class BackendConfig(Struct, frozen=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of the keys of a backend, [search.backend]; each struct makes its backend."""

    @property
    def cache_name(self) -> str:
        """The cache key of results: everything that they depend on, without secrets. Empty: no
        cache, since searching is fast.
        """
        return ""

    @property
    def cache_lasts(self) -> bool:
        """Whether the name identifies the same results in other runs."""
        return True

    def build(self) -> Backend:
        """The backend, not yet started."""
        raise NotImplementedError


def market_of(text: str, market: str = "auto") -> str:
    """The market of a search: the given one, else by the script of the text, else "en-US"."""
    if market != "auto":
        return market
    return next((name for name, script in _MARKETS if script.search(text)), "en-US")


CORPUS_SCHEME = "corpus:"
SHIPPED_CORPUS = Path(__file__).parents[1] / "data" / "wikipedia_passages.jsonl"


def corpus_path(path: str) -> Path:
    """The file of a configuration's corpus; "" is the shipped sample."""
    return Path(path).resolve() if path else SHIPPED_CORPUS


_WORD = re.compile(r"\w+")
# Han and kana have no spaces, and Hangul attaches particles to words, so each run is split into
# characters and bigrams
UNSPACED = re.compile(
    "([\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]+)"
)
# accents of Latin and Greek letters; in other scripts such marks make another letter
_ACCENTS = re.compile("(?<=[a-z\u0370-\u03ff])[\u0300-\u036f]+")
_EXPECTED = 'expected {"id": text, "title": text, "text": text} or {"id": ..., "contents": text}'


class Passage(Struct, frozen=True, rename={"document": "(stored)"}):
    """One row of a corpus; `document` is a FlashRAG row as stored."""

    id: str
    title: str
    text: str
    document: dict[str, Any] | None = None

    def hit(self, score: float = 0.0) -> Hit:
        """The passage as a result, whose address is "corpus:ID"."""
        url = CORPUS_SCHEME + self.id
        return Hit(self.text, self.title, url, self.id, score, document=self.document)


class _FlashRagRow(Struct):
    id: str | int
    contents: str
    title: str | None = None


def words(text: str) -> list[str]:
    """Lower-case words of any script, with normalized characters and without accents; no stemming,
    no stop words.

    Chinese, Japanese and Korean text becomes characters and pairs of characters.
    """
    if text.isascii():
        return _WORD.findall(text.lower())
    text = _ACCENTS.sub("", unicodedata.normalize("NFKD", text.casefold()))
    text = unicodedata.normalize("NFKC", text)
    found = _WORD.findall(text)
    if not UNSPACED.search(text):
        return found
    return [part for word in found for part in _segments(word)]


def _segments(word: str) -> Iterator[str]:
    for number, part in enumerate(UNSPACED.split(word)):
        if number % 2:
            yield from part
            yield from map("".join, pairwise(part))
        elif part:
            yield part


def read_corpus(path: Path) -> list[Passage]:
    """The rows of a JSONL corpus. Raises DataError with file, row and expectation."""
    passages: list[Passage] = []
    seen: dict[str, int] = {}
    for number, _, passage in corpus_rows(path):
        if not words(f"{passage.title} {passage.text}"):
            raise DataError(f"corpus {path}, row {number}: no searchable word; {_EXPECTED}")
        if passage.id in seen:
            raise DataError(
                f"corpus {path}, row {number}: id {passage.id!r} is already that of row "
                f"{seen[passage.id]}; expected a different id for each row"
            )
        seen[passage.id] = number
        passages.append(passage)
    if not passages:
        raise DataError(f"corpus {path} is empty; {_EXPECTED} on each line")
    return passages


def corpus_rows(path: Path) -> Iterator[tuple[int, int, Passage]]:
    """Number, offset in the file, and passage of each row. Raises DataError."""
    try:
        with path.open("rb") as lines:
            place = 0
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, place, read_passage(line, f"corpus {path}, row {number}")
                place += len(line)
    except OSError as error:
        raise DataError(f"corpus {path} cannot be read: {error.strerror}") from error


def read_passage(line: bytes, where: str) -> Passage:
    """The passage of one line. Raises DataError, beginning with `where`."""
    with reported_as(DataError, where, ForeignError, end=f"; {_EXPECTED}"):
        row = decode(line)
        if not (isinstance(row, dict) and "contents" in row and "text" not in row):
            return convert(row, Passage)
        flash = convert(row, _FlashRagRow)
    title, text = split_contents(flash.contents)
    if flash.title not in (None, title):  # its contents have no line of the title
        title, text = flash.title, flash.contents
    return Passage(str(flash.id), title, text, row)


def split_contents(contents: str) -> tuple[str, str]:
    """Title and text of a FlashRAG passage, whose first line is '"Title"'."""
    head, newline, rest = contents.partition("\n")
    return (head.strip().strip('"'), rest) if newline else ("", contents)


def document_of(hit: Hit) -> dict[str, Any]:
    """The FlashRAG row of a result: as stored, or made of title and text."""
    contents = f'"{hit.title}"\n{hit.text}' if hit.title else hit.text
    return hit.document or {"id": hit.id, "contents": contents}
