"""The memory of a rank's device, freed while engines use the device."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from agentenv.learners.ranks.backend import RankBackend

PARTITIONS = ("ds_tensor", "ds_secondary_tensor")  # of a parameter at ZeRO stage 3


class HostMemory:
    """Main memory for a rank's copies during its sleep.

    It is reused for later sleeps, since its allocation takes longer than a copy; for a GPU it is
    page-locked if the system allows it, which makes copies several times as fast.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = {}  # bytes, by their number

    def take(self, num_bytes: int, device: torch.device) -> Tensor:
        """uint8 [num_bytes] for a copy of data on `device`."""
        if free := self._free.get(num_bytes):
            return free.pop()
        found = torch.empty(num_bytes, dtype=torch.uint8)
        if device.type == "cuda":
            self._lock(found, device)
        return found

    def _lock(self, memory: Tensor, device: torch.device) -> None:
        """Page-lock the memory; torch's own page-locked memory would take up to twice as much,
        since it rounds sizes to powers of two."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        place = memory.data_ptr()
        if int(runtime.cudaHostRegister(place, memory.nbytes, 0)) == 0:
            # Later data at these addresses would be copied to the old pages.
            weakref.finalize(memory, runtime.cudaHostUnregister, place).atexit = False
            return
        with contextlib.suppress(RuntimeError):  # CUDA would report the failure to the next kernel
            torch.zeros(1, device=device)

    def release(self, memory: Tensor) -> None:
        """Return unused memory for later copies."""
        self._free.setdefault(memory.nbytes, []).append(memory)


class OffloadedMemory:
    """The memory of a rank's device, freed temporarily for engines that share the device.

    The tensors of model, optimizer and reference are copied to main memory, and their storages on
    the device are freed; `restore` fills the same storages again. Views, such as the parameters in
    ZeRO's flat buffers, remain valid, so that this works at all stages, including stage 0 and plain
    torch, which DeepSpeed's `offload_states` does not support. Tensors that DeepSpeed keeps in main
    memory (learner.offload), and storages that cannot be freed, such as CPU weights mapped from a
    file, are unchanged. DeepSpeed's buckets are unused between commands: they are freed without a
    copy.
    """

    def __init__(
        self, backend: RankBackend, *others: Any, memory: HostMemory | None = None
    ) -> None:
        """Free the backend's memory on its device, and that of tensors in `others`."""
        self._memory = memory or HostMemory()
        self._device = backend.device
        self._kept = [
            (storage, self._memory.take(storage.nbytes(), self._device))
            for storage in self._storages(held_tensors(backend, *others))
        ]
        self._empty = [(s, s.nbytes()) for s in self._storages(buckets(backend))]
        for storage, copy in self._kept:
            copy.copy_(_as_bytes(storage, self._device), non_blocking=True)
        self._wait()
        for storage in (*(s for s, _ in self._kept), *(s for s, _ in self._empty)):
            storage.resize_(0)
        if self._device.type == "cuda":
            gc.collect()
            # A workspace of 32 MB would retain the gigabytes of its allocator block.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()

    def restore(self) -> None:
        """Restore everything on the device."""
        for storage, num_bytes in self._empty:
            storage.resize_(num_bytes)
        for storage, copy in self._kept:
            storage.resize_(copy.nbytes)
            _as_bytes(storage, self._device).copy_(copy, non_blocking=True)
        self._wait()
        for _, copy in self._kept:
            self._memory.release(copy)
        self._kept, self._empty = [], []

    def _storages(self, tensors: Iterable[Tensor]) -> list[torch.UntypedStorage]:
        found: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == self._device and storage.size() and storage.resizable():
                found[storage.data_ptr()] = storage
        return list(found.values())

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _as_bytes(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def buckets(backend: RankBackend) -> Iterator[Tensor]:
    """DeepSpeed's buckets for the reduction of gradients."""
    for bucket in getattr(backend.optimizer, "ipg_buckets", {}).values():
        yield from _tensors(bucket.buffer)


def held_tensors(backend: RankBackend, *others: Any) -> Iterator[Tensor]:
    """All tensors of the backend between two commands, with duplicates."""
    for param in backend.policy.parameters():
        yield from (param, *(t for n in PARTITIONS if (t := getattr(param, n, None)) is not None))
        if param.grad is not None:
            yield param.grad
    yield from backend.policy.buffers()
    for optimizer in (backend.optimizer, backend.base_optimizer):
        yield from _tensors(vars(optimizer))
    for other in others:
        yield from _tensors(other)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a value: itself, or in nested lists, tuples, sets and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors([*value.items()])
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _tensors(each)
