"""Dense retrieval: a prebuilt FAISS index over a FlashRAG corpus. Needs the extra "faiss"."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from agentenv.errors import ConfigError, DataError
from envs.search.backend import Hit, Query
from envs.search.bm25 import CORPUS_SCHEME
from envs.search.corpus import Passage, read_corpus
from envs.search.extras import needed

Pooling = Literal["mean", "cls", "pooler"]


class FaissConfig(Struct, frozen=True, forbid_unknown_fields=True, tag="faiss", tag_field="name"):
    """A FAISS index with the corpus it was built from, and the encoder of the queries."""

    index: Annotated[str, Meta(description="the FAISS index file")]
    corpus: Annotated[str, Meta(description="its corpus: JSONL rows of id and contents")]
    encoder: Annotated[str, Meta(description='model directory or name, e.g. "intfloat/e5-base"')]
    pooling: Annotated[Pooling, Meta(description="how token vectors become one")] = "mean"
    prefix: Annotated[str, Meta(description='before each query; e5 has "query: "')] = "query: "
    max_tokens: Annotated[int, Meta(ge=8, description="of a query")] = 256
    normalize: Annotated[bool, Meta(description="vectors of length 1")] = True
    device: Annotated[str, Meta(description="of the encoder, e.g. cpu or cuda:0")] = "cpu"


class FaissBackend:
    """Encodes queries and looks up the nearest passages, in one thread of its own."""

    def __init__(self, config: FaissConfig) -> None:
        what = 'search.backend.name = "faiss"'
        self._faiss = needed("faiss", "faiss-cpu", "faiss", what)
        self._config = config
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="faiss")
        self._loaded: asyncio.Future[None] | None = None
        self._index: Any = None
        self._encoder: Encoder
        self._passages: list[Passage] = []
        self._places: dict[str, int] = {}

    async def start(self) -> None:
        """Load index, corpus and encoder; raises ConfigError or DataError."""
        if self._loaded is None:
            loop = asyncio.get_running_loop()
            self._loaded = loop.run_in_executor(self._thread, self._load)
        await asyncio.shield(self._loaded)

    async def search(self, query: Query) -> list[Hit]:
        """The nearest passages; the score is the index's own (inner product or distance)."""
        await self.start()
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._search, query)

    async def document(self, url: str) -> Hit | None:
        """The passage of "corpus:ID"."""
        await self.start()
        place = self._places.get(url.removeprefix(CORPUS_SCHEME))
        return None if place is None else self._hit(place, 0.0)

    async def close(self) -> None:
        """Let the thread go."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> None:
        path = Path(self._config.index)
        if not path.is_file():
            raise ConfigError(f"search.backend.index: {path} is no file; expected a FAISS index")
        try:
            index = self._faiss.read_index(str(path))
        except RuntimeError as error:
            raise ConfigError(f"search.backend.index: {path} is no FAISS index: {error}") from error
        passages = read_corpus(Path(self._config.corpus))
        if index.ntotal != len(passages):
            raise DataError(
                f"the index {path} holds {index.ntotal} vectors and the corpus "
                f"{self._config.corpus} {len(passages)} passages; expected the corpus from which "
                "the index was built, row by row"
            )
        encoder = Encoder(self._config)
        if encoder.size != index.d:
            raise ConfigError(
                f"search.backend.encoder: {self._config.encoder} gives vectors of size "
                f"{encoder.size}, but the index {path} has {index.d}; expected the encoder with "
                "which the index was built"
            )
        self._index, self._passages, self._encoder = index, passages, encoder
        self._places = {passage.id: place for place, passage in enumerate(passages)}

    def _search(self, query: Query) -> list[Hit]:
        vectors = self._encoder.encode([query.text])
        scores, places = self._index.search(vectors, min(query.max_results, len(self._passages)))
        found = zip(places[0].tolist(), scores[0].tolist(), strict=True)
        return [self._hit(place, score) for place, score in found if place >= 0]

    def _hit(self, place: int, score: float) -> Hit:
        passage = self._passages[place]
        url = CORPUS_SCHEME + passage.id
        return Hit(passage.text, passage.title, url, passage.id, score)


class Encoder:
    """A text encoder of transformers. `size` is the length of its vectors."""

    def __init__(self, config: FaissConfig) -> None:
        import torch
        import transformers

        self._torch: Any = torch
        self._config = config
        try:
            tokenizer: Any = transformers.AutoTokenizer.from_pretrained(config.encoder)
            model: Any = transformers.AutoModel.from_pretrained(config.encoder)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"search.backend.encoder: {config.encoder} cannot be loaded: {error}"
            ) from error
        self._tokenizer = tokenizer
        self._model = model.eval().to(config.device)
        self.size = int(model.config.hidden_size)

    def encode(self, texts: list[str]) -> Any:
        """Float32 vectors [len(texts), size]."""
        batch = self._tokenizer(
            [self._config.prefix + text for text in texts],
            max_length=self._config.max_tokens,
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
            if self._config.normalize:
                vectors = self._torch.nn.functional.normalize(vectors, dim=-1)
        return vectors.float().cpu().numpy()
