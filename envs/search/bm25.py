"""Embedded BM25 over a local corpus: arrays in this process, no server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from agentenv.config import PATH
from envs.search.corpus import (
    CORPUS_SCHEME,
    BackendConfig,
    Hit,
    LocalBackend,
    Passage,
    Query,
    corpus_path,
    read_corpus,
    wanted,
    words,
)

NUM_THREADS = 2
MAX_ON_LOOP = 2_000  # passages; more take too long to search on the event loop
MIN_COMPILED = 20_000  # passages; below, numpy is quick enough and compiling costs seconds


class BM25Config(BackendConfig, frozen=True, forbid_unknown_fields=True, tag="bm25"):
    """Embedded BM25 over a local corpus, in memory."""

    corpus: Annotated[
        str, Meta(description='JSONL file; "" is the shipped Wikipedia sample', extra=PATH)
    ] = ""

    def build(self) -> BM25Backend:
        """The index over the corpus."""
        return BM25Backend(corpus_path(self.corpus))


class BM25Index:
    """An immutable index over passages; titles and texts are searched.

    Large indexes are searched by a compiled kernel that lets other threads run, if numba is
    installed.
    """

    def __init__(self, passages: list[Passage], min_compiled: int = MIN_COMPILED) -> None:
        import bm25s  # loads numba too, which takes half a second

        self.passages = passages
        self._vocabulary: dict[str, int] = {}
        number = self._vocabulary
        ids = [
            [number.setdefault(word, len(number)) for word in words(f"{p.title} {p.text}")]
            for p in passages
        ]
        self._bm25 = bm25s.BM25(method="lucene", backend="numpy")
        self._bm25.index((ids, number), show_progress=False)
        self._kernel: Any = None
        if len(passages) >= min_compiled:
            numba = wanted("numba")
            if numba is not None:
                self._kernel = numba.njit(nogil=True)(_best)
                self.search(passages[0].text[:100], 1)  # compiles it now

    def search(self, query: str, k: int) -> list[Passage]:
        """The best k passages that share a word with the query; ties go by place in the corpus."""
        return [self.passages[place] for place, _ in self.ranked(query, k)]

    def ranked(self, query: str, k: int) -> list[tuple[int, float]]:
        """Places in the corpus and BM25 scores, best first."""
        ids = [self._vocabulary[word] for word in words(query) if word in self._vocabulary]
        if not ids:
            return []
        if self._kernel is not None:
            arrays = (self._bm25.scores[name] for name in ("data", "indices", "indptr"))
            k = min(k, len(self.passages))
            places, values = self._kernel(*arrays, np.array(ids), len(self.passages), k)
            return [(int(p), float(v)) for p, v in zip(places, values, strict=True) if v > 0]
        # the scores alone: bm25s's own retrieve() costs five times as much on small corpora
        scores = np.asarray(self._bm25.get_scores_from_ids(ids))
        candidates = np.flatnonzero(scores)
        if len(candidates) > k:
            threshold = np.partition(scores[candidates], -k)[-k]
            candidates = candidates[scores[candidates] >= threshold]
        best = sorted(candidates.tolist(), key=lambda place: (-scores[place], place))
        return [(place, float(scores[place])) for place in best[:k]]


def _best(data: Any, indices: Any, indptr: Any, ids: Any, num_docs: int, k: int) -> Any:
    """Places and scores of the k best documents. Compiled by numba: loops, not numpy calls.

    data, indices, indptr are the scores of bm25s by word; ids are the words of the query.
    """
    scores = np.zeros(num_docs, dtype=np.float32)
    for word in ids:
        for at in range(indptr[word], indptr[word + 1]):
            scores[indices[at]] += data[at]
    places = np.full(k, -1, dtype=np.int64)
    values = np.zeros(k, dtype=np.float32)
    for place in range(num_docs):
        score = scores[place]
        if score > values[k - 1]:  # strictly: of equals the first stays
            at = k - 1
            while at > 0 and values[at - 1] < score:
                values[at] = values[at - 1]
                places[at] = places[at - 1]
                at -= 1
            values[at] = score
            places[at] = place
    return places, values


class BM25Backend(LocalBackend[BM25Index]):
    """The embedded index as a backend. It is built, and if large searched, in threads."""

    def __init__(self, corpus: Path, build: Callable[[Path], BM25Index] | None = None) -> None:
        super().__init__("bm25", NUM_THREADS)
        self.corpus = corpus
        self._build = build or _read_and_index
        self._places: dict[str, int] = {}

    async def search(self, query: Query) -> list[Hit]:
        """The best passages, with the BM25 score."""
        index = await self._index()
        if len(index.passages) <= MAX_ON_LOOP:
            ranked = index.ranked(query.text, query.max_results)
        else:
            ranked = await self._in_thread(index.ranked, query.text, query.max_results)
        return [index.passages[place].hit(score) for place, score in ranked]

    async def document(self, url: str) -> Hit | None:
        """The passage of "corpus:ID"."""
        index = await self._index()
        if not self._places:
            self._places = {passage.id: place for place, passage in enumerate(index.passages)}
        place = self._places.get(url.removeprefix(CORPUS_SCHEME))
        return None if place is None else index.passages[place].hit()

    def _open(self) -> BM25Index:
        return self._build(self.corpus)


def _read_and_index(path: Path) -> BM25Index:
    return BM25Index(read_corpus(path))
