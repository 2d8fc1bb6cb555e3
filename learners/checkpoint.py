"""Checkpoints of the learner: one file a rank, by parameter name, so that any number of ranks
and any ZeRO stage can go on from them, to the bit when both are as before.

    DIR/learner.json                   the figures of `Meta`; written last
    DIR/rank-00000-of-00002.safetensors   NAME|master, NAME|exp_avg, ...: flat float32 fragments;
                                          NAME|reference if there is a reference policy

A directory is written as DIR.partial, made durable and renamed. At every moment the older one or
the new one is whole: an older one of the same name is first renamed to DIR.old.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from agentenv.errors import DataError, LearnerError
from learners.fragments import MASTER, REFERENCE, fragments, moments
from learners.lora import LoRAConfig
from learners.reference import Reference

META = "learner.json"
SEPARATOR = "|"


class Meta(Struct, kw_only=True):
    """What a checkpoint is of. `base_model`: directory of the frozen weights, with `lora`.
    `reference_updates`: see `learners.reference.Reference`."""

    num_ranks: int
    zero_stage: int
    dtype: str
    optimizer: str
    policy_version: int
    optimizer_step: int
    moved: bool
    base_model: str
    reference_updates: int = 0
    lora: LoRAConfig | None = None


def saved_version(directory: Path) -> int:
    """The policy version of what was saved there. Raises DataError for no whole checkpoint."""
    return Checkpoint(directory).meta.policy_version


class Checkpoint:
    """Reads what `save` wrote; tensors are mapped from the files, not loaded."""

    def __init__(self, directory: Path) -> None:
        directory = finished(directory)
        try:
            self.meta = msgspec.json.decode((directory / META).read_bytes(), type=Meta)
        except (OSError, msgspec.DecodeError) as error:
            raise DataError(
                f"{directory}: not a complete learner checkpoint ({META}: {error})"
            ) from error
        self.directory = directory
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._steps: dict[str, float] = {}
        self._parts: dict[tuple[str, str], list[tuple[int, int, Any]]] = {}
        for rank in range(self.meta.num_ranks):
            path = directory / shard_name(rank, self.meta.num_ranks)
            try:
                self._index(safe_open(path, "pt"))
            except (OSError, SafetensorError) as error:
                raise DataError(f"{path}: cannot be read: {error}") from error

    def _index(self, file: Any) -> None:
        for name, entry in json.loads(file.metadata()["fragments"]).items():
            self.shapes[name] = tuple(entry["shape"])
            if entry["step"] is not None:
                self._steps[name] = entry["step"]
            for kind in entry["kinds"]:
                part = (entry["start"], entry["size"], file)
                self._parts.setdefault((name, kind), []).append(part)

    def kinds(self, name: str) -> list[str]:
        """Names of the optimizer's states of a parameter."""
        known = (MASTER, REFERENCE)
        return [kind for one, kind in self._parts if one == name and kind not in known]

    def step_of(self, name: str) -> float | None:
        """Optimizer steps that the parameter's state has seen."""
        return self._steps.get(name)

    def read(self, name: str, kind: str, start: int, size: int) -> Tensor:
        """Elements start to start + size of a flattened parameter or its state, float32."""
        out = torch.empty(size)
        missing = size
        for first, count, file in self._parts.get((name, kind), ()):
            low, high = max(start, first), min(start + size, first + count)
            if low < high:
                part = file.get_slice(f"{name}{SEPARATOR}{kind}")[low - first : high - first]
                out[low - start : high - start] = part
                missing -= high - low
        if missing:
            raise DataError(
                f"{self.directory}: has no {kind} of {name}; it is of another model, or of "
                f"optimizer = {self.meta.optimizer}, lora = {self.meta.lora}. To start from its "
                "weights only, give model.path = the checkpoint's folder"
            )
        return out

    def rng_states(self, rank: int) -> dict[str, Tensor]:
        """Generators of a rank by device; empty for a rank that there was none of."""
        if rank >= self.meta.num_ranks:
            return {}
        with safe_open(self.directory / shard_name(rank, self.meta.num_ranks), "pt") as file:
            keys = [key for key in file.keys() if key.startswith("rng")]  # noqa: SIM118
            return {key.removeprefix("rng_"): file.get_tensor(key) for key in keys}


def save(backend: Any, meta: Meta, directory: Path, reference: Reference | None = None) -> None:
    """Write a checkpoint; all ranks call it. Raises LearnerError on every rank if one fails."""
    partial = directory.with_name(f"{directory.name}.partial")
    together(backend, lambda: _fresh(partial) if backend.rank == 0 else None)
    together(backend, lambda: _write_shard(backend, partial, reference))
    together(backend, lambda: _finish(meta, partial, directory) if backend.rank == 0 else None)


def together(backend: Any, work: Any) -> None:
    """Do a part of common work; if it fails on one rank with OSError, it fails on all."""
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


def _write_shard(backend: Any, partial: Path, reference: Reference | None) -> None:
    tensors, index = {}, {}
    if backend.stage or backend.rank == 0:  # at stage 0 all ranks hold the same
        for fragment in fragments(backend):
            states, step = moments(backend, fragment)
            parts = {MASTER: fragment.view(fragment.owner), **states}
            if reference is not None and reference.weights is not None:
                parts[REFERENCE] = reference.piece(fragment)
            for kind, value in parts.items():
                tensors[f"{fragment.name}{SEPARATOR}{kind}"] = value.float().cpu().contiguous()
            index[fragment.name] = {
                "shape": fragment.shape,
                "start": fragment.start,
                "size": fragment.size,
                "step": step,
                "kinds": list(parts),
            }
    tensors["rng_cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors["rng_cuda"] = torch.cuda.get_rng_state()
    path = partial / shard_name(backend.rank, backend.num_ranks)
    save_file(tensors, path, metadata={"fragments": json.dumps(index)})
    sync(path)


def _finish(meta: Meta, partial: Path, directory: Path) -> None:
    path = partial / META
    path.write_bytes(msgspec.json.format(msgspec.json.encode(meta)))
    sync(path)
    replace_directory(partial, directory)


def replace_directory(partial: Path, directory: Path) -> None:
    """Give a complete directory its name, in place of an older one, durably."""
    sync(partial)
    old = directory.with_name(f"{directory.name}.old")
    if directory.exists():
        shutil.rmtree(old, ignore_errors=True)
        directory.rename(old)
    partial.rename(directory)
    sync(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def finished(directory: Path) -> Path:
    """The directory, or what it was called before, if it was cut off between two renames."""
    old = directory.with_name(f"{directory.name}.old")
    return old if old.is_dir() and not directory.exists() else directory


def shard_name(rank: int, num_ranks: int) -> str:
    return f"rank-{rank:05d}-of-{num_ranks:05d}.safetensors"


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, survive a crash of the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
