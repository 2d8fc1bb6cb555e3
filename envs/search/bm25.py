"""Embedded BM25 over a local corpus: arrays in this process, no server."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from agentenv.config import PATH
from agentenv.envs.search.corpus import (
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
ROUNDING = 1e-4  # how far apart sums of the same scores in other orders may be, at most
SCANNED = 16  # to look a document up among a word's costs as much as to pass so many of them
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
        self._sums: list[Any] = []  # of searches that ended: new ones cost more than a search
        if len(passages) >= min_compiled:
            numba = wanted("numba")
            if numba is not None:
                compiled = numba.njit(nogil=True)
                scores = self._bm25.scores
                data, indices, indptr = scores["data"], scores["indices"], scores["indptr"]
                highest = np.maximum.reduceat(data, indptr[:-1])
                self._kernel = partial(
                    compiled(_best),
                    compiled(_score_in),
                    compiled(_insert),
                    data,
                    indices,
                    indptr,
                    highest,
                )
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
            sums = self._sums.pop() if self._sums else np.zeros(len(self.passages), np.float32)
            places, values = self._kernel(sums, np.array(ids), min(k, len(self.passages)))
            self._sums.append(sums)
            return [(int(p), float(v)) for p, v in zip(places, values, strict=True) if v > 0]
        # the scores alone: bm25s's own retrieve() costs five times as much on small corpora
        scores = np.asarray(self._bm25.get_scores_from_ids(ids))
        candidates = np.flatnonzero(scores)
        if len(candidates) > k:
            threshold = np.partition(scores[candidates], -k)[-k]
            candidates = candidates[scores[candidates] >= threshold]
        best = sorted(candidates.tolist(), key=lambda place: (-scores[place], place))
        return [(place, float(scores[place])) for place in best[:k]]


def _best(
    score_in: Any,
    insert: Any,
    data: Any,
    indices: Any,
    indptr: Any,
    highest: Any,
    sums: Any,
    ids: Any,
    k: int,
) -> Any:
    """Places and scores of the k best documents. Compiled by numba: loops, not numpy calls.

    data, indices, indptr are the scores of bm25s by word, documents ascending; highest is the best
    score of each word; sums are zeros, one a document, and are again afterwards; ids are the words
    of the query.

    Words of high scores come first. Once what is left cannot lift a new document among the best,
    none is added, and those are dropped that it cannot lift either (MaxScore, Turtle and Flood
    1995): a query's frequent words are in most documents and decide little. The best are summed
    once more in the order of the query, so that the result is that of scoring all, to the bit.
    """
    num_words = len(ids)
    order = ids.copy()
    for at in range(1, num_words):
        word = order[at]
        while at > 0 and highest[order[at - 1]] < highest[word]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = word
    left = np.zeros(num_words + 1)
    for at in range(num_words - 1, -1, -1):
        left[at] = left[at + 1] + highest[order[at]]
    seen = np.empty(len(sums), dtype=np.int32)
    num_seen = 0
    places = np.full(k, -1, dtype=np.int64)
    values = np.zeros(k, dtype=np.float32)
    bar = 0.0  # no document below is among the best
    for done in range(num_words):
        word = order[done]
        begin, end = indptr[word], indptr[word + 1]
        if left[done] >= bar:
            for at in range(begin, end):
                doc = indices[at]
                if sums[doc] == 0:
                    seen[num_seen] = doc
                    num_seen += 1
                sums[doc] += data[at]
        elif end - begin < SCANNED * num_seen:
            for at in range(begin, end):
                if sums[indices[at]] > 0:
                    sums[indices[at]] += data[at]
        else:
            for doc in seen[:num_seen]:
                sums[doc] += score_in(data, indices, begin, end, doc)
        if left[done + 1] < left[0] - left[done + 1]:  # else the bar cannot be above what is left
            values[:] = 0
            for doc in seen[:num_seen]:
                insert(values, places, sums[doc], doc)
            bar = values[k - 1] * (1 - ROUNDING)
        if left[done + 1] < bar:
            num_close = 0
            for doc in seen[:num_seen]:
                if sums[doc] + left[done + 1] >= bar:
                    seen[num_close] = doc
                    num_close += 1
                else:
                    sums[doc] = 0
            num_seen = num_close
    values[:] = 0
    places[:] = -1
    for doc in seen[:num_seen]:
        if sums[doc] >= bar:
            score = np.float32(0)
            for word in ids:
                score += score_in(data, indices, indptr[word], indptr[word + 1], doc)
            insert(values, places, score, doc)
        sums[doc] = 0
    return places, values


def _score_in(data: Any, indices: Any, begin: Any, end: Any, doc: Any) -> Any:
    """The document's score for the word of this range, 0 if it is without it."""
    high = end
    while begin < high:
        middle = (begin + high) // 2
        if indices[middle] < doc:
            begin = middle + 1
        else:
            high = middle
    return data[begin] if begin < end and indices[begin] == doc else np.float32(0)


def _insert(values: Any, places: Any, score: Any, place: Any) -> None:
    """Among the best, if it is one of them; of equal scores the first place is better."""
    at = len(values)
    while at > 0 and (
        values[at - 1] < score or (values[at - 1] == score and places[at - 1] > place)
    ):
        at -= 1
        if at + 1 < len(values):
            values[at + 1] = values[at]
            places[at + 1] = places[at]
    if at < len(values):
        values[at] = score
        places[at] = place


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
