"""Export of a checkpoint as a Hugging Face directory, without ranks; weights are read by name.

CHECKPOINT/            config, tokenizer, chat template and weights in the training dtype
CHECKPOINT/trainer/    float32 weights, one file per rank
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentenv.base.errors import ConfigError, DataError
from agentenv.base.model_files import check_known, load_config, load_pretrained
from agentenv.learners.lora import (
    ADAPTER,
    ADAPTER_FOLDER,
    disk_shapes,
    empty_model,
    is_adapter,
    merged,
    names_of,
    write_adapter,
)
from agentenv.learners.ranks import export as exports
from agentenv.learners.ranks.checkpoint import MASTER
from agentenv.learners.ranks.saved_checkpoint import Checkpoint

TRAINER = "trainer"


def export(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = exports.MAX_SHARD_BYTES,
    text_only: bool = False,
) -> None:
    """Write `out` from a checkpoint's directory, from its float32 weights if they exist.

    With adapters `out` has the merged model, and `out`/adapter the adapter. With `text_only`, it
    has the text model of a larger one alone, without towers. Raises DataError if the checkpoint is
    incomplete.
    """
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out} is not empty; choose another folder")
    if not (checkpoint / "config.json").is_file():
        raise DataError(f"{checkpoint} is not a checkpoint: config.json is missing")
    saved = Checkpoint(checkpoint / TRAINER) if (checkpoint / TRAINER).is_dir() else None
    check_known(checkpoint)
    text = text_model(checkpoint) if text_only else None
    exports.copy_files(checkpoint, out, dtype)
    weights = exports.WeightFiles(_base_of(checkpoint, saved))
    wanted = getattr(torch, dtype)
    # Loaded, not made from its configuration: transformers notes what it renames.
    model = load_pretrained("AutoModelForCausalLM", checkpoint, device_map="meta")
    fused = {} if saved is None else _fused(saved, model)
    own_names = names_of(model)
    names = {  # in memory by that on disk; the others are unchanged, as are biases of routers
        disk: own_names[id(param)][0]
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

    own = {name: name for name in weights.files}
    if text is not None:
        own = dict(zip(disk_names(model), disk_names(text), strict=True))
    entries = [
        exports.WeightEntry(own[name], written(name), weights.shape(name), partial(tensor, name))
        for name in weights.files
        if name in own
    ]
    if text is not None:
        ends = (model.get_output_embeddings(), model.get_input_embeddings())
        text.config.tie_word_embeddings = ends[0].weight is ends[1].weight
        text.config.architectures, text.config.dtype = [type(text).__name__], dtype
        text.config.save_pretrained(out)
    exports.write_weights(entries, entries, out, max_shard_bytes=max_shard_bytes, durable=True)
    if saved is not None and saved.meta.lora is not None:
        adapter = {name: whole(saved, name) for name in saved.shapes if is_adapter(name)}
        write_adapter(out / ADAPTER_FOLDER, saved.meta.lora, adapter, saved.meta.base_model)
    exports.check_written(out)


def text_model(directory: Path) -> Any:
    """The text model inside that of a directory, without memory for weights. Raises ConfigError for
    a family that has no class for it."""
    config = load_config(directory)
    inner = config.get_text_config()
    if end := getattr(config, "eos_token_id", None):
        inner.eos_token_id = end
    try:
        return empty_model(inner)
    except ValueError as error:
        raise ConfigError(
            f"{directory}: transformers has no class for {inner.model_type}, the text model of "
            f"{config.model_type}, alone; omit --text-only"
        ) from error


def disk_names(model: Any) -> Iterator[str]:
    """The names on disk of the tensors of the text model inside a model, in its own order."""
    places = {id(part): place for place, part in model.named_modules()}
    for part in (model.get_decoder(), model.get_output_embeddings()):
        for name, tensor in part.state_dict().items():
            name = f"{places[id(part)]}.{name}".lstrip(".")
            yield from disk_shapes(model, name, tuple(tensor.shape), tensor.dtype)


def _fused(saved: Checkpoint, model: Any) -> dict[str, exports.ParamParts]:
    """Trained weights with other names in memory, by their names on disk."""
    found: dict[str, exports.ParamParts] = {}
    for name, shape in saved.shapes.items():
        shapes = {} if is_adapter(name) else disk_shapes(model, name, shape, torch.float32)
        if shapes and list(shapes) != [name]:
            found |= dict.fromkeys(
                shapes, exports.ParamParts(model, name, partial(whole, saved, name))
            )
    return found


def whole(saved: Checkpoint, name: str) -> Tensor:
    """A parameter from all ranks' files, float32."""
    shape = saved.shapes[name]
    return saved.read(name, MASTER, 0, torch.Size(shape).numel()).view(shape)


def trained(saved: Checkpoint, weights: exports.WeightFiles, name: str, own: str) -> Tensor:
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
