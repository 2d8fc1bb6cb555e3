"""BM25 over a local corpus without a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from agentenv.base.config import PATH, about
from agentenv.base.installation import needed
from agentenv.base.offload import in_thread
from agentenv.envs.search.corpus import (
    CORPUS_SCHEME,
    BackendConfig,
    Hit,
    LocalBackend,
    Passage,
    Query,
    corpus_path,
    read_corpus,
    words,
)

NUM_THREADS = 2
MAX_ON_LOOP = 2_000  # passages; more take too long to search on the event loop


class BM25Config(BackendConfig, frozen=True, forbid_unknown_fields=True, tag="bm25"):
    """Embedded BM25 over a local corpus, in memory."""

    corpus: Annotated[str, about('JSONL file; "" is the shipped Wikipedia sample', PATH)] = ""

    def build(self) -> BM25Backend:
        """The index over the corpus."""
        return BM25Backend(corpus_path(self.corpus))


def load_bm25s() -> Any:
    """The package bm25s. Raises MissingError."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    return needed("bm25s", "search", "BM25 search")  # slow to load


class BM25Index:
    """An immutable index over passages; titles and texts are searched."""

    def __init__(self, passages: list[Passage]) -> None:
        bm25s = load_bm25s()
        self.passages = passages
        self.by_id = {passage.id: passage for passage in passages}
        self._vocabulary: dict[str, int] = {}
        number = self._vocabulary
        ids = [
            [number.setdefault(word, len(number)) for word in words(f"{p.title} {p.text}")]
            for p in passages
        ]
        self._bm25 = bm25s.BM25(method="lucene", backend="numpy")
        self._bm25.index((ids, number), show_progress=False)

    async def search(self, query: str, k: int, in_thread: Any = in_thread) -> list[Hit]:
        """The best k passages with a word of the query, with the BM25 score; ties are ordered as in
        the corpus. A large corpus is searched by `in_thread`."""
        if len(self.passages) <= MAX_ON_LOOP:
            return self.ranked(query, k)
        found: list[Hit] = await in_thread(self.ranked, query, k)
        return found

    def ranked(self, query: str, k: int) -> list[Hit]:
        """As `search`, at once."""
        ids = [self._vocabulary[word] for word in words(query) if word in self._vocabulary]
        if not ids:
            return []
        # get_scores_from_ids(), as retrieve() of bm25s takes five times as long on small corpora
        scores = np.asarray(self._bm25.get_scores_from_ids(ids))
        candidates = np.flatnonzero(scores)
        if len(candidates) > k:
            threshold = np.partition(scores[candidates], -k)[-k]
            candidates = candidates[scores[candidates] >= threshold]
        best = sorted(candidates.tolist(), key=lambda place: (-scores[place], place))
        return [self.passages[place].hit(float(scores[place])) for place in best[:k]]


class BM25Backend(LocalBackend[BM25Index]):
    """The embedded index as a backend. Threads build it; they also search it if it is large."""

    def __init__(self, corpus: Path) -> None:
        super().__init__("bm25", NUM_THREADS)
        self.corpus = corpus

    async def search(self, query: Query) -> list[Hit]:
        """The best passages, with the BM25 score."""
        index = await self._index()
        return await index.search(query.text, query.max_results, self._in_thread)

    async def document(self, url: str) -> Hit | None:
        """The passage of "corpus:ID"."""
        index = await self._index()
        passage = index.by_id.get(url.removeprefix(CORPUS_SCHEME))
        return None if passage is None else passage.hit()

    def _open(self) -> BM25Index:
        return BM25Index(read_corpus(self.corpus))
