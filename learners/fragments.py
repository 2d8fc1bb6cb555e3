"""Where a rank keeps its float32 weights and its optimizer state, under every ZeRO stage.

A fragment is a run of elements of one parameter, flattened. At stage 0 it is the whole parameter,
at stages 1 and 2 what falls into the rank's part of a flat group of parameters, at stage 3 the
rank's part of each parameter. The names are the model's own, so that what one number of ranks or
stage has written another can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MASTER = "master"  # float32 weights
REFERENCE = "reference"  # weights of the reference policy; other kinds are the optimizer's names

Reader = Callable[[str, str, int, int], Tensor]  # name, kind, start, number of elements


@dataclass(frozen=True)
class Fragment:
    """Elements start to start + size of parameter `name`; `owner` is what the optimizer holds
    state for, in which they begin at `offset`."""

    name: str
    shape: tuple[int, ...]
    start: int
    size: int
    owner: Tensor
    offset: int

    def view(self, tensor: Tensor) -> Tensor:
        """This fragment in a tensor laid out as the owner."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.size]


def fragments(backend: Any) -> Iterator[Fragment]:
    """The fragments of this rank, of parameters that are trained."""
    stage = backend.stage
    params = [
        (name, param)
        for name, param in backend.policy.model.named_parameters()
        if param.requires_grad
    ]
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


def moments(backend: Any, fragment: Fragment) -> tuple[dict[str, Tensor], float | None]:
    """Optimizer state of a fragment by kind, and its step count; empty before the first step."""
    state = backend.base_optimizer.state.get(fragment.owner, {})
    tensors = {
        kind: fragment.view(value)
        for kind, value in state.items()
        if isinstance(value, Tensor) and value.numel() == fragment.owner.numel() and value.ndim
    }
    step = state.get("step")
    return tensors, None if step is None else float(step)


@torch.no_grad()
def restore(
    backend: Any,
    read: Reader,
    kinds: Callable[[str], list[str]],
    step_of: Callable[[str], float | None],
) -> None:
    """Set float32 weights, optimizer state and the weights in use from a checkpoint.

    `kinds` names the states that there are for a parameter, `step_of` its step count.
    """
    state = backend.base_optimizer.state
    state.clear()
    for fragment in fragments(backend):
        name, start, size = fragment.name, fragment.start, fragment.size
        fragment.view(fragment.owner).copy_(read(name, MASTER, start, size))
        for kind in kinds(name):
            if kind not in state[fragment.owner]:
                state[fragment.owner][kind] = torch.zeros_like(fragment.owner, requires_grad=False)
            fragment.view(state[fragment.owner][kind]).copy_(read(name, kind, start, size))
        step = step_of(name)
        if step is not None:
            state[fragment.owner]["step"] = torch.tensor(step, dtype=torch.float32)
    if backend.stage:
        with changing(backend):  # the weights in use: the float32 ones, rounded to their dtype
            for name, start, elements in held(backend):
                elements.copy_(read(name, MASTER, start, elements.numel()))


def held(backend: Any) -> Iterator[tuple[str, int, Tensor]]:
    """Name, first element and elements of what this rank stores of each trained weight to compute
    with: all of it at stages 0 to 2, its part at stage 3."""
    for name, param in backend.policy.model.named_parameters():
        if not param.requires_grad:
            continue
        if not hasattr(param, "ds_tensor"):
            yield name, 0, param.detach().view(-1)
            continue
        start = backend.rank * param.ds_tensor.ds_numel
        size = min(param.ds_tensor.ds_numel, param.ds_numel - start)  # the last part is padded
        if size > 0:
            yield name, start, param.ds_tensor.detach().view(-1)[:size]


@contextmanager
def changing(backend: Any) -> Iterator[None]:
    """Around writes to what `held` gives. Copies that stage 3 has gathered from all ranks are
    dropped; the next forward pass gathers anew. Takes no part in any collective."""
    if backend.stage == 3:
        backend.optimizer.checkpoint_event_prologue()
    yield
    if backend.stage == 3:
        backend.optimizer.invalidate_secondary_tensor()
