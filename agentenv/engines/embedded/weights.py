"""Supported models of the embedded engine: sizes from config.json, weights from safetensors.

Weights are replaced in place, all or none of them, so that views of parameters stay valid.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from agentenv.base.errors import EngineError, reported_as
from agentenv.base.model_files import read_eos_ids, text_table
from agentenv.contract.weights import Layout, check_layout, read_json, weight_files


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


def read_architecture(model_path: Path, tokenizer: Any = None) -> Architecture:
    """Read config.json, and the end-of-turn tokens from all their sources.

    Raises EngineError, naming the key, for unsupported features.
    """
    path = model_path / "config.json"
    config = text_table(read_json(path))
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
        eos_ids=read_eos_ids(model_path, tokenizer),
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
    """rope_theta and rope_type with the type's parameters, in the new or old format."""
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


FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LayerWeights:
    """One decoder layer; q, k and v share one matrix, gate and up another."""

    def __init__(self, arch: Architecture, options: dict[str, Any]) -> None:
        d, hidden = arch.head_dim, arch.hidden_size
        num_qk = arch.num_heads + arch.num_kv_heads
        qkv_size = (num_qk + arch.num_kv_heads) * d
        self.attn_norm = torch.zeros(hidden, **options)
        self.qkv = torch.zeros(qkv_size, hidden, **options)
        self.qkv_bias = torch.zeros(qkv_size, **options) if arch.qkv_bias else None
        self.qk_norm = torch.zeros(num_qk, d, **options) if arch.qk_norm else None
        self.out = torch.zeros(hidden, arch.num_heads * d, **options)
        self.out_bias = torch.zeros(hidden, **options) if arch.out_bias else None
        self.mlp_norm = torch.zeros(hidden, **options)
        self.gate_up = torch.zeros(2 * arch.intermediate_size, hidden, **options)
        self.down = torch.zeros(hidden, arch.intermediate_size, **options)

    def targets(self, arch: Architecture) -> dict[str, Tensor]:
        """Views of the parameters, by their names in the file below model.layers.N."""
        sizes = [n * arch.head_dim for n in (arch.num_heads, arch.num_kv_heads, arch.num_kv_heads)]
        gate, up = self.gate_up.chunk(2)
        places = {
            "input_layernorm.weight": self.attn_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
            "self_attn.o_proj.weight": self.out,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": self.down,
        }
        for name, part in zip("qkv", torch.split_with_sizes(self.qkv, sizes), strict=True):
            places[f"self_attn.{name}_proj.weight"] = part
        if self.qkv_bias is not None:
            for name, part in zip("qkv", torch.split_with_sizes(self.qkv_bias, sizes), strict=True):
                places[f"self_attn.{name}_proj.bias"] = part
        if self.out_bias is not None:
            places["self_attn.o_proj.bias"] = self.out_bias
        if self.qk_norm is not None:
            places["self_attn.q_norm.weight"] = self.qk_norm[: arch.num_heads]
            places["self_attn.k_norm.weight"] = self.qk_norm[arch.num_heads :]
        return places


class EmbeddedWeights:
    """All parameters of a model, on one device in one dtype."""

    def __init__(self, arch: Architecture, dtype: torch.dtype, device: torch.device) -> None:
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.embed = torch.zeros(arch.vocab_size, arch.hidden_size, **options)
        self.head = self.embed if arch.tied else torch.zeros_like(self.embed)
        self.final_norm = torch.zeros(arch.hidden_size, **options)
        self.layers = [LayerWeights(arch, options) for _ in range(arch.num_layers)]
        self.targets = {
            "model.embed_tokens.weight": self.embed,
            "model.norm.weight": self.final_norm,
        }
        self._tied = arch.tied
        self._aside: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        if not arch.tied:
            self.targets["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            for name, place in layer.targets(arch).items():
                self.targets[f"model.layers.{index}.{name}"] = place

    def load(self, source: Path) -> None:
        """Replace all parameters by those of a directory with model.safetensors or its shards.

        Raises EngineError and changes nothing if a file cannot be read or names, shapes or dtypes
        differ: everything is in main memory, and checked, before the first parameter is replaced.
        """
        found: dict[str, Tensor] = {}
        for path in weight_files(source):
            found |= _read_tensors(path)
        self._check(source, found)
        with torch.no_grad():
            for name, place in self.targets.items():
                place.copy_(found[name])

    def release_memory(self) -> None:
        """Free their memory on the device; see `restore_memory`."""
        storages = map(Tensor.untyped_storage, self.targets.values())
        for storage in {one.data_ptr(): one for one in storages}.values():  # each once
            self._aside.append((storage, storage.cpu().clone()))  # type: ignore[no-untyped-call]
            storage.resize_(0)

    def restore_memory(self) -> None:
        """Restore them in place, so that their views are valid again."""
        for storage, copy in self._aside:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._aside = []

    def _check(self, source: Path, found: dict[str, Tensor]) -> None:
        shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
        expected = {
            # The norms of all query heads share one vector in the file.
            name: tuple(place.shape[-1:] if "_norm." in name else place.shape)
            for name, place in self.targets.items()
        }
        config = {"tie_word_embeddings": self._tied}
        check_layout(source, Layout(source, shapes, {}), Layout(source, expected, config))


def _read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a file by name, in main memory; a read error of a mapped file would kill the
    process later. Raises EngineError."""
    problems = SafetensorError, OSError, KeyError  # the last: a dtype that torch does not have
    with reported_as(EngineError, f"cannot read the weights in {path}", *problems):
        tensors: dict[str, Tensor] = load(path.read_bytes())
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOAT_DTYPES:
            raise EngineError(
                f"weights in {path}: {name} has dtype {tensor.dtype}, "
                f"expected one of {', '.join(map(str, FLOAT_DTYPES))}"
            )
    return tensors
