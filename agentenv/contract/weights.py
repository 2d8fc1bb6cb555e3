"""Weights for engines: metadata of a transfer, and a check that weights fit the served model.

    learner's rank 0 --join, send--+                        rank 0 sends, all others receive; a
                                   |  group of world_size   bucket is one tensor of bytes, which
    server 1  --join, receive------+  ranks                 concatenates weights
    server 2  --join, receive------+

The controller (pool/weight_transfer.py) only announces the manifest to both sides; no weight passes
through it. On the learner's GPUs, servers read the weights from a rank's copy:

    ranks --publish--> SharedWeights --> controller --> servers map the memory, and load
    ranks <------------------------ release ------------+
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from msgspec import Struct

from agentenv.base.errors import DataError, EngineError, reported_as
from agentenv.base.model_files import read_object, text_table


class TransferError(EngineError):
    """The sender's side of a broadcast failed or was cancelled; the learner continues."""


# Formation of a group: "torch", a torch.distributed group over a store, as in SGLang; "nccl", a
# bare NCCL communicator from a unique id, as in vLLM.
Wire = Literal["torch", "nccl"]


class Address(Struct, frozen=True):
    """The sender's rendezvous: a store's host and port with the group's torch backend, or NCCL's
    unique id (128 bytes as base64)."""

    host: str = ""
    port: int = 0
    backend: str = "nccl"
    unique_id: str = ""


class Group(Struct, frozen=True):
    """The members. The sender has rank 0. `name` is unique; `timeout_s` is the deadline of joining,
    and of one bucket."""

    name: str
    address: Address
    world_size: int
    timeout_s: float


class Bucket(Struct, frozen=True):
    """Tensors that are broadcast as one, in this order: names as in a Hugging Face directory,
    torch's dtype names (float32), shapes. All have one dtype, so that each is aligned."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


Manifest = list[Bucket]  # of one update, in order


class SharedWeights(Bucket, frozen=True):
    """A copy of the weights in memory that ranks share with the servers of their machine: a bucket
    of several dtypes, whose tensors begin at `offsets`, in bytes. `memory` has the handles of the
    copy by device name (vllm_plugin/agentenv_weights.py): one for each server that shares the
    device, since an export may be opened once. `has_room`: the device has memory for servers that
    wake up with the weights while the learner is still awake."""

    offsets: list[int]
    num_bytes: int
    memory: dict[str, list[list[str | int]]]
    has_room: bool = True

    def exports_of(self, number: int) -> dict[str, list[str | int]]:
        """The handles for the server of this number, with index number % exports on its devices."""
        return {name: found[number % len(found)] for name, found in self.memory.items()}


class SharedSender(Protocol):
    """The trainer's side of weights in shared memory; both methods work while it sleeps.
    `num_failures` counts consecutive updates that a server did not receive from there."""

    weights: SharedWeights
    num_failures: int

    async def release(self) -> None:
        """Release the memory after the last read. Idempotent. Raises LearnerError if the learner
        is lost."""

    async def write(self) -> Path:
        """The same weights as a Hugging Face directory, written once. Raises EngineError if that
        fails."""


class Sender(Protocol):
    """The trainer's side. All methods except `abort` raise TransferError if the transfer fails, and
    LearnerError if the learner fails; `abort` ends them early."""

    async def manifest(self) -> Manifest:
        """Metadata of the next `send`."""

    async def open(self, kind: Wire) -> Address:
        """Open a store or create an id for the rendezvous; leaves the previous group."""

    async def join(self, group: Group) -> None:
        """Join; returns when all ranks have joined."""

    async def send(self) -> None:
        """Broadcast the weights of the latest published version."""

    async def leave(self) -> None:
        """End the group. Idempotent."""

    async def abort(self) -> None:
        """Abort the running operation, so that no receiver keeps waiting. Returns at once."""

    async def write(self) -> Path:
        """The same weights as a Hugging Face directory, written once. Raises EngineError if the
        learner has newer weights."""


# The check that a Hugging Face directory fits a server's model, before the server loads it.
#
# A failed load of a misfitting directory may leave half of it in the server, so names, shapes and
# sizes are compared first, from the headers of the safetensors files.

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
HEAD = "lm_head.weight"
LAYER = re.compile(r"\.layers\.(\d+)\.")
# Keys that shapes do not reveal, and that a server does not read again when it loads weights.
SAME = (
    "architectures", "model_type", "num_attention_heads", "num_key_value_heads", "hidden_act",
    "rms_norm_eps", "rope_theta", "rope_parameters", "rope_scaling", "tie_word_embeddings",
)  # fmt: skip


class Layout(Struct, frozen=True):
    """Absolute path, parameter names with their shapes, config.json ({} if there is none)."""

    directory: Path
    shapes: dict[str, tuple[int, ...]]
    config: dict[str, Any]

    @property
    def tied(self) -> bool:
        """Whether embeddings and output head are one parameter."""
        return bool(self.config.get("tie_word_embeddings", False))

    @property
    def has_experts(self) -> bool:
        """Whether it is a mixture-of-experts model."""
        return any(".experts." in name for name in self.shapes)


def read_layout(directory: Path) -> Layout:
    """Read the headers. Raises EngineError if a file is missing, truncated or not safetensors."""
    if not directory.is_dir():
        raise EngineError(f"weights in {directory}: no such directory")
    table = _read_index(directory)
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(directory):
        shapes.update(read_header(path))
    if missing := sorted(table.keys() - shapes.keys()):
        raise EngineError(
            f"{directory / INDEX}: lists {missing[0]}, which none of its files contains"
        )
    config = directory / CONFIG
    table = text_table(read_json(config)) if config.is_file() else {}
    return Layout(directory.absolute(), shapes, table)


def find_layout(folders: Iterable[Path]) -> Layout | None:
    """The layout of the first folder on this machine that has a model."""
    for folder in folders:
        with suppress(EngineError):  # a hub id, a path of another machine, or another format
            return read_layout(folder)
    return None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model. Raises EngineError for an unreadable index."""
    names = sorted(set(_read_index(directory).values()))
    return [directory / name for name in names or [SINGLE]]


