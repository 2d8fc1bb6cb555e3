"""Dense retrieval: a prebuilt FAISS index over a FlashRAG corpus. Needs the extra "faiss"."""

from __future__ import annotations

import asyncio
import os
import weakref
from array import array
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Struct

from agentenv.base.config import PATH, about
from agentenv.base.deadline import retrieve_exception
from agentenv.base.errors import ConfigError, DataError, InfraError, reported_as
from agentenv.base.installation import needed
from agentenv.base.model_files import load_pretrained
from agentenv.envs.search.corpus import (
    CORPUS_SCHEME,
    BackendConfig,
    Hit,
    LocalBackend,
    Passage,
    Query,
    corpus_rows,
    read_passage,
)

MAX_BATCH = 64  # queries per batch
MAX_TOKENS = 256  # of a query

Pooling = Literal["mean", "cls", "pooler"]


class FaissConfig(BackendConfig, frozen=True, forbid_unknown_fields=True, tag="faiss"):
    """A FAISS index with its corpus, and the encoder of the queries."""

    index: Annotated[str, about("the FAISS index file", PATH)]
    corpus: Annotated[str, about("its corpus: JSONL rows of id and contents", PATH)]
    encoder: Annotated[str, about('model directory or name, e.g. "intfloat/e5-base"')]
    pooling: Annotated[Pooling, about("pooling of token vectors")] = "mean"
    prefix: Annotated[str, about('prefix of each query; "query: " for e5')] = "query: "
    device: Annotated[str, about("device of the encoder, e.g. cpu or cuda:0")] = "cpu"

    @property
    def cache_name(self) -> str:
        """Index (with its modification time), corpus, encoder, and encoding of queries."""
        try:
            state = Path(self.index).stat()
            index = f"{Path(self.index).resolve()} {state.st_size} {state.st_mtime_ns}"
        except OSError:  # reported when it is opened
            index = self.index
        found_by = [index, self.corpus, self.encoder]
        encoded_by = [self.pooling, self.prefix, MAX_TOKENS]
        return "faiss " + msgspec.json.encode([*found_by, *encoded_by]).decode()

    def build(self) -> FaissBackend:
        """The index with the encoder of its queries."""
        return FaissBackend(self)


class FaissBackend(LocalBackend["_Dense"]):
    """Encodes queries and finds the nearest passages in a dedicated thread. Queries that arrive
    meanwhile form the next batch."""

    def __init__(self, config: FaissConfig) -> None:
        super().__init__("faiss", num_threads=1)
        what = 'search.backend.name = "faiss"'
        self._faiss = needed("faiss", "faiss", what, package="faiss-cpu")
        self._config = config
        self._pending: list[Query] = []
        self._batch: asyncio.Future[list[list[Hit]]]  # their hits
        self._batches = set[asyncio.Future[Any]]()  # not yet done
        self._searching = asyncio.Lock()
        self.num_batches = 0

    async def search(self, query: Query) -> list[Hit]:
        """The nearest passages, with the index's score (inner product or distance)."""
        dense = await self._index()
        if len(self._pending) in (0, MAX_BATCH):
            self._pending = []
            self._batch = asyncio.ensure_future(self._search(dense, self._pending))
            self._batches.add(self._batch)
            self._batch.add_done_callback(self._batches.discard)
            self._batch.add_done_callback(retrieve_exception)
        place, batch = len(self._pending), self._batch
        self._pending.append(query)
        return (await asyncio.shield(batch))[place]  # a cancelled caller leaves the others

    async def document(self, url: str) -> Hit | None:
        """The passage of "corpus:ID"."""
        dense = await self._index()
        passage = await self._in_thread(dense.corpus.find, url.removeprefix(CORPUS_SCHEME))
        return None if passage is None else passage.hit()

    def stats(self) -> dict[str, float]:
        """The number of encoded batches."""
        return {"faiss/num_batches": self.num_batches}

    async def close(self) -> None:
        """Stop the thread, and cancel waiting calls."""
        for batch in self._batches:
            batch.cancel()
        await super().close()

    async def _search(self, dense: _Dense, queries: list[Query]) -> list[list[Hit]]:
        """The hits of a batch, which grows until the one before is done."""
        async with self._searching:
            if queries is self._pending:
                self._pending = []
            self.num_batches += 1
            failed = f"search in {self._config.index} failed"
            with reported_as(InfraError, failed, RuntimeError, OSError):  # such as lack of memory
                return await self._in_thread(dense.search, queries)

    def _open(self) -> _Dense:
        path = Path(self._config.index)
        if not path.is_file():
            raise ConfigError(f"search.backend.index: {path} is not a file; expected a FAISS index")
        with reported_as(
            ConfigError, f"search.backend.index: {path} is not a FAISS index", RuntimeError
        ):
            index = self._faiss.read_index(str(path))
        corpus = CorpusFile(Path(self._config.corpus))
        if index.ntotal != len(corpus):
            raise DataError(
                f"the index {path} has {index.ntotal} vectors and the corpus {self._config.corpus} "
                f"{len(corpus)} passages; expected the corpus from which the index was built, row "
                "by row"
            )
        encoder = VectorEncoder(self._config)
        if encoder.size != index.d:
            raise ConfigError(
                f"search.backend.encoder: {self._config.encoder} returns vectors of size "
                f"{encoder.size}, but the index {path} has {index.d}; expected the encoder with "
                "which the index was built"
            )
        return _Dense(index, encoder, corpus)


