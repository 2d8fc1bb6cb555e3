"""Checkpoints of the learner: one file per rank, by parameter name, so that any number of ranks and
any ZeRO stage can resume from them; bitwise exact if both are unchanged.

    DIR/learner.json                   the figures of `SavedLearner`; written last
    DIR/rank-00000-of-00002.safetensors   NAME|master, NAME|exp_avg, ...: flat float32 fragments;
                                          NAME|reference if there is a reference policy

Each rank writes its file tensor by tensor. A directory is written as DIR.partial, made durable and
renamed. An older one of the same name is first renamed to DIR.old, so that at any time the older or
the new one is complete.

A fragment is a run of elements of one flattened parameter for which this rank has float32 weights
and optimizer state. At ZeRO stage 0 a fragment is the whole parameter, at stages 1 and 2 the part
in the rank's share of a flat group of parameters, at stage 3 the rank's part of each parameter.
Names are the model's. DeepSpeed's public `safe_get_local_*` support only stage 3, and no state
before the first step, so fragments read DeepSpeed's internal buffers.

Safetensors files are written tensor by tensor, so that main memory has only one at a time; the
library's `save_file` has the same result, but needs all tensors at once.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentenv.base.disk import naming, removing, replace_folder, sync, write_whole
from agentenv.base.errors import LearnerError
from agentenv.learners.keys import SAVED_FILE, SavedLearner

if TYPE_CHECKING:
    from agentenv.learners.ranks.backend import RankBackend


MASTER = "master"  # float32 weights
REFERENCE = "reference"  # weights of the reference policy; other kinds are optimizer states

LocalWeights = dict[str, tuple[int, Tensor]]  # by name, as of `local_weights`


@dataclass(frozen=True)
class Fragment:
    """Elements [start, start + size) of parameter `name`; `owner` is the optimizer's tensor, in
    which they begin at `offset`."""

    name: str
    shape: tuple[int, ...]
    start: int
    size: int
    owner: Tensor
    offset: int

    def view(self, tensor: Tensor) -> Tensor:
        """This fragment in a tensor laid out as the owner."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.size]


def trained_params(backend: RankBackend) -> list[tuple[str, Any]]:
    """The trained parameters by name, in the order of the model."""
    named = backend.policy.model.named_parameters()
    return [(name, param) for name, param in named if param.requires_grad]


def fragments(backend: RankBackend) -> Iterator[Fragment]:
    """The fragments of this rank, of trained parameters."""
    stage, params = backend.stage, trained_params(backend)
    if stage == 0:
        for name, param in params:
            yield Fragment(name, tuple(param.shape), 0, param.numel(), param, 0)
    elif stage < 3:
        yield from _of_flat_groups(backend.optimizer, {id(param): name for name, param in params})
    else:
        for name, param in params:
            group, offset, size = backend.optimizer.grad_position[
                backend.optimizer.get_param_id(param)
            ]
            start = backend.rank * size
            size = min(size, param.ds_numel - start)  # the last part is padded
            if size > 0:
                owner = backend.optimizer.fp32_partitioned_groups_flat[group]
                yield Fragment(name, tuple(param.ds_shape), start, size, owner, offset)


def _of_flat_groups(optimizer: Any, names: dict[int, str]) -> Iterator[Fragment]:
    for group, owner in zip(
        optimizer.bit16_groups, optimizer.single_partition_of_fp32_groups, strict=True
    ):
        for param in group:
            mapping = param._hp_mapping
            if mapping is not None:
                place, source = mapping.hp_fragment_address, mapping.lp_fragment_address
                shape = tuple(param.shape)
                name = names[id(param)]
                yield Fragment(name, shape, source.start, place.numel, owner, place.start)


def moments(backend: RankBackend, fragment: Fragment) -> tuple[dict[str, Tensor], float | None]:
    """Optimizer state of a fragment by kind, and its step count; empty before the first step."""
    state = backend.base_optimizer.state.get(fragment.owner, {})
    tensors = {
        kind: fragment.view(value)
        for kind, value in state.items()
        if isinstance(value, Tensor) and value.numel() == fragment.owner.numel() and value.ndim
    }
    step = state.get("step")
    return tensors, None if step is None else float(step)


SEPARATOR = "|"


def save(
    backend: RankBackend, meta: SavedLearner, directory: Path, reference: LocalWeights | None = None
) -> None:
    """Write a checkpoint; collective. `reference` has the weights of the reference policy, if any.
    Raises LearnerError on every rank if one fails."""
    partial = directory.with_name(f"{directory.name}.partial")
    on_all_ranks(backend, lambda: _fresh(partial) if backend.rank == 0 else None)
    on_all_ranks(backend, lambda: _write_shard(backend, partial, reference))
    on_all_ranks(backend, lambda: _finish(meta, partial, directory) if backend.rank == 0 else None)