def _read_index(directory: Path) -> dict[str, str]:
    """File names by parameter; empty for a model in a single file."""
    index = directory / INDEX
    if not index.is_file():
        return {}
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise EngineError(f"{index}: has no weight_map")
    return table


def check_manifest(manifest: Manifest, served: Layout | None) -> None:
    """Raises EngineError unless the broadcast has the served parameters, as check_layout; some
    engines ignore unknown ones."""
    if served is None:
        return
    shapes = {
        name: tuple(shape)
        for bucket in manifest
        for name, shape in zip(bucket.names, bucket.shapes, strict=True)
    }
    source = Path("a broadcast")
    check_layout(source, Layout(source, shapes, {}), served)


def check_layout(directory: Path, found: Layout, served: Layout) -> None:
    """Raises EngineError unless `found`, read from the directory, has the served parameters."""
    ignored = {HEAD} if served.tied else set()
    lacking = served.shapes.keys() - found.shapes.keys() - ignored
    missing = sorted(lacking - apart(lacking, found, served))
    unknown = sorted(found.shapes.keys() - served.shapes.keys() - ignored)
    if missing or unknown:
        raise EngineError(
            f"weights in {directory} belong to a different model than the served one: missing "
            f"{missing[:3]}, unknown {unknown[:3]}"
        )
    for name, shape in served.shapes.items():
        if found.shapes.get(name, shape) != shape:
            raise EngineError(
                f"weights in {directory}: {name} is {found.shapes[name]}, the served model has "
                f"{shape}"
            )
    for key in SAME:
        if key in found.config and key in served.config and found.config[key] != served.config[key]:
            raise EngineError(
                f"{directory / CONFIG}: {key} is {found.config[key]!r}, the served model has "
                f"{served.config[key]!r}"
            )


def apart(names: Collection[str], found: Layout, served: Layout) -> set[str]:
    """Those of the names that are of a part of the served model of which `found` has nothing, as
    the learner does not train it: another tower, or layers and modules for further tokens (MTP).
    The server keeps them."""

    def outer(some: Iterable[str]) -> set[str]:
        """Names of outer modules, without those that hold tensors alone, such as lm_head."""
        parts = [name.split(".") for name in some]
        return {".".join((*p[:n], "")) for p in parts for n in range(1, min(3, len(p) - 1))}

    towers = tuple(outer(names) - outer(found.shapes))
    num_layers = served.config.get("num_hidden_layers") or math.inf
    layers = ((name, LAYER.search(name)) for name in names)
    further = {name for name, layer in layers if layer and int(layer[1]) >= num_layers}
    return further | {name for name in names if name.startswith(towers)}


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name. Raises EngineError for a file that is truncated or not safetensors."""
    from safetensors import SafetensorError, safe_open  # of the extra train

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path}: cannot be read as safetensors: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises EngineError."""
    with reported_as(EngineError, "", DataError):
        return read_object(path, "JSON object")


# Checks of LoRA adapters in peft's format, before a server loads them.

ADAPTER_FILES, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def is_adapter(directory: Path) -> bool:
    """Whether a directory has an adapter instead of a whole model."""
    return (directory / ADAPTER_FILES).is_file()


def check_adapter(directory: Path, served: Layout | None) -> None:
    """Raises EngineError unless each matrix of the adapter belongs to a weight of the served model;
    engines ignore unknown ones. A: [r, in], B: [out, r], the weight [out, in]."""
    shapes = read_header(directory / WEIGHTS)
    layers = {name.removesuffix(A).removesuffix(B) for name in shapes}
    if not layers:
        raise EngineError(f"{directory / WEIGHTS} is empty")
    for layer in sorted(layers):
        a, b = shapes.get(layer + A), shapes.get(layer + B)
        name = f"{layer.removeprefix(PREFIX)}.weight"
        if a is None or b is None or a[0] != b[1]:
            raise EngineError(f"{directory / WEIGHTS}: {layer} has no pair of A and B matrices")
        if served is not None and served.shapes.get(name) != (b[0], a[1]):
            raise EngineError(
                f"{directory / WEIGHTS} adapts {name} of shape {(b[0], a[1])}, the served model "
                f"has {served.shapes.get(name, 'no such weight')}"
            )