class _Dense(Struct, frozen=True):
    """A loaded index, the encoder of its queries, and its passages."""

    index: Any
    encoder: VectorEncoder
    corpus: CorpusFile

    def search(self, queries: list[Query]) -> list[list[Hit]]:
        """The hits of each query, with the index's score."""
        vectors = self.encoder.encode([query.text for query in queries])
        most = min(max(query.max_results for query in queries), len(self.corpus))
        scores, places = self.index.search(vectors, most)
        found = []
        for query, own, values in zip(queries, places.tolist(), scores.tolist(), strict=True):
            best = list(zip(own, values, strict=True))[: query.max_results]
            found.append([self.corpus[place].hit(score) for place, score in best if place >= 0])
        return found


class VectorEncoder:
    """A text encoder from transformers. `size` is the length of its vectors."""

    def __init__(self, config: FaissConfig) -> None:
        what = "search.backend.encoder"
        torch = needed("torch", "train", what)
        needed("transformers", "train", what)
        self._torch: Any = torch
        self._config = config
        with reported_as(ConfigError, "search.backend.encoder", ConfigError):
            tokenizer = load_pretrained("AutoTokenizer", config.encoder, local_files_only=False)
            model = load_pretrained("AutoModel", config.encoder, local_files_only=False)
        self._tokenizer = tokenizer
        self._model = model.eval().to(config.device)
        self.size = int(model.config.hidden_size)

    def encode(self, texts: list[str]) -> Any:
        """Float32 vectors [len(texts), size] of length 1."""
        batch = self._tokenizer(
            [self._config.prefix + text for text in texts],
            max_length=MAX_TOKENS,
            padding=True,
            truncation=True,
            return_tensors="pt",
        ).to(self._config.device)
        with self._torch.inference_mode():
            output = self._model(**batch)
            if self._config.pooling == "pooler":
                vectors = output.pooler_output
            elif self._config.pooling == "cls":
                vectors = output.last_hidden_state[:, 0]
            else:
                mask = batch["attention_mask"].unsqueeze(-1)
                states = output.last_hidden_state * mask
                vectors = states.sum(1) / mask.sum(1)
            vectors = self._torch.nn.functional.normalize(vectors, dim=-1)
        return vectors.float().cpu().numpy()


class CorpusFile:
    """A JSONL corpus whose passages are read from the file on demand, by position or by id. The
    constructor reads and checks every row once. Thread-safe.

    It needs 24 bytes of memory per passage: the offset of its line, and a 64-bit hash of its id in
    a sorted table. 21 million passages (FlashRAG's Wikipedia, 14 GB) need half a gigabyte.

    Raises DataError for an unreadable file and for an invalid row. `find` returns the first of
    several rows with one id.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        begins, hashes = array("q"), array("q")
        try:  # stays open, since the name may later refer to another file
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)
        except OSError as error:
            raise DataError(f"corpus {path} cannot be read: {error.strerror}") from error
        for _, place, passage in corpus_rows(path):
            begins.append(place)
            hashes.append(hash(passage.id))
        if not begins:
            raise DataError(f"corpus {path} is empty; expected a passage on each line")
        begins.append(os.fstat(self._file).st_size)
        self._begins = np.frombuffer(begins, np.int64)
        self._order = np.argsort(np.frombuffer(hashes, np.int64), kind="stable")
        self._sorted = np.frombuffer(hashes, np.int64)[self._order]

    def __len__(self) -> int:
        return len(self._begins) - 1

    def __getitem__(self, place: int) -> Passage:
        """The passage at this index, counted from 0 without blank lines."""
        if not 0 <= place < len(self):
            raise IndexError(place)
        begin, end = int(self._begins[place]), int(self._begins[place + 1])
        line = os.pread(self._file, end - begin, begin)
        return read_passage(line.split(b"\n", 1)[0], f"corpus {self.path}, passage {place + 1}")

    def find(self, passage_id: str) -> Passage | None:
        """The passage with this id, or None."""
        wanted = hash(passage_id)
        first = np.searchsorted(self._sorted, wanted, "left")
        last = np.searchsorted(self._sorted, wanted, "right")
        for place in self._order[first:last].tolist():
            if (passage := self[place]).id == passage_id:
                return passage
        return None
