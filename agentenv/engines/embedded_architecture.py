"""Which models the embedded engine knows, as their configuration files describe them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from agentenv.errors import EngineError


class Architecture(Struct, frozen=True, kw_only=True):
    """Sizes and switches of a Qwen3, Qwen2 or Llama decoder; lengths in tokens."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    norm_eps: float
    rope: dict[str, Any]
    qk_norm: bool
    qkv_bias: bool
    out_bias: bool
    tied: bool
    eos_ids: frozenset[int]


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises EngineError if it is missing or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise EngineError(f"{path}: expected a JSON object")
    return value


def read_architecture(model_path: Path) -> Architecture:
    """Read config.json and generation_config.json.

    Raises EngineError naming the key for whatever this engine does not implement.
    """
    path = model_path / "config.json"
    config = read_json(path)
    kind = config.get("model_type")
    if kind not in ("qwen3", "qwen2", "llama"):
        raise EngineError(f"{path}: model_type {kind!r} is not one of qwen3, qwen2, llama")
    _refuse_unsupported(path, config)

    def number(key: str) -> int:
        value = config.get(key)
        if not isinstance(value, int) or value < 1:
            raise EngineError(f"{path}: {key} must be a positive integer, found {value!r}")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    head_dim = config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % kv_heads:
        raise EngineError(f"{path}: num_key_value_heads {kv_heads} does not divide {heads} heads")
    attention_bias = bool(config.get("attention_bias", False))
    return Architecture(
        vocab_size=number("vocab_size"),
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_layers=number("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_length=number("max_position_embeddings"),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_rope_parameters(path, config),
        qk_norm=kind == "qwen3",
        qkv_bias=kind == "qwen2" or attention_bias,
        out_bias=kind != "qwen2" and attention_bias,
        tied=bool(config.get("tie_word_embeddings", False)),
        eos_ids=_eos_ids(model_path, config),
    )


def _refuse_unsupported(path: Path, config: dict[str, Any]) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise EngineError(
            f"{path}: hidden_act {config['hidden_act']!r} is not supported, only silu"
        )
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise EngineError(f"{path}: use_sliding_window (layer_types) is not supported")
    for key in ("mlp_bias", "quantization_config"):
        if config.get(key):
            raise EngineError(f"{path}: {key} is not supported")


def _rope_parameters(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_type with what the type needs, from the new or the old spelling."""
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", "default")
    needed = {
        "default": (),
        "linear": ("factor",),
        "llama3": (
            "factor",
            "low_freq_factor",
            "high_freq_factor",
            "original_max_position_embeddings",
        ),
    }.get(rope["rope_type"])
    if needed is None:
        raise EngineError(f"{path}: rope_parameters.rope_type {rope['rope_type']!r} not supported")
    for key in ("rope_theta", *needed):
        if not isinstance(rope.get(key), int | float):
            raise EngineError(f"{path}: rope_parameters.{key} must be a number")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise EngineError(f"{path}: rope_parameters.partial_rotary_factor is not supported")
    return rope


def _eos_ids(model_path: Path, config: dict[str, Any]) -> frozenset[int]:
    generation = model_path / "generation_config.json"
    ids = read_json(generation).get("eos_token_id") if generation.is_file() else None
    if ids is None:
        ids = config.get("eos_token_id")
    return frozenset([ids] if isinstance(ids, int) else ids or ())


def rope_frequencies(arch: Architecture) -> Tensor:
    """Angle per position of each pair of channels: float32 [head_dim / 2]."""
    rope = arch.rope
    exponents = torch.arange(0, arch.head_dim, 2, dtype=torch.float32) / arch.head_dim
    theta = float(rope["rope_theta"])
    frequencies = torch.pow(theta, -exponents)
    if rope["rope_type"] == "linear":
        return frequencies / float(rope["factor"])
    if rope["rope_type"] == "llama3":
        low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
        turns = frequencies * float(rope["original_max_position_embeddings"]) / (2 * math.pi)
        smooth = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - smooth) * frequencies / float(rope["factor"]) + smooth * frequencies
    return frequencies
