"""Export of a checkpoint as a Hugging Face directory, without ranks; weights are read by name.

CHECKPOINT/            config, tokenizer, chat template and weights in the training dtype
CHECKPOINT/trainer/    float32 weights, one file per rank
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentenv.base.errors import DataError
from agentenv.base.model_files import check_known, load_pretrained
from agentenv.learners.lora import (
    ADAPTER,
    ADAPTER_FOLDER,
    disk_shapes,
    is_adapter,
    merged,
    write_adapter,
)
from agentenv.learners.ranks.checkpoint import MASTER
from agentenv.learners.ranks.export import (
    MAX_SHARD_BYTES,
    ParamParts,
    WeightEntry,
    WeightFiles,
    check_written,
    copy_files,
    write_weights,
)
from agentenv.learners.ranks.saved_checkpoint import Checkpoint

TRAINER = "trainer"


def export(
    checkpoint: Path, out: Path, *, dtype: str = "bfloat16", max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write `out` from a checkpoint's directory, from its float32 weights if they exist.

    With adapters `out` has the merged model, and `out`/adapter the adapter. Raises DataError if the
    checkpoint is incomplete.
    """
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out} is not empty; choose another folder")
    if not (checkpoint / "config.json").is_file():
        raise DataError(f"{checkpoint} is not a checkpoint: config.json is missing")
    saved = Checkpoint(checkpoint / TRAINER) if (checkpoint / TRAINER).is_dir() else None
    check_known(checkpoint)
    copy_files(checkpoint, out, dtype)
    weights = WeightFiles(_base_of(checkpoint, saved))
    wanted = getattr(torch, dtype)
    # Loaded, not made from its configuration: transformers notes what it renames.
    model = load_pretrained("AutoModelForCausalLM", checkpoint, device_map="meta")
    fused = {} if saved is None else _fused(saved, model)
    first = {id(param): name for name, param in model.named_parameters()}
    names = {  # in memory by that on disk; the others are unchanged, as are biases of routers
        disk: first[id(param)]
        for name, param in model.named_parameters(remove_duplicate=False)
        for disk in disk_shapes(model, name, tuple(param.shape), param.dtype)
    }

    def tensor(name: str) -> Tensor:
        if name in fused:
            found = fused[name].take(name)
        elif saved is None:
            found = weights.tensor(name)
        else:
            found = trained(saved, weights, name, names.get(name, name))
        return found.to(written(name))

    def written(name: str) -> torch.dtype:
        before = weights.dtype(name)
        return wanted if before.is_floating_point and name in names else before

    entries = [
        WeightEntry(name, written(name), weights.shape(name), partial(tensor, name))
        for name in weights.names()
    ]
    write_weights(entries, entries, out, max_shard_bytes=max_shard_bytes, durable=True)
    if saved is not None and saved.meta.lora is not None:
        adapter = {name: whole(saved, name) for name in saved.shapes if is_adapter(name)}
        write_adapter(out / ADAPTER_FOLDER, saved.meta.lora, adapter, saved.meta.base_model)
    check_written(out)


def _fused(saved: Checkpoint, model: Any) -> dict[str, ParamParts]:
    """Trained weights with other names in memory, by their names on disk."""
    found: dict[str, ParamParts] = {}
    for name, shape in saved.shapes.items():
        shapes = {} if is_adapter(name) else disk_shapes(model, name, shape, torch.float32)
        if shapes and list(shapes) != [name]:
            found |= dict.fromkeys(shapes, ParamParts(model, name, partial(whole, saved, name)))
    return found


def whole(saved: Checkpoint, name: str) -> Tensor:
    """A parameter from all ranks' files, float32."""
    shape = saved.shapes[name]
    return saved.read(name, MASTER, 0, torch.Size(shape).numel()).view(shape)


def trained(saved: Checkpoint, weights: WeightFiles, name: str, own: str) -> Tensor:
    """A weight of the checkpoint, with its name on disk and its `own` one in memory: trained,
    merged with its adapter, or original."""
    if own in saved.shapes:
        return whole(saved, own)
    layer, lora = own.removesuffix(".weight"), saved.meta.lora
    pair = [f"{layer}.lora_{part}.{ADAPTER}.weight" for part in ("A", "B")]
    if lora is None or pair[0] not in saved.shapes:
        return weights.tensor(name)
    lora_a, lora_b = (whole(saved, factor) for factor in pair)
    return merged(weights.tensor(name).float(), lora_a, lora_b, lora.alpha / lora.r)


def _base_of(checkpoint: Path, saved: Checkpoint | None) -> Path:
    """The directory of the original weights, or of the written ones."""
    if saved is None or saved.meta.lora is None:
        return checkpoint
    base = Path(saved.meta.base_model)
    if not base.is_dir():
        raise DataError(
            f"{base}: the adapters' base model no longer exists; the merged model is in the "
            "checkpoint itself"
        )
    return base
