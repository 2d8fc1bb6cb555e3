"""Where these tests run: on a GPU, or in small on the CPU, so that they cannot rot without one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TypeVar
from unittest import mock

import torch

T = TypeVar("T")
HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def synchronize() -> None:
    """Wait for all pending work of the device."""
    if HAS_GPU:
        torch.cuda.synchronize()


def allocated_bytes() -> int:
    """Of tensors on the GPU; 0 without one."""
    return torch.cuda.memory_allocated() if HAS_GPU else 0


def used_gib() -> float:
    """GiB of the GPU that processes have taken, as the driver counts them; 0 without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return float(subprocess.check_output(command).split()[0]) / 1024 if HAS_GPU else 0.0


async def timed(doing: Awaitable[T]) -> tuple[float, T]:
    """The seconds that it takes, and its result."""
    start = time.perf_counter()
    result = await doing
    return time.perf_counter() - start, result


@contextmanager
def restored(module: ModuleType) -> Iterator[None]:
    """Liger puts its classes into a module of transformers, where later models would find them."""
    with mock.patch.dict(vars(module)):
        yield
