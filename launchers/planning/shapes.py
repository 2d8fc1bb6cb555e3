"""Sizes of a model's layers, from its config.json or, where it is not here, by a public name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from agentenv.errors import DataError
from launchers.assembly import read_model_config, stretched

GPTQ = re.compile(r"(gptq|awq|int[48])", re.IGNORECASE)
GROUP_OVERHEAD = 1.05  # scales and zeros of groups of 128 weights beside 4 bits each


class ModelShape(Struct, frozen=True, kw_only=True):
    """A dense decoder of the Llama family (Llama, Qwen2, Qwen3).

    `bits` of a weight in the layers when served quantized; 0: not quantized. `source` says where
    the sizes come from.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    context: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    bits: int = 0
    source: str = ""

    @property
    def embedding(self) -> int:
        """Parameters of the embedding, and of the head where it is not tied."""
        return self.vocabulary * self.hidden

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """(in, out) of the linear ones of a layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        h, f = self.hidden, self.intermediate
        return [(h, query), (h, key), (h, key), (query, h), (h, f), (h, f), (f, h)]

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        vectors = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        if self.qkv_bias:
            vectors += (self.heads + 2 * self.kv_heads) * self.head_dim
        return sum(rows * columns for rows, columns in self.matrices) + vectors

    @property
    def num_params(self) -> int:
        """All parameters."""
        ends = self.embedding * (1 if self.tied else 2)
        return self.layers * self.layer + ends + self.hidden

    def adapter_params(self, rank: int) -> int:
        """Parameters of LoRA's A and B on all linear layers but the head."""
        return self.layers * sum(rank * (rows + columns) for rows, columns in self.matrices)

    def served_bytes(self, bytes_each: int) -> float:
        """Weights of an engine; quantization leaves embedding and head as they are."""
        if not self.bits:
            return self.num_params * bytes_each
        layers = self.layers * self.layer
        return layers * self.bits / 8 * GROUP_OVERHEAD + (self.num_params - layers) * bytes_each

    def kv_bytes(self, bytes_each: int) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_each


def _qwen2(
    hidden: int, layers: int, heads: int, kv: int, f: int, vocabulary: int, context: int = 32768
) -> ModelShape:
    return ModelShape(
        hidden=hidden, layers=layers, heads=heads, kv_heads=kv, head_dim=128, intermediate=f,
        vocabulary=vocabulary, context=context, qkv_bias=True, tied=hidden == 2048,
    )  # fmt: skip


def _qwen3(hidden: int, layers: int, heads: int, f: int) -> ModelShape:
    return ModelShape(
        hidden=hidden, layers=layers, heads=heads, kv_heads=8, head_dim=128, intermediate=f,
        vocabulary=151936, context=40960, qk_norm=True,
    )  # fmt: skip


# By public name; a name that contains one of these has its shape.
KNOWN: dict[str, ModelShape] = {
    "Qwen2.5-3B": _qwen2(2048, 36, 16, 2, 11008, 151936),
    "Qwen2.5-7B": _qwen2(3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-14B": _qwen2(5120, 48, 40, 8, 13824, 152064),
    "Qwen2.5-32B": _qwen2(5120, 64, 40, 8, 27648, 152064),
    "QwQ-32B": _qwen2(5120, 64, 40, 8, 27648, 152064, 40960),
    "Qwen2.5-72B": _qwen2(8192, 80, 64, 8, 29568, 152064),
    "Qwen3-8B": _qwen3(4096, 36, 32, 12288),
    "Qwen3-14B": _qwen3(5120, 40, 40, 17408),
    "Llama-3.1-8B": ModelShape(
        hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336,
        vocabulary=128256, context=131072,
    ),
}  # fmt: skip


def find_shape(path: Path, quantization: str = "") -> ModelShape | None:
    """The shape of the model at `path`; none where neither a config.json nor a public name tells
    it. Raises DataError for a config.json without the sizes."""
    bits = 0
    if quantization or GPTQ.search(path.name):
        bits = 8 if re.search("int8|8bit", path.name, re.IGNORECASE) else 4
    if (path / "config.json").is_file():
        shape = shape_of(read_model_config(path), path)
    else:
        names = [name for name in KNOWN if name.lower() in str(path).lower()]
        if not names:
            return None
        name = max(names, key=len)
        shape = replace(KNOWN[name], source=f"the shape of {name} is assumed")
    return replace(shape, bits=shape.bits or bits)


def shape_of(config: dict[str, Any], path: Path) -> ModelShape:
    """From the values of a config.json. Raises DataError for missing ones."""
    kind = str(config.get("model_type", ""))
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        quantized = config.get("quantization_config") or {}
        return ModelShape(
            hidden=hidden,
            layers=int(config["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            intermediate=int(config["intermediate_size"]),
            vocabulary=int(config["vocab_size"]),
            context=stretched(config),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=bool(config.get("attention_bias", kind == "qwen2")),
            qk_norm=kind == "qwen3",
            bits=int(quantized.get("bits") or 0),
            source=f"{path / 'config.json'}",
        )
    except KeyError as error:
        raise DataError(f"{path / 'config.json'}: key {error} is missing") from error
