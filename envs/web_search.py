"""The search tool: BM25 over a local corpus, in process."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import bm25s
import msgspec
import numpy as np
from msgspec import Struct

from agentenv.errors import DataError, ToolError
from agentenv.shared import shared
from agentenv.tool import StatelessTool, argument_schema
from agentenv.types import ToolResult

NO_RESULTS = "No results."

_WORD = re.compile(r"\w+")
_EXPECTED = 'expected {"id": text, "title": text, "text": text}'


class Passage(Struct, frozen=True):
    """One row of a corpus."""

    id: str
    title: str
    text: str


class BM25Index:
    """An immutable index over passages; titles and texts are searched."""

    def __init__(self, passages: list[Passage]) -> None:
        self.passages = passages
        self._vocabulary: dict[str, int] = {}
        number = self._vocabulary
        ids = [
            [number.setdefault(word, len(number)) for word in words(f"{p.title} {p.text}")]
            for p in passages
        ]
        self._bm25 = bm25s.BM25(method="lucene", backend="numpy")
        self._bm25.index((ids, number), show_progress=False)

    def search(self, query: str, k: int) -> list[Passage]:
        """The best k passages that share a word with the query; ties go by place in the corpus."""
        ids = [self._vocabulary[word] for word in words(query) if word in self._vocabulary]
        if not ids:
            return []
        # the scores alone: bm25s's own retrieve() costs five times as much on small corpora
        scores = np.asarray(self._bm25.get_scores_from_ids(ids))
        candidates = np.flatnonzero(scores)
        if len(candidates) > k:
            threshold = np.partition(scores[candidates], -k)[-k]
            candidates = candidates[scores[candidates] >= threshold]
        best = sorted(candidates.tolist(), key=lambda place: (-scores[place], place))
        return [self.passages[place] for place in best[:k]]


class SearchTool(StatelessTool):
    """Search a JSONL corpus of {"id", "title", "text"} rows; one index a process and corpus.

    The policy reads the texts of the `top_k` best passages, a line each and cut to
    `max_chars_per_result`, or "No results.".
    """

    name = "search"
    description = "Search the knowledge base; returns the best matching passages."

    class _Arguments(Struct, forbid_unknown_fields=True):
        query: str

    schema = argument_schema(_Arguments)

    def __init__(
        self, corpus: str | Path, top_k: int = 1, max_chars_per_result: int = 1000
    ) -> None:
        path = Path(corpus).resolve()
        self.index = shared(("bm25", path), lambda: BM25Index(read_corpus(path)))
        self.top_k = top_k
        self.max_chars_per_result = max_chars_per_result

    async def call(self, arguments: dict[str, Any], state: Any) -> ToolResult:
        """Search; quick enough to run on the event loop for corpora of some ten thousand rows."""
        try:
            query = msgspec.convert(arguments, self._Arguments).query
        except msgspec.ValidationError as error:
            raise ToolError(f"search: {error}") from error
        found = self.index.search(query, self.top_k)
        text = "\n".join(passage.text[: self.max_chars_per_result] for passage in found)
        return ToolResult(text or NO_RESULTS, {"ids": [passage.id for passage in found]})


def words(text: str) -> list[str]:
    """Lower-case words of any script; no stemming, no stop words."""
    return _WORD.findall(text.lower())


def read_corpus(path: Path) -> list[Passage]:
    """The rows of a JSONL corpus; a DataError names file, row and what was expected."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"corpus {path} cannot be read: {error.strerror}") from error
    decoder = msgspec.json.Decoder(Passage)
    passages: list[Passage] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            passage = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(f"corpus {path}, row {number}: {error}; {_EXPECTED}") from error
        if not words(f"{passage.title} {passage.text}"):
            raise DataError(f"corpus {path}, row {number}: no word to search for; {_EXPECTED}")
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
