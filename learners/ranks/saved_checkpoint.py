"""Reading a checkpoint of `agentenv.learners.ranks.checkpoint`, by any number of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from agentenv.base.disk import finished_folder
from agentenv.base.errors import DataError, reported_as
from agentenv.learners.keys import read_saved
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.checkpoint import (
    MASTER,
    REFERENCE,
    SEPARATOR,
    LocalWeights,
    fragments,
    shard_name,
    trained_params,
)


class Checkpoint:
    """A checkpoint of `save`; tensors are mapped from the files, not loaded."""

    def __init__(self, directory: Path) -> None:
        directory = finished_folder(directory)
        self.meta = read_saved(directory)
        self.directory = directory
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.steps: dict[str, float] = {}  # of the optimizer, by parameter
        self._parts: dict[tuple[str, str], list[tuple[int, int, Any]]] = {}
        for rank in range(self.meta.num_ranks):
            path = directory / shard_name(rank, self.meta.num_ranks)
            with reported_as(DataError, f"{path}: cannot be read", OSError, SafetensorError):
                self._index(safe_open(path, "pt"))

    def _index(self, file: Any) -> None:
        for name, entry in json.loads(file.metadata()["fragments"]).items():
            self.shapes[name] = tuple(entry["shape"])
            if entry["step"] is not None:
                self.steps[name] = entry["step"]
            for kind in entry["kinds"]:
                part = (entry["start"], entry["size"], file)
                self._parts.setdefault((name, kind), []).append(part)

    def kinds(self, name: str) -> list[str]:
        """Names of the optimizer's states of a parameter."""
        known = (MASTER, REFERENCE)
        return [kind for one, kind in self._parts if one == name and kind not in known]

    def read(self, name: str, kind: str, start: int, size: int) -> Tensor:
        """Elements [start, start + size) of a flattened parameter or its state, float32."""
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
                f"{self.directory}: has no {kind} of {name}; it belongs to a different model, or "
                f"to optimizer = {self.meta.optimizer}, lora = {self.meta.lora}. To start from its "
                "weights only, set model.path to the checkpoint's folder"
            )
        return out

    def rng_states(self, rank: int) -> dict[str, Tensor]:
        """Random generator states of a rank by device; empty for a rank that did not exist."""
        if rank >= self.meta.num_ranks:
            return {}
        with safe_open(self.directory / shard_name(rank, self.meta.num_ranks), "pt") as file:
            keys = [key for key in file.keys() if key.startswith("rng")]  # noqa: SIM118
            return {key.removeprefix("rng_"): file.get_tensor(key) for key in keys}


@torch.no_grad()
def restore(backend: RankBackend, saved: Checkpoint) -> None:
    """Set float32 weights, optimizer state and the weights in use from a checkpoint."""
    state = backend.base_optimizer.state
    state.clear()
    for fragment in fragments(backend):
        name, start, size = fragment.name, fragment.start, fragment.size
        fragment.view(fragment.owner).copy_(saved.read(name, MASTER, start, size))
        for kind in saved.kinds(name):
            if kind not in state[fragment.owner]:
                state[fragment.owner][kind] = torch.zeros_like(fragment.owner, requires_grad=False)
            fragment.view(state[fragment.owner][kind]).copy_(saved.read(name, kind, start, size))
        if name in saved.steps:
            state[fragment.owner]["step"] = torch.tensor(saved.steps[name], dtype=torch.float32)
    if backend.stage:
        # The weights in use are the float32 ones, rounded to their dtype.
        with changing_weights(backend):
            for name, start, elements in local_weights(backend):
                elements.copy_(saved.read(name, MASTER, start, elements.numel()))


def local_weights(backend: RankBackend) -> Iterator[tuple[str, int, Tensor]]:
    """Name, first element and elements of each trained weight in the form for computation on this
    rank: the whole weight at stages 0 to 2, the rank's part at stage 3."""
    for name, param in trained_params(backend):
        if not hasattr(param, "ds_tensor"):
            yield name, 0, param.detach().view(-1)
            continue
        start = backend.rank * param.ds_tensor.ds_numel
        size = min(param.ds_tensor.ds_numel, param.ds_numel - start)  # the last part is padded
        if size > 0:
            yield name, start, param.ds_tensor.detach().view(-1)[:size]


@contextmanager
def changing_weights(backend: RankBackend) -> Iterator[None]:
    """Around writes to the tensors of `local_weights`. Drops weights that stage 3 gathered; the
    next forward pass gathers them again. Not collective."""
    if backend.stage == 3:
        backend.optimizer.checkpoint_event_prologue()
    yield
    if backend.stage == 3:
        backend.optimizer.invalidate_secondary_tensor()


# The reference policy of a KL term.


class Reference:
    """The reference policy of a KL term: a copy from its first use, so that it is the initial
    policy of RL, renewed every `every` updates (0: never).

    There is no second model. A rank keeps a copy of its trained weights: all of them at ZeRO stages
    0 to 2, its part at stage 3, only the adapter with LoRA. Its weights are exchanged with the
    policy's while the reference scores.
    """

    def __init__(self, backend: RankBackend, every: int) -> None:
        self.backend = backend
        self.every = every
        self.num_updates = 0
        self.weights: LocalWeights | None = None

    def begin_update(self) -> None:
        """Call this at the start of an update, before its first step."""
        due = self.every and self.num_updates % self.every == 0
        if self.weights is None or due:
            self.weights = {
                name: (start, elements.clone())
                for name, start, elements in local_weights(self.backend)
            }
        self.num_updates += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, the backend computes with the reference's weights; steps are not
        allowed."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        assert self.weights is not None
        with changing_weights(self.backend):
            for name, _, elements in local_weights(self.backend):
                kept = self.weights[name][1]
                other = elements.clone()
                elements.copy_(kept)
                kept.copy_(other)

    def load(self, saved: Checkpoint) -> None:
        """Restore the reference from a checkpoint; checkpoints before its first use have none."""
        self.num_updates, self.weights = saved.meta.reference_updates, None
        if self.num_updates:
            self.weights = {
                name: (start, saved.read(name, REFERENCE, start, elements.numel()).to(elements))
                for name, start, elements in local_weights(self.backend)
            }
