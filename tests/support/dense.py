"""A dense retriever in small: an encoder like E5's of random weights, a FAISS index of its vectors,
and the corpus in FlashRAG's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from agentenv.envs.search.faiss_index import FaissConfig, VectorEncoder

TEXTS = ["lima is in peru", "oslo is in norway", "rome is in italy"]
WORDS = sorted({word for text in TEXTS for word in text.split()})


def save_encoder(directory: Path) -> str:
    """A tiny BERT of random weights with a vocabulary of words, saved as a model directory."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
    )
    BertModel(config).save_pretrained(directory)
    numbers = {word: number for number, word in enumerate(vocabulary)}
    BertTokenizerFast(vocab=numbers).save_pretrained(directory)
    return str(directory)


def make(directory: Path, encoder: str, num_rows: int = 3, **keys: Any) -> FaissConfig:
    """The keys of an index of all texts over a corpus of the first rows, both in `directory`."""
    import faiss

    rows = [{"id": n, "contents": f'"T{n}"\n{text}'} for n, text in enumerate(TEXTS[:num_rows])]
    (directory / "corpus.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = FaissConfig(
        index=str(directory / "wiki.index"),
        corpus=str(directory / "corpus.jsonl"),
        encoder=encoder,
        **{"prefix": "", **keys},
    )
    vectors = VectorEncoder(config).encode(TEXTS)
    index = faiss.IndexFlatIP(vectors.shape[1])
    index.add(vectors)
    faiss.write_index(index, config.index)
    return config
