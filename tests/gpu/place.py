"""Where these tests run: on a GPU, or in small on the CPU, so that they cannot rot without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def synchronize() -> None:
    """Wait for all pending work of the device."""
    if HAS_GPU:
        torch.cuda.synchronize()


def allocated_bytes() -> int:
    """Of tensors on the GPU; 0 without one."""
    return torch.cuda.memory_allocated() if HAS_GPU else 0


@contextmanager
def restored(module: ModuleType) -> Iterator[None]:
    """Liger puts its classes into a module of transformers, where later models would find them."""
    with mock.patch.dict(vars(module)):
        yield
