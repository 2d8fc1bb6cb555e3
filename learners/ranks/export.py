"""Export of Hugging Face directories for engines and users, tensor by tensor.

Main memory has only one tensor at a time in addition to the rank's own; at ZeRO stage 3 weights are
gathered bucket by bucket. With adapters the directory has the merged model, and DIR/adapter the
adapter.

A directory is complete when it has model.safetensors or model.safetensors.index.json.

Names are those of published models, which transformers and engines read. A parameter in memory may
be several tensors on disk: transformers keeps the experts of a layer as one parameter.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor, dtype

from agentenv.base import model_files
from agentenv.base.disk import removing, sync, write_whole
from agentenv.base.errors import DataError, EngineError, reported_as
from agentenv.contract.weights import INDEX, SINGLE, read_header, read_layout, weight_files
from agentenv.learners import lora
from agentenv.learners.ranks.checkpoint import DTYPES, TensorPlace, write_tensors
from agentenv.learners.trees.policy import text_part

if TYPE_CHECKING:
    from agentenv.learners.ranks.backend import RankBackend

TEMPLATES = "additional_chat_templates"  # a subfolder that transformers also reads
MAX_SHARD_BYTES = 5 << 30
BUCKET_BYTES = 512 << 20


@dataclass(frozen=True)
class WeightEntry(TensorPlace):
    """A tensor of the directory, and a function that returns it while `params` are gathered."""

    tensor: Callable[[], Tensor]
    params: Sequence[Any] = ()


def write_model(
    backend: RankBackend, source: Path, directory: Path, *, durable: bool = False
) -> None:
    """Write the policy as a Hugging Face directory; collective, rank 0 writes.

    Files other than weights (tokenizer, chat template, generation_config) come from `source`.
    A `durable` directory survives a crash of the machine, has all tensors of `source` and the
    adapter, and is checked: DataError names a file that cannot be opened.
    """
    planned = partial(entries, backend.policy.model, source if durable else None)
    whole = gathered(planned())
    if backend.rank == 0:
        copy_files(source, directory, backend.config.dtype)
        write_weights(planned(), whole, directory, durable=durable)
    for _ in whole:  # the other ranks take part in the gathers
        pass
    if backend.config.lora is not None and durable:
        write_adapter_only(backend, source, directory / lora.ADAPTER_FOLDER)
    if backend.rank == 0 and durable:
        check_written(directory)


def write_adapter_only(backend: RankBackend, source: Path, directory: Path) -> None:
    """Write the adapter in peft's format, complete once its adapter_config.json exists; collective,
    rank 0 writes. `source` is the frozen model."""
    named = backend.policy.model.named_parameters()
    adapter = {name: param for name, param in named if lora.is_adapter(name)}
    with _whole(list(adapter.values())):
        if backend.rank == 0:
            copies = {name: param.detach().cpu().clone() for name, param in adapter.items()}
            assert backend.config.lora is not None
            lora.write_adapter(directory, backend.config.lora, copies, str(source))


class ParamParts:
    """The tensors on disk of one parameter of a model, each a separate copy.

    `whole` returns the parameter; it is called only once if each tensor is taken once.
    """

    def __init__(self, model: Any, name: str, whole: Callable[[], Tensor]) -> None:
        self._make = lambda: lora.on_disk(model, name, whole())
        self._left: dict[str, Tensor] = {}

    def take(self, name: str) -> Tensor:
        if name not in self._left:
            self._left = self._make()  # type: ignore[no-untyped-call]
        return torch.clone(self._left.pop(name))


def entries(model: Any, source: Path | None = None) -> Iterator[WeightEntry]:
    """The entries of a model's text part: tied weights once, under their first name; adapters
    merged. With the directory `source` that it was loaded from, also the other tensors there, as
    they are, and tied weights under all names that they have there."""
    own = text_part(model)
    written = list(_own_entries(model, own))
    yield from written
    if source is None:
        return
    files, same = WeightFiles(source), tied_names(model)
    by_name = {entry.name: entry for entry in written}
    for name in files.files:
        if name in same and name not in by_name:
            yield replace(by_name[same[name]], name=name)
        elif name not in by_name:
            load = partial(files.tensor, name)
            yield WeightEntry(name, files.dtype(name), files.shape(name), load)


def _own_entries(model: Any, own: Container[int]) -> Iterator[WeightEntry]:
    for name, param in list(model.named_parameters()):
        if lora.is_adapter(name) or id(param) not in own:
            continue
        found = lora.factors(model, name)

        def tensor(param: Tensor = param, found: Any = found) -> Tensor:
            return param.detach() if found is None else lora.merged(param, *found)

        shape = tuple(getattr(param, "ds_shape", param.shape))
        needed = (param, *(found[:2] if found else ()))
        yield from _entries_of(model, lora.plain_name(name), param.dtype, shape, tensor, needed)
    stored = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if name in stored and id(buffer) in own:
            shape = tuple(buffer.shape)
            yield from _entries_of(model, name, buffer.dtype, shape, buffer.detach)


def tied_names(model: Any) -> dict[str, str]:
    """The further names on disk of tied weights, each with the first one."""

    def disk(name: str) -> str:
        return next(iter(lora.disk_shapes(model, name, (2, 2), torch.float32)))

    tied = lora.names_of(model).values()
    return {disk(other): disk(first) for first, *others in tied for other in others}


def untrained(model: Any, source: Path) -> list[str]:
    """The tensors of the directory `source` that the model does not train."""
    trained = {entry.name for entry in _own_entries(model, text_part(model))}
    return sorted(WeightFiles(source).files.keys() - trained - tied_names(model).keys())


def _entries_of(
    model: Any,
    name: str,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    tensor: Callable[[], Tensor],
    needed: Sequence[Any] = (),
) -> Iterator[WeightEntry]:
    """The entries of one parameter or buffer of the model."""
    shapes = lora.disk_shapes(model, name, shape, dtype)
    if len(shapes) == 1:
        (disk,) = shapes
        yield WeightEntry(disk, dtype, shape, tensor, needed)
        return
    parts = ParamParts(model, name, tensor)
    for disk, part in shapes.items():
        yield WeightEntry(disk, dtype, part, partial(parts.take, disk), needed)


def gathered(entries: Iterable[WeightEntry]) -> Iterator[WeightEntry]:
    """The entries of a model, gathered during iteration; collective at ZeRO stage 3."""
    for bucket in buckets(entries, BUCKET_BYTES):
        needed = {id(param): param for entry in bucket for param in entry.params}
        with _whole([*needed.values()]):
            yield from bucket


def buckets(entries: Iterable[WeightEntry], max_bytes: int) -> Iterator[list[WeightEntry]]:
    """Groups of neighboring entries of at most max_bytes; a larger entry is alone, and parts of one
    parameter stay together, since it is gathered at once."""
    bucket: list[WeightEntry] = []
    size = 0
    for entry in entries:
        owners = [one.params[0] for one in (*bucket[-1:], entry) if one.params]
        is_part = len(owners) == 2 and owners[0] is owners[1]  # of one parameter
        if bucket and size + entry.num_bytes > max_bytes and not is_part:
            yield bucket
            bucket, size = [], 0
        bucket.append(entry)
        size += entry.num_bytes
    if bucket:
        yield bucket


def _whole(params: list[Any]) -> AbstractContextManager[Any]:
    """Gather the parameters during the block; collective at ZeRO stage 3."""
    if not any(hasattr(param, "ds_id") for param in params):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters(params)
    return context


def write_weights(
    planned: Iterable[WeightEntry],
    entries: Iterable[WeightEntry],
    directory: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    durable: bool = False,
) -> None:
    """Write safetensors of at most max_shard_bytes, then the index if there are several.

    `planned` has the same entries without reading their tensors; it determines the contents of each
    shard in advance.
    """
    shards = list(buckets(planned, max_shard_bytes)) or [[]]
    given = iter(entries)
    partials = [directory / f"model-{number:05d}.partial" for number in range(1, len(shards) + 1)]
    with removing(*partials):
        for path, places in zip(partials, shards, strict=True):
            loads = (entry.tensor for entry in islice(given, len(places)))
            write_tensors(path, places, loads, {"format": "pt"})
            if durable:
                sync(path)
        _name_shards(partials, shards, directory)
    if durable:
        sync(directory)


def _name_shards(partials: list[Path], shards: list[list[WeightEntry]], directory: Path) -> None:
    for stale in directory.glob("model*.safetensors"):
        stale.unlink()
    if len(shards) == 1:
        (directory / INDEX).unlink(missing_ok=True)
        os.replace(partials[0], directory / SINGLE)
        return
    places: dict[str, str] = {}
    for number, (path, shard) in enumerate(zip(partials, shards, strict=True), 1):
        final = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        os.replace(path, directory / final)
        places |= dict.fromkeys((place.name for place in shard), final)
    total = sum(place.num_bytes for shard in shards for place in shard)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_whole(directory / INDEX, json.dumps(index, indent=2) + "\n")


def copy_files(source: Path, directory: Path, dtype: str) -> None:
    """Copy all files of `source` except weights; config.json gets the dtype of the written ones.

    Each copy is a separate file, even if `source` has links, as the hub's cache does: libraries and
    editors rewrite such files in place, and a hard link would change every other directory. Raises
    DataError for a broken link.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in [*source.iterdir(), *(source / TEMPLATES).glob("*")]:
        target = directory / path.relative_to(source)
        if path.name.endswith(model_files.WEIGHTS_SUFFIXES) or path.name == "state.json":
            continue
        if not path.exists():
            raise DataError(f"{path}: this link is broken; download or copy the model again")
        if not path.is_file() or target.exists():
            continue
        target.parent.mkdir(exist_ok=True)
        if path.name == "config.json":
            write_whole(target, _config_with(path, dtype))
        else:
            shutil.copyfile(path, target)


