"""Weights for servers on the same machine: a shared copy in memory instead of files.

    publish   gather --> one copy on each rank's GPU --> its handles, for the controller
                           +--> main memory of rank 0
    release   free the copy on the GPU, also on a sleeping rank
    write     a directory of the same weights for late servers, from main memory, even if the
              learner has newer weights or sleeps

Without GPUs only rank 0 has a copy, in main memory that servers map. The other end is
agentenv/engines/vllm_plugin/agentenv_weights.py.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from agentenv.contract.weights import SharedWeights
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.broadcast import first_line
from agentenv.learners.ranks.checkpoint import TensorPlace, described
from agentenv.learners.ranks.export import WeightEntry, copy_files, entries, gathered, write_weights
from agentenv.learners.ranks.offloaded_memory import HostMemory

WAKE_BYTES = 4 << 30  # of a server that wakes up without its cache, in addition to its weights
ALIGNMENT = 16  # bytes, for a tensor of any dtype


@dataclass(frozen=True)
class Slice(TensorPlace):
    """A tensor's place in the copy."""

    offset: int

    def of(self, memory: Tensor) -> Tensor:
        part = memory[self.offset : self.offset + self.num_bytes]
        return part.view(self.dtype).view(self.shape)


class SharedCopy:
    """The last published weights of a rank, in memory that other processes can open."""

    def __init__(self, backend: RankBackend, memory: HostMemory) -> None:
        self._backend, self._memory = backend, memory
        self._slices: list[Slice] = []
        self._num_bytes = 0
        self.policy_version: int | None = None  # of the copy
        self._frees_memory = False  # the GPU's memory to engines, after the copy is read
        self._copy: Tensor | None = None  # uint8, mapped by servers
        self._host: Tensor | None = None  # the same in main memory, of rank 0

    def publish(
        self, *, sleeps_next: bool, num_readers: int = 1
    ) -> tuple[SharedWeights | None, str]:
        """Copy the current weights; collective. Returns the handles of this rank's copy, None if it
        has none, and the problem, which all ranks report. `num_readers`: servers of a device.
        `sleeps_next`: free the rank's unused memory first, since the copy would retain a part of
        it."""
        problem, self.policy_version, self._frees_memory = "", None, sleeps_next
        try:
            self._make_room()
        except (RuntimeError, OSError) as error:  # no memory
            rank = self._backend.rank
            problem = f"rank {rank} has no memory for a copy of the weights: {first_line(error)}"
        places = iter(self._slices)
        for entry in gathered(entries(self._backend.policy.model)):
            place = next(places, None)
            if self._copy is not None and place is not None and not problem:
                place.of(self._copy).copy_(entry.tensor().detach())
        found = None
        if self._copy is not None and not problem:
            try:
                found = self._shared(self._copy, num_readers)
            except RuntimeError as error:
                problem = f"rank {self._backend.rank} cannot share memory: {first_line(error)}"
        problem = next(filter(None, self._backend.gather(problem)), "")
        if problem:
            self.release()
        return (None if problem else found), problem

    def release(self) -> None:
        """Release the copy after the last read. Idempotent."""
        if self._on_gpu:
            self._copy = None
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
            if self._frees_memory:
                torch.cuda.empty_cache()

    def write(self, source: Path, directory: Path) -> None:
        """Write the directory of the last published weights, on rank 0; other files are those of
        `source`."""
        if self._backend.rank:
            return
        memory = self._host if self._on_gpu else self._copy
        assert memory is not None

        copy_files(source, directory, self._backend.config.dtype)
        written = [
            WeightEntry(one.name, one.dtype, one.shape, partial(one.of, memory))
            for one in self._slices
        ]
        write_weights(written, written, directory)

    @property
    def _on_gpu(self) -> bool:
        return self._backend.device.type == "cuda"

    def _make_room(self) -> None:
        if not self._slices:
            for entry in entries(self._backend.policy.model):
                start = -(-self._num_bytes // ALIGNMENT) * ALIGNMENT
                self._slices.append(Slice(entry.name, entry.dtype, entry.shape, start))
                self._num_bytes = start + self._slices[-1].num_bytes
        if self._on_gpu:
            self._copy = None
            if self._frees_memory:
                torch.cuda.empty_cache()
            self._copy = torch.empty(
                self._num_bytes, dtype=torch.uint8, device=self._backend.device
            )
            if self._host is None and self._backend.rank == 0:
                self._host = self._memory.take(self._num_bytes, self._backend.device)
        elif self._copy is None and self._backend.rank == 0:
            copy = torch.empty(self._num_bytes, dtype=torch.uint8)
            number, _ = copy.untyped_storage()._share_fd_cpu_()
            os.posix_fallocate(number, 0, self._num_bytes)  # a full /dev/shm would kill later
            self._copy = copy

    def _shared(self, copy: Tensor, num_readers: int) -> SharedWeights:
        if self._host is not None:
            self._host.copy_(copy, non_blocking=True)
        if self._on_gpu:
            torch.cuda.synchronize(self._backend.device)
        return SharedWeights(
            *described(self._slices),
            [one.offset for one in self._slices],
            self._num_bytes,
            {device_of(copy): [handle_of(copy) for _ in range(num_readers)]},
            self._has_room(num_readers),
        )

    def _has_room(self, num_readers: int) -> bool:
        if not self._on_gpu:
            return True
        free, _ = torch.cuda.mem_get_info(self._backend.device)
        return bool(free >= num_readers * (2 * self._num_bytes + WAKE_BYTES))


def device_of(memory: Tensor) -> str:
    """The name of the device for other processes."""
    if memory.device.type != "cuda":
        return "cpu"
    return str(torch.cuda.get_device_properties(memory.device).uuid)


def handle_of(memory: Tensor) -> list[str | int]:
    """The handle with which one other process opens these bytes."""
    if memory.device.type != "cuda":
        number, _ = memory.untyped_storage()._share_fd_cpu_()
        return [os.getpid(), number]
    _, arguments = reduce_tensor(memory)  # type: ignore[no-untyped-call]
    storage, size, offset, _, counter, counter_offset, event, needs_event = arguments[7:]
    handles = [base64.b64encode(one).decode() for one in (storage, counter, event)]
    return [
        handles[0], size, offset, handles[1], counter_offset, handles[2], int(needs_event),
    ]  # fmt: skip
