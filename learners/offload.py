"""The memory of a rank's device, given back for a while to engines that share it.

What model, optimizer and reference hold is copied to main memory and its storage on the device is
freed; afterwards the same storages are filled again. Whatever is a view of them, as parameters are
of the flat buffers of ZeRO, stays one, so that this works alike at all stages and without
DeepSpeed, whose own `offload_states` knows stage 3 only. What DeepSpeed keeps in main memory by
itself (learner.offload) is on another device than the rank's and stays as it is.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

PARTITIONS = ("ds_tensor", "ds_secondary_tensor")  # of a parameter at ZeRO stage 3


class Aside:
    """Storages whose content is in main memory. Those that cannot be freed, as weights on the CPU
    that are mapped from a file, stay."""

    def __init__(self, backend: Any, *others: Any) -> None:
        """Give back what the backend holds on its device, and tensors in `others`."""
        self._kept: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in held_tensors(backend, *others):
            storage = tensor.untyped_storage()
            if tensor.device == backend.device and storage.size() and storage.resizable():
                found[storage.data_ptr()] = storage
        for storage in found.values():
            copy = storage.cpu().clone()  # type: ignore[no-untyped-call]
            self._kept.append((storage, copy))
            storage.resize_(0)
        if backend.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    @property
    def num_bytes(self) -> int:
        return sum(copy.nbytes() for _, copy in self._kept)

    def take_back(self) -> None:
        """Put everything where it was."""
        while self._kept:
            storage, copy = self._kept.pop()
            storage.resize_(copy.nbytes())
            storage.copy_(copy)


def held_tensors(backend: Any, *others: Any) -> Iterator[Tensor]:
    """All that the backend keeps between two commands, some more than once."""
    for param in backend.policy.parameters():
        yield from (param, *(t for n in PARTITIONS if (t := getattr(param, n, None)) is not None))
        if param.grad is not None:
            yield param.grad
    yield from backend.policy.buffers()
    for optimizer in {id(o): o for o in backend.optimizers}.values():
        yield from _tensors(vars(optimizer))
    for other in others:
        yield from _tensors(other)


def _tensors(value: Any) -> Iterator[Tensor]:
    """In a tensor, or in lists, tuples, sets and mappings of them."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from _tensors(pair)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _tensors(each)
