"""Hugging Face directories for engines and for users, written shard by shard.

Only one shard is in memory at a time; at ZeRO stage 3 weights are gathered bucket by bucket. With
adapters the directory holds the merged model, and the adapter by itself in DIR/adapter.

A directory is complete when it has model.safetensors or model.safetensors.index.json.

`export` makes one of a checkpoint without ranks, reading weights name by name:

    CHECKPOINT/            config, tokenizer, chat template and weights in the training dtype
    CHECKPOINT/trainer/    float32 weights, in as many files as there were ranks
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, dtype

from agentenv.disk import sync, write_whole
from agentenv.errors import DataError
from learners.checkpoint import MASTER, Checkpoint
from learners.lora import (
    ADAPTER,
    ADAPTER_FOLDER,
    factors,
    is_adapter,
    merged,
    plain_name,
    write_adapter,
)

if TYPE_CHECKING:
    from learners.backend import RankBackend

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SKIPPED_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".index.json", ".partial", ".gguf")
NOT_OF_THE_MODEL = ("state.json",)
MAX_SHARD_BYTES = 5 << 30
BUCKET_BYTES = 512 << 20

Source = tuple[str, int, Callable[[], Tensor]]  # name, bytes, the tensor when it is needed


@dataclass(frozen=True)
class Entry:
    """A tensor of the directory: its name, its bytes there, what it is, and how to get it."""

    name: str
    num_bytes: int
    dtype: dtype
    shape: tuple[int, ...]
    tensor: Callable[[], Tensor]


def write_model(
    backend: RankBackend, source: Path, directory: Path, *, durable: bool = False
) -> None:
    """Write the policy as a Hugging Face directory; all ranks call it, rank 0 writes.

    Files other than weights (tokenizer, chat template, generation_config) come from `source`.
    What is durable survives a crash of the machine, and has the adapter beside the merged model.
    """
    model, lora = backend.policy.model, backend.config.lora
    whole = list(entries(model))
    if backend.rank == 0:
        copy_files(source, directory, backend.config.dtype)
        write_weights(gathered(whole, model), directory, durable=durable)
    else:
        for _ in gathered(whole, model):
            pass
    if lora is not None and durable:
        write_adapter_only(backend, source, directory / ADAPTER_FOLDER)


def write_adapter_only(backend: RankBackend, source: Path, directory: Path) -> None:
    """Write the adapter in peft's form, complete once its adapter_config.json is there; all ranks
    call it, rank 0 writes. `source` is the frozen model."""
    named = backend.policy.model.named_parameters()
    adapter = {name: param for name, param in named if is_adapter(name)}
    with _whole(list(adapter.values())):
        if backend.rank == 0:
            copies = {name: param.detach().cpu().clone() for name, param in adapter.items()}
            assert backend.config.lora is not None
            write_adapter(directory, backend.config.lora, copies, str(source))


def entries(model: Any) -> Iterator[Entry]:
    """Tied weights once, under their first name; adapters are merged into what they adapt."""
    params = dict(model.named_parameters())
    for name, param in params.items():
        if not is_adapter(name):
            numel = getattr(param, "ds_numel", param.numel())
            found = factors(model, name)

            def tensor(param: Tensor = param, found: Any = found) -> Tensor:
                if found is not None:
                    return merged(param, *found)
                # A gathered weight is gone after its bucket.
                return param.detach().clone() if hasattr(param, "ds_id") else param.detach()

            shape = tuple(getattr(param, "ds_shape", param.shape))
            yield Entry(plain_name(name), numel * param.element_size(), param.dtype, shape, tensor)
    everywhere = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    for name, buffer in model.state_dict().items():
        if name not in everywhere:
            size = buffer.numel() * buffer.element_size()
            yield Entry(name, size, buffer.dtype, tuple(buffer.shape), buffer.detach)


def gathered(whole: list[Entry], model: Any) -> Iterator[Source]:
    """Entries with weights that are whole while they are looked at."""
    params = {plain_name(name): (name, param) for name, param in model.named_parameters()}
    for bucket in buckets(whole, BUCKET_BYTES):
        needed: list[Any] = []
        for entry in bucket:
            if entry.name in params:
                name, param = params[entry.name]
                pair = factors(model, name)
                needed += [param, *(pair[:2] if pair else ())]
        with _whole(needed):
            for entry in bucket:
                yield entry.name, entry.num_bytes, entry.tensor


def buckets(entries: Iterable[Entry], max_bytes: int) -> Iterator[list[Entry]]:
    """Neighbouring entries of at most max_bytes together; a larger one comes alone."""
    bucket: list[Entry] = []
    size = 0
    for entry in entries:
        if bucket and size + entry.num_bytes > max_bytes:
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += entry.num_bytes
    if bucket:
        yield bucket


def _whole(params: list[Any]) -> AbstractContextManager[Any]:
    """Collective at ZeRO stage 3: the parameters are whole inside the block."""
    if not any(hasattr(param, "ds_id") for param in params):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(params)
    return context


def write_weights(
    entries: Iterable[Source],
    directory: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    durable: bool = False,
) -> None:
    """Write safetensors of at most max_shard_bytes, then the index if there are several.

    Names of shards hold their number, which is known at the end only, so they are renamed then.
    """
    parts: list[tuple[Path, list[str]]] = []
    shard: dict[str, Tensor] = {}
    size = total = 0

    def flush() -> None:
        nonlocal shard, size
        path = directory / f"model-{len(parts) + 1:05d}.partial"
        save_file(shard, path, metadata={"format": "pt"})
        if durable:
            sync(path)
        parts.append((path, list(shard)))
        shard, size = {}, 0

    for name, num_bytes, tensor in entries:
        if shard and size + num_bytes > max_shard_bytes:
            flush()
        shard[name] = tensor().cpu().contiguous()
        size += num_bytes
        total += num_bytes
    flush()
    _name_shards(parts, directory, total)
    if durable:
        sync(directory)


def _name_shards(parts: list[tuple[Path, list[str]]], directory: Path, total: int) -> None:
    for stale in directory.glob("model*.safetensors"):
        stale.unlink()
    if len(parts) == 1:
        (directory / INDEX).unlink(missing_ok=True)
        os.replace(parts[0][0], directory / WEIGHTS)
        return
    places: dict[str, str] = {}
    for number, (path, names) in enumerate(parts, 1):
        final = f"model-{number:05d}-of-{len(parts):05d}.safetensors"
        os.replace(path, directory / final)
        places |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_whole(directory / INDEX, json.dumps(index, indent=2) + "\n")


def copy_files(source: Path, directory: Path, dtype: str) -> None:
    """Link or copy all files of `source` but weights; config.json names the dtype written."""
    directory.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        target = directory / path.name
        if not path.is_file() or path.name in NOT_OF_THE_MODEL or target.exists():
            continue
        if path.name == "config.json":
            target.write_text(_config_with(path, dtype), encoding="utf-8")
        elif not path.name.endswith(SKIPPED_SUFFIXES):
            try:
                os.link(path, target)
            except OSError:  # another file system, or one without links
                shutil.copyfile(path, target)


def _config_with(path: Path, dtype: str) -> str:
    config = json.loads(path.read_text(encoding="utf-8"))
    for key in ("dtype", "torch_dtype"):
        if key in config:
            config[key] = dtype
    if "torch_dtype" not in config:
        config["dtype"] = dtype
    return json.dumps(config, indent=2) + "\n"


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
