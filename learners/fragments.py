"""Where a rank keeps its float32 weights and its optimizer state, under every ZeRO stage.

A fragment is a run of elements of one parameter, flattened. At stage 0 it is the whole parameter,
at stages 1 and 2 what falls into the rank's part of a flat group of parameters, at stage 3 the
rank's part of each parameter. The names are the model's own, so that what one number of ranks or
stage has written another can read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MASTER = "master"  # float32 weights; the other kinds are the optimizer's own names

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
        _restore_weights(backend, read)


def _restore_weights(backend: Any, read: Reader) -> None:
    """The weights that the model computes with: the float32 ones, rounded to its dtype."""
    for name, param in backend.policy.model.named_parameters():
        if not param.requires_grad:
            continue
        if not hasattr(param, "ds_tensor"):
            param.data.copy_(read(name, MASTER, 0, param.numel()).view_as(param))
            continue
        part = param.ds_tensor
        start = backend.rank * part.ds_numel
        size = min(part.ds_numel, param.ds_numel - start)
        if size > 0:
            part.data.view(-1)[:size].copy_(read(name, MASTER, start, size))
        if param.numel() == param.ds_numel:  # a small one that stays whole on every rank
            param.data.copy_(read(name, MASTER, 0, param.ds_numel).view(param.ds_shape))
