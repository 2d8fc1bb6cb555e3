"""Weights of the embedded engine, loaded and replaced in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentenv.engines.embedded_architecture import Architecture, read_json
from agentenv.errors import EngineError

FLOAT_DTYPES = ("F32", "BF16", "F16")


class LayerWeights:
    """One decoder layer; q, k and v are one matrix, gate and up another."""

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
        """Names as in the file, below model.layers.N -> the place (a view) that takes them."""
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


class Weights:
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
        self.ignored = {"lm_head.weight"} if arch.tied else set()
        self._aside: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        if not arch.tied:
            self.targets["lm_head.weight"] = self.head
        for index, layer in enumerate(self.layers):
            for name, place in layer.targets(arch).items():
                self.targets[f"model.layers.{index}.{name}"] = place

    def load(self, source: Path) -> None:
        """Replace all parameters by those of a directory with model.safetensors or its shards.

        Raises EngineError, before anything has been copied, if names, shapes or dtypes differ.
        """
        with ExitStack() as stack, torch.no_grad():
            found: dict[str, Any] = {}
            try:
                for path in _weight_files(source):
                    handle = stack.enter_context(safe_open(path, framework="pt"))
                    found.update((name, handle) for name in handle.keys())  # noqa: SIM118
                self._check(source, found)
                for name, place in self.targets.items():
                    place.copy_(found[name].get_tensor(name))
            except (SafetensorError, OSError) as error:
                raise EngineError(f"cannot read the weights in {source}: {error}") from error

    def give_back(self) -> None:
        """Free their memory on the device; `take_back` brings them back."""
        for storage in self._storages():
            copy = storage.cpu().clone()  # type: ignore[no-untyped-call]
            self._aside.append((storage, copy))
        for storage, _ in self._aside:
            storage.resize_(0)

    def take_back(self) -> None:
        """Put them where they were: every view of them holds again."""
        for storage, copy in self._aside:
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self._aside = []

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        """Each once."""
        seen = {
            place.untyped_storage().data_ptr(): place.untyped_storage()
            for place in self.targets.values()
        }
        yield from seen.values()

    def _check(self, source: Path, found: dict[str, Any]) -> None:
        missing = sorted(self.targets.keys() - found.keys())
        unknown = sorted(found.keys() - self.targets.keys() - self.ignored)
        if missing or unknown:
            raise EngineError(f"weights in {source}: missing {missing[:3]}, unknown {unknown[:3]}")
        for name, place in self.targets.items():
            entry = found[name].get_slice(name)
            shape = tuple(entry.get_shape())
            # The norms of all query heads share one vector in the file.
            expected = tuple(place.shape[-1:] if "_norm." in name else place.shape)
            if shape != expected:
                raise EngineError(f"weights in {source}: {name} is {shape}, expected {expected}")
            if entry.get_dtype() not in FLOAT_DTYPES:
                raise EngineError(
                    f"weights in {source}: {name} has dtype {entry.get_dtype()}, "
                    f"expected one of {', '.join(FLOAT_DTYPES)}"
                )


def _weight_files(source: Path) -> list[Path]:
    index = source / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map", {})
        return [source / name for name in sorted(set(names.values()))]
    return [source / "model.safetensors"]
