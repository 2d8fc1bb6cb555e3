"""Where these tests run: on a GPU, or in small on the CPU, so that they cannot rot without one."""

from __future__ import annotations

import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


def synchronize() -> None:
    """Wait for what the device still has to do."""
    if HAS_GPU:
        torch.cuda.synchronize()


def allocated_bytes() -> int:
    """Of tensors on the GPU; 0 without one."""
    return torch.cuda.memory_allocated() if HAS_GPU else 0
