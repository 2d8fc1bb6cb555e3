"""A Hugging Face directory from a checkpoint, without ranks: weights are read name by name.

CHECKPOINT/            config, tokenizer, chat template and weights in the training dtype
CHECKPOINT/trainer/    float32 weights, in as many files as there were ranks
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from agentenv.errors import DataError
from learners.checkpoint import Checkpoint
from learners.export import INDEX, MAX_SHARD_BYTES, WEIGHTS, Source, copy_files, write_weights
from learners.fragments import MASTER
from learners.lora import ADAPTER, ADAPTER_FOLDER, is_adapter, merged, write_adapter

TRAINER = "trainer"


class Weights:
    """The tensors of a Hugging Face directory, mapped from its files."""

    def __init__(self, directory: Path) -> None:
        index = directory / INDEX
        if index.is_file():
            places = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {name: directory / file for name, file in places.items()}
        elif (directory / WEIGHTS).is_file():
            with safe_open(directory / WEIGHTS, "pt") as file:
                files = dict.fromkeys(file.keys(), directory / WEIGHTS)
        else:
            raise DataError(f"{directory}: holds neither {WEIGHTS} nor {INDEX}")
        self._files = files
        self._open: dict[Path, Any] = {}

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._file(name).get_tensor(name)
        return found

    def _file(self, name: str) -> Any:
        path = self._files[name]
        if path not in self._open:
            self._open[path] = safe_open(path, "pt")
        return self._open[path]


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write `out` from a checkpoint's directory; its float32 weights are used if they are there.

    With adapters `out` holds the merged model, and `out`/adapter the adapter by itself. Raises
    DataError if the checkpoint is not complete.
    """
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out} is not empty; choose another place to export to")
    if not (checkpoint / "config.json").is_file():
        raise DataError(f"{checkpoint} is no checkpoint: it has no config.json")
    saved = Checkpoint(checkpoint / TRAINER) if (checkpoint / TRAINER).is_dir() else None
    copy_files(checkpoint, out, dtype)
    wanted = getattr(torch, dtype)
    entries = _plain(checkpoint, saved) if saved is None or not saved.meta.lora else _merged(saved)
    size = wanted.itemsize

    def cast(tensor: Callable[[], Tensor]) -> Callable[[], Tensor]:
        def get() -> Tensor:
            found = tensor()
            return found.to(wanted) if found.is_floating_point() else found

        return get

    sized = ((name, numel * size, cast(tensor)) for name, numel, tensor in entries)
    write_weights(sized, out, max_shard_bytes=max_shard_bytes, durable=True)
    if saved is not None and saved.meta.lora is not None:
        adapter = {name: whole(saved, name) for name in saved.shapes if is_adapter(name)}
        write_adapter(out / ADAPTER_FOLDER, saved.meta.lora, adapter, saved.meta.base_model)


def whole(saved: Checkpoint, name: str) -> Tensor:
    """A parameter from all ranks' files, float32."""
    shape = saved.shapes[name]
    return saved.read(name, MASTER, 0, torch.Size(shape).numel()).view(shape)


def _plain(checkpoint: Path, saved: Checkpoint | None) -> Iterator[Source]:
    """(name, number of elements, tensor) of each weight; what was not trained is the model's."""
    weights = Weights(checkpoint)
    for name in weights.names():
        numel = torch.Size(weights.shape(name)).numel()
        if saved is not None and name in saved.shapes:
            yield name, numel, partial(whole, saved, name)
        else:
            yield name, numel, partial(weights.tensor, name)


def _merged(saved: Checkpoint) -> Iterator[Source]:
    base = Path(saved.meta.base_model)
    if not base.is_dir():
        raise DataError(
            f"{base}: the frozen model that the adapters belong to is not there any more; "
            "the merged model is in the checkpoint itself"
        )
    weights, lora = Weights(base), saved.meta.lora
    assert lora is not None
    scale = lora.alpha / lora.r
    for name in weights.names():
        layer = name.removesuffix(".weight")
        factors = [f"{layer}.lora_{part}.{ADAPTER}.weight" for part in ("A", "B")]

        def tensor(name: str = name, factors: list[str] = factors) -> Tensor:
            weight = weights.tensor(name)
            if factors[0] not in saved.shapes:
                return weight
            lora_a, lora_b = (whole(saved, factor) for factor in factors)
            return merged(weight.float(), lora_a, lora_b, scale)

        yield name, torch.Size(weights.shape(name)).numel(), tensor