def check_written(directory: Path) -> None:
    """Open the files that users of a model directory open: configurations, tokenizer, and the
    header of each file of weights. Raises DataError for a file that cannot be opened."""
    model_files.read_model_config(directory)
    generation = directory / model_files.GENERATION
    if generation.is_file():
        model_files.read_object(generation, "generation configuration")
    if (directory / "tokenizer.json").is_file():
        model_files.load_tokenizer(directory)
    with reported_as(DataError, "", EngineError):
        read_layout(directory)
        for path in (directory / lora.ADAPTER_FOLDER).glob("*.safetensors"):
            read_header(path)


def _config_with(path: Path, dtype: str) -> str:
    config = model_files.read_object(path, "model configuration")
    known = config.keys() & {"dtype", "torch_dtype"}
    config |= dict.fromkeys(known or {"dtype"}, dtype)
    return json.dumps(config, indent=2) + "\n"


class WeightFiles:
    """The tensors of a Hugging Face directory, mapped from its `files`, by the tensors' names."""

    def __init__(self, directory: Path) -> None:
        with reported_as(DataError, "", EngineError):
            paths = weight_files(directory)
            self.files = {name: path for path in paths for name in read_header(path)}
        self._open = cache(partial(safe_open, framework="pt"))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> dtype:
        return DTYPES[self._file(name).get_slice(name).get_dtype()]

    def tensor(self, name: str) -> Tensor:
        found: Tensor = self._file(name).get_tensor(name)
        return found

    def _file(self, name: str) -> Any:
        return self._open(self.files[name])