def on_all_ranks(backend: RankBackend, work: Callable[[], None]) -> None:
    """Run `work` on all ranks; an error on one rank raises on all."""
    problem = ""
    own: Exception | None = None
    try:
        work()
    except (OSError, SafetensorError) as error:
        own, problem = error, f"rank {backend.rank}: {error}"
    problems = [text for text in backend.gather(problem) if text]
    if own is not None:
        raise own
    if problems:
        raise LearnerError(problems[0])


def _fresh(partial: Path) -> None:
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def _write_shard(backend: RankBackend, partial: Path, reference: LocalWeights | None) -> None:
    places: list[TensorPlace] = []
    loads: list[Callable[[], Tensor]] = []
    index = {}
    if backend.stage or backend.rank == 0:  # at stage 0 all ranks hold the same
        for fragment in fragments(backend):
            states, step = moments(backend, fragment)
            parts = {MASTER: fragment.view(fragment.owner), **states}
            if reference is not None:
                start, elements = reference[fragment.name]
                parts[REFERENCE] = elements[fragment.start - start :][: fragment.size]
            for kind, value in parts.items():
                name = f"{fragment.name}{SEPARATOR}{kind}"
                places.append(TensorPlace(name, torch.float32, tuple(value.shape)))
                loads.append(value.float)
            index[fragment.name] = {
                "shape": fragment.shape,
                "start": fragment.start,
                "size": fragment.size,
                "step": step,
                "kinds": list(parts),
            }
    generators = {"rng_cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        generators["rng_cuda"] = torch.cuda.get_rng_state()
    for name, state in generators.items():
        places.append(TensorPlace(name, state.dtype, tuple(state.shape)))
        loads.append(state.clone)
    path = partial / shard_name(backend.rank, backend.num_ranks)
    write_tensors(path, places, loads, {"fragments": json.dumps(index)})
    sync(path)
    with safe_open(path, "pt"):  # it can be opened again
        pass


def _finish(meta: SavedLearner, partial: Path, directory: Path) -> None:
    write_whole(partial / SAVED_FILE, msgspec.json.format(msgspec.json.encode(meta)))
    replace_folder(partial, directory)


def shard_name(rank: int, num_ranks: int) -> str:
    return f"rank-{rank:05d}-of-{num_ranks:05d}.safetensors"


# Tensors of a model on disk: their names, dtypes and files.


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
ALIGNMENT = 8  # bytes, of the first tensor


def stored_dtype(directory: Path) -> torch.dtype | None:
    """The dtype of all floating-point tensors of a directory's safetensors files; None if they
    differ, or if there are none."""
    found = set()
    for path in directory.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {DTYPES.get(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118 - no mapping
    floating = {dtype for dtype in found if dtype is None or dtype.is_floating_point}
    return floating.pop() if len(floating) == 1 else None


@dataclass(frozen=True)
class TensorPlace:
    """Name, dtype and shape of a tensor, known before the tensor is there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def described(places: Sequence[TensorPlace]) -> tuple[list[str], list[str], list[list[int]]]:
    """Names, dtypes and shapes in the form of a Bucket."""
    dtypes = [str(one.dtype).removeprefix("torch.") for one in places]
    return [one.name for one in places], dtypes, [list(one.shape) for one in places]


Load = Callable[[], Tensor]


def write_tensors(
    path: Path, places: Iterable[TensorPlace], loads: Iterable[Load], metadata: Mapping[str, str]
) -> None:
    """Write the tensors from `loads`, on any device, to `places`, one after the other; a failure
    leaves no file. Raises ValueError for a tensor that does not match its place."""
    places = list(places)
    header, starts = _layout(places, metadata)
    with naming(path), removing(path), path.open("wb") as file:
        file.write(header)
        for place, load in zip(places, loads, strict=True):
            file.seek(len(header) + starts[place.name])
            _write(file, place, load())


def _layout(places: list[TensorPlace], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header, and the offset of each tensor after it: the widest dtypes first, so that each is
    aligned in a mapped file."""
    index: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for place in sorted(places, key=lambda place: -place.dtype.itemsize):
        start, end = end, end + place.num_bytes
        starts[place.name] = start
        index[place.name] = {
            "dtype": NAMES[place.dtype],
            "shape": list(place.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(index).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return len(text).to_bytes(8, "little") + text, starts


def _write(file: BinaryIO, place: TensorPlace, tensor: Tensor) -> None:
    if (tensor.dtype, tuple(tensor.shape)) != (place.dtype, place.shape):
        raise ValueError(
            f"{place.name}: expected {place.dtype} {place.shape}, got {tensor.dtype} "
            f"{tuple(tensor.shape)}"
        )
    flat = tensor.detach().cpu().contiguous().view(-1)
    file.write(flat.view(torch.uint8).numpy().data)
