# mypy: ignore-errors
# Its base types are vLLM's, which is in another environment.
"""vLLM's end of weights in shared memory of the learner (learners/ranks/shared.py).

The backend "agentenv_ipc" of --weight-transfer-config, which `agentenv_vllm.register` registers.
The learner's ranks and vLLM's workers are processes of one user on one machine: a worker maps the
copy of a rank on the worker's GPU (CUDA IPC; without GPUs, in main memory), and vLLM loads the
tensors from it. The memory handles are JSON, so that nothing is unpickled.
"""

from __future__ import annotations

import base64
import logging
import math
import os
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

try:  # only in the CPU build, for its packed weights
    from agentenv_vllm_broadcast import repack_experts, repack_tied_head
except ImportError:
    repack_experts = repack_tied_head = None

logger = logging.getLogger("vllm.agentenv")


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Empty: there is no rendezvous."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """`SharedWeights` of agentenv/contract/weights.py."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    offsets: list[int]
    num_bytes: int
    memory: dict[str, list[Any]]


class SharedMemoryEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads from memory of another process. Changes nothing if the memory cannot be opened."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _memory: torch.Tensor | None = None  # mapped from `receive_weights` to the end of the update

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: UpdateInfo) -> None:
        began = time.perf_counter()
        memory = self._memory = open_memory(update_info.memory, update_info.num_bytes, self.device)
        opened = time.perf_counter()
        names, dtypes = update_info.names, update_info.dtype_names
        parts = zip(names, dtypes, update_info.shapes, update_info.offsets, strict=True)
        weights = [(name, part(memory, *place)) for name, *place in parts]
        if repack_experts is not None:
            repack_experts(self.model)
        initialize_layerwise_reload(self.model)
        self.model.load_weights(weights)
        took = time.perf_counter() - opened
        logger.info("memory opened in %.4f s, weights loaded in %.4f s", opened - began, took)

    def finish_weight_update(self) -> None:
        began = time.perf_counter()
        finalize_layerwise_reload(self.model, self.model_config)
        if repack_tied_head is not None:
            repack_tied_head(self.model)
        if self.device.type == "cuda":  # the learner frees its memory
            torch.cuda.synchronize(self.device)
        self._memory = None
        logger.info("weights in place in %.4f s", time.perf_counter() - began)

    def shutdown(self) -> None:
        self._memory = None


def open_memory(memory: dict[str, list[Any]], num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [num_bytes] of another process on this worker's device. Raises ValueError if no rank
    shares memory there; RuntimeError or OSError if it cannot be opened."""
    if device.type != "cuda":
        key, opens = "cpu", open_file
    else:
        key, opens = str(torch.cuda.get_device_properties(device).uuid), open_cuda
    if key not in memory:
        raise ValueError(
            f"the learner shares no weights on the device {key} of this worker, only on "
            f"{', '.join(memory)}"
        )
    return opens(memory[key], num_bytes, device)


def open_file(handle: list[Any], num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory from a file descriptor of another process; `handle` is (pid, descriptor)."""
    path = f"/proc/{handle[0]}/fd/{handle[1]}"
    if os.stat(path).st_size < num_bytes:
        raise ValueError(f"{path} has fewer than {num_bytes} bytes")
    return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)


def open_cuda(handle: list[Any], num_bytes: int, device: torch.device) -> torch.Tensor:
    """Memory by CUDA IPC; `handle` is the result of torch's `reduce_tensor` for a flat tensor of
    bytes, with handles in base64. Each export may be opened once, since closing it is counted by
    its owner."""
    storage, size, offset, counter, counter_offset, event, needs_event = handle
    given = (
        torch.Tensor, torch.Size([num_bytes]), (1,), 0, torch.storage.TypedStorage, torch.uint8,
        device.index, base64.b64decode(storage), size, offset, False,
        base64.b64decode(counter), counter_offset, base64.b64decode(event), bool(needs_event),
    )  # fmt: skip
    return rebuild_cuda_tensor(*given)


def part(memory: torch.Tensor, dtype_name: str, shape: list[int], offset: int) -> torch.Tensor:
    """A tensor in the memory."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    size = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + size].view(dtype).view(shape)
