"""Weights for engines: metadata of a transfer, and a check that weights fit the served model.

    learner's rank 0 --join, send--+                        rank 0 sends, all others receive; a
                                   |  group of world_size   bucket is one tensor of bytes, in which
    server 1  --join, receive------+  ranks                 weights stand one after the other
    server 2  --join, receive------+

The controller (pool/keeper.py) only announces the manifest to both sides; no weight passes
through it. On the learner's own GPUs servers read the weights where a rank has put a copy:

    ranks --publish--> SharedWeights --> controller --> servers map the memory, and load
    ranks <------------------------ release ------------+
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

from msgspec import Struct

from agentenv.errors import EngineError, ForeignError
from agentenv.untrusted import decode


class TransferError(EngineError):
    """The sender's side of a broadcast failed or was called off; the learner itself goes on."""


# Formation of a group: "torch", a torch.distributed group over a store, as SGLang makes its own;
# "nccl", a bare NCCL communicator from a unique id, as vLLM makes its own.
Wire = Literal["torch", "nccl"]


class Address(Struct, frozen=True):
    """Rendezvous of the sender: a store's host and port and the torch backend that the
    group will have, or NCCL's unique id (128 bytes as base64)."""

    host: str = ""
    port: int = 0
    backend: str = "nccl"
    unique_id: str = ""


class Group(Struct, frozen=True):
    """The members. The sender has rank 0. `name` is never used twice; `timeout_s` is the
    deadline of joining, and of one bucket."""

    name: str
    address: Address
    world_size: int
    timeout_s: float


class Bucket(Struct, frozen=True):
    """Tensors that are broadcast as one, in this order: names as in a Hugging Face directory,
    dtypes as torch names them (float32), shapes. All have one dtype, so that each begins where
    its numbers may stand."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class Manifest(Struct, frozen=True):
    """All that one update sends, in this order."""

    buckets: list[Bucket]


class SharedWeights(Struct, frozen=True):
    """A copy of the weights in memory that ranks share with the servers of their machine. Tensors
    begin at `offsets`, in bytes; names, dtypes and shapes as in a Bucket. `memory` says how the
    copy on a device is opened, by the device's name (vllm_plugin/agentenv_weights.py): once for
    each server that shares the device, since an export may be opened once. `has_room`: the device
    has memory for servers that wake up with the weights while the learner is still awake."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    num_bytes: int
    memory: dict[str, list[list[str | int]]]
    has_room: bool = True

    def exports_of(self, number: int) -> dict[str, list[str | int]]:
        """For the server of this number, which has the place number % exports on its devices."""
        return {name: found[number % len(found)] for name, found in self.memory.items()}

    @property
    def manifest(self) -> Manifest:
        return Manifest([Bucket(self.names, self.dtypes, self.shapes)])


class SharedSender(Protocol):
    """The trainer's side of weights in shared memory; both methods work while it sleeps.
    `num_failures` counts updates in a row that a server did not get from there."""

    weights: SharedWeights
    num_failures: int

    async def release(self) -> None:
        """Nothing reads the memory any more. Idempotent; LearnerError if the learner is gone."""
        ...

    async def write(self) -> Path:
        """The same weights as a Hugging Face directory, written once. EngineError if they cannot
        be."""
        ...


class Sender(Protocol):
    """The trainer's side. All methods but `abort` raise TransferError where the transfer fails,
    and LearnerError where the learner does; what they run is ended early by `abort`."""

    async def manifest(self) -> Manifest:
        """Metadata of the next `send`."""
        ...

    async def open(self, kind: Wire) -> Address:
        """Open a store or id by which ranks find each other; leaves the group that there was."""
        ...

    async def join(self, group: Group) -> None:
        """Returns when all ranks have joined."""
        ...

    async def send(self) -> None:
        """Broadcast the weights of the version that was published last."""
        ...

    async def leave(self) -> None:
        """End the group. Idempotent."""
        ...

    async def abort(self) -> None:
        """Break off what runs, so that no receiver goes on waiting. Returns at once."""
        ...

    async def write(self) -> Path:
        """The same weights as a Hugging Face directory, written once. EngineError when the
        learner has gone on to other weights meanwhile."""
        ...


# Whether a Hugging Face directory fits the model that a server runs, before the server sees it.
#
# A server that starts to load a directory that does not fit may be left with half of it, so names,
# shapes and sizes are read here first, from the headers of the safetensors files alone.

INDEX, SINGLE, CONFIG = "model.safetensors.index.json", "model.safetensors", "config.json"
HEAD = "lm_head.weight"
# Keys that no shape shows, and that a server does not read again when it loads weights.
SAME = (
    "architectures",
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "tie_word_embeddings",
)


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
        """Whether layers choose among experts."""
        return any(".experts." in name for name in self.shapes)

    @property
    def vocab_size(self) -> int | None:
        """Rows of the embeddings, None if config.json does not say."""
        size = self.config.get("text_config", self.config).get("vocab_size")
        return size if isinstance(size, int) else None


def read_layout(directory: Path) -> Layout:
    """Read the headers. Raises EngineError if a file is missing, cut off or not safetensors."""
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
    return Layout(directory.absolute(), shapes, read_json(config) if config.is_file() else {})


def find_layout(folders: Iterable[Path]) -> Layout | None:
    """Of the first directory that is on this machine and holds a model."""
    for folder in folders:
        with suppress(EngineError):  # a name on a hub, another machine, or another format
            return read_layout(folder)
    return None


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a model. Raises EngineError for an index that cannot be read."""
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
    engines pass over what they do not know."""
    if served is None:
        return
    shapes = {
        name: tuple(shape)
        for bucket in manifest.buckets
        for name, shape in zip(bucket.names, bucket.shapes, strict=True)
    }
    source = Path("a broadcast")
    check_layout(source, Layout(source, shapes, {}), served)


def check_layout(directory: Path, found: Layout, served: Layout) -> None:
    """Raises EngineError unless `found`, read from the directory, has the served parameters."""
    ignored = {HEAD} if served.tied else set()
    missing = sorted(served.shapes.keys() - found.shapes.keys() - ignored)
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


def read_header(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by name. Raises EngineError for a file that is cut off or not safetensors."""
    from safetensors import SafetensorError, safe_open  # of the extra train

    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path}: cannot be read as safetensors: {error}") from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises EngineError."""
    try:
        found = decode(path.read_bytes())
    except (OSError, ForeignError) as error:
        raise EngineError(f"{path}: cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise EngineError(f"{path}: expected a JSON object")
    return found


# LoRA adapters as peft writes them, checked before a server sees them.

ADAPTER_FILES, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def is_adapter(directory: Path) -> bool:
    """Whether a directory holds an adapter, not a whole model."""
    return (directory / ADAPTER_FILES).is_file()


def check_adapter(directory: Path, served: Layout | None) -> None:
    """Raises EngineError unless each of its matrices belongs to a weight of the served model;
    engines pass over what they do not know. A: [r, in], B: [out, r], the weight [out, in]."""
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
