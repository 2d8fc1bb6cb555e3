"""BM25 over a local corpus without a server: arrays in this process, or a tantivy index on disk."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta

from agentenv.base.config import PATH
from agentenv.base.errors import ConfigError, DataError
from agentenv.base.installation import needed
from agentenv.envs.search.corpus import (
    CORPUS_SCHEME,
    WORDS_VERSION,
    BackendConfig,
    Hit,
    LocalBackend,
    Passage,
    Query,
    corpus_path,
    each_passage,
    read_corpus,
    words,
)

NUM_THREADS = 2
MAX_ON_LOOP = 2_000  # passages; more take too long to search on the event loop


class BM25Config(BackendConfig, frozen=True, forbid_unknown_fields=True, tag="bm25"):
    """Embedded BM25 over a local corpus, in memory."""

    corpus: Annotated[
        str, Meta(description='JSONL file; "" is the shipped Wikipedia sample', extra=PATH)
    ] = ""

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
        self._vocabulary: dict[str, int] = {}
        number = self._vocabulary
        ids = [
            [number.setdefault(word, len(number)) for word in words(f"{p.title} {p.text}")]
            for p in passages
        ]
        self._bm25 = bm25s.BM25(method="lucene", backend="numpy")
        self._bm25.index((ids, number), show_progress=False)

    def search(self, query: str, k: int) -> list[Passage]:
        """The best k passages with a word of the query; ties are ordered as in the corpus."""
        return [self.passages[place] for place, _ in self.ranked(query, k)]

    def ranked(self, query: str, k: int) -> list[tuple[int, float]]:
        """(index in the corpus, BM25 score) of each hit, best first."""
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
        return [(place, float(scores[place])) for place in best[:k]]


class BM25Backend(LocalBackend[BM25Index]):
    """The embedded index as a backend. Threads build it; they also search it if it is large."""

    def __init__(self, corpus: Path) -> None:
        super().__init__("bm25", NUM_THREADS)
        self.corpus = corpus
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
        return BM25Index(read_corpus(self.corpus))


# Tantivy: an index on disk, for corpora too large for memory. Needs the extra "tantivy".

DONE = "agentenv_complete"  # a file that marks a complete index


class TantivyConfig(BackendConfig, frozen=True, forbid_unknown_fields=True, tag="tantivy"):
    """Tantivy: BM25 on disk, for corpora of 100,000 passages and more."""

    directory: Annotated[str, Meta(description="folder of the index, which is built if missing")]
    corpus: Annotated[
        str, Meta(description='JSONL file; "" is the shipped Wikipedia sample', extra=PATH)
    ] = ""

    def build(self) -> TantivyBackend:
        """The index in the directory."""
        return TantivyBackend(corpus_path(self.corpus), Path(self.directory))


class TantivyBackend(LocalBackend[Any]):
    """BM25 by tantivy. The index is built in `directory` from `corpus` if missing."""

    def __init__(self, corpus: Path, directory: Path) -> None:
        super().__init__("tantivy", NUM_THREADS)
        self._tantivy = needed("tantivy", "tantivy", 'search.backend.name = "tantivy"')
        self._corpus = corpus
        self._directory = directory

    async def search(self, query: Query) -> list[Hit]:
        """The best matches of the query in title and text."""
        return await self._in_thread(self._search, await self._index(), query)

    async def document(self, url: str) -> Hit | None:
        """The passage of "corpus:ID"."""
        passage_id = url.removeprefix(CORPUS_SCHEME)
        return await self._in_thread(self._document, await self._index(), passage_id)

    def _schema(self) -> Any:
        builder = self._tantivy.SchemaBuilder()
        builder.add_text_field("id", stored=True, tokenizer_name="raw")
        builder.add_text_field("title", stored=True, tokenizer_name="raw")
        builder.add_text_field("text", stored=True, tokenizer_name="raw")
        # this project's word segmentation, so that all embedded backends have equal results
        builder.add_text_field("words", stored=False, tokenizer_name="whitespace")
        return builder.build()

    def _open(self) -> Any:
        stamp = f"{self._corpus.resolve()} {self._corpus_state()} words {WORDS_VERSION}"
        marker = self._directory / DONE
        try:
            if marker.exists():
                if marker.read_text(encoding="utf-8") != stamp:
                    raise ConfigError(
                        f"search.backend.directory: {self._directory} contains the index of a "
                        f"different corpus than {self._corpus}, or of an earlier version; choose "
                        "another or an empty directory"
                    )
                return self._tantivy.Index.open(str(self._directory))
            self._directory.mkdir(parents=True, exist_ok=True)
            if any(self._directory.iterdir()):
                raise ConfigError(
                    f"search.backend.directory: {self._directory} contains other files or an "
                    "incomplete index; choose an empty directory"
                )
            index = self._build()
            marker.write_text(stamp, encoding="utf-8")
            return index
        except OSError as error:
            raise ConfigError(f"search.backend.directory: {self._directory}: {error}") from error

    def _corpus_state(self) -> str:
        try:
            state = self._corpus.stat()
        except OSError as error:
            raise DataError(f"corpus {self._corpus} cannot be read: {error.strerror}") from error
        return f"{state.st_size} {state.st_mtime_ns}"

    def _build(self) -> Any:
        index = self._tantivy.Index(self._schema(), path=str(self._directory))
        writer = index.writer()
        for passage in each_passage(self._corpus):
            document = self._tantivy.Document()
            document.add_text("id", passage.id)
            document.add_text("title", passage.title[:1000])
            document.add_text("text", passage.text)
            document.add_text("words", " ".join(words(f"{passage.title} {passage.text}")))
            writer.add_document(document)
        writer.commit()
        writer.wait_merging_threads()
        index.reload()
        return index

    def _search(self, index: Any, query: Query) -> list[Hit]:
        unique = dict.fromkeys(words(query.text))
        if not unique:
            return []
        module = self._tantivy
        term = module.Query.term_query
        terms = [(module.Occur.Should, term(index.schema, "words", word)) for word in unique]
        searcher = index.searcher()
        found = searcher.search(module.Query.boolean_query(terms), query.max_results)
        return [_passage(searcher.doc(place)).hit(score) for score, place in found.hits]

    def _document(self, index: Any, passage_id: str) -> Hit | None:
        searcher = index.searcher()
        term = self._tantivy.Query.term_query(index.schema, "id", passage_id)
        hits = searcher.search(term, 1).hits
        return _passage(searcher.doc(hits[0][1])).hit() if hits else None


def _passage(document: Any) -> Passage:
    return Passage(*(str(document.get_first(name) or "") for name in ("id", "title", "text")))
