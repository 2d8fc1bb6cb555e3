"""Keys and values of the embedded engine: rows of equal capacity form a pool.

Short sequences never pay for the padding of long ones. The rows of running requests come first, so
that decoding works on a view:

    pool of capacity 128:  | running | running | running | idle | free | idle | free |
                           0                              num_running
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentenv.engines.embedded_architecture import Architecture


class Pool:
    """Rows of `capacity` columns. kv: [num_layers, 2, rows, num_kv_heads, capacity, head_dim]."""

    def __init__(
        self, arch: Architecture, capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.capacity = capacity
        self.num_running = 0
        self.slots: list[int | None] = []  # slot of each row
        self.free: set[int] = set()
        shape = (arch.num_layers, 2, 0, arch.num_kv_heads, capacity, arch.head_dim)
        self._set_kv(torch.zeros(shape, dtype=dtype, device=device))

    def _set_kv(self, kv: Tensor) -> None:
        self.kv = kv
        self.keys = [layer[0] for layer in kv]
        self.values = [layer[1] for layer in kv]
        self.flat_keys = [keys.view(-1, keys.shape[-1]) for keys in self.keys]
        self.flat_values = [values.view(-1, values.shape[-1]) for values in self.values]

    def running(self) -> list[int]:
        """Slots of the running rows, in order."""
        return [slot for slot in self.slots[: self.num_running] if slot is not None]

    def free_row(self) -> int:
        """A row without a slot, behind the running ones or at their end."""
        if not self.free:
            rows = len(self.slots)
            added = max(8, rows)
            shape = list(self.kv.shape)
            shape[2] = rows + added
            # Zeros, not empty: a masked column still meets 0 * value, and 0 * NaN is NaN.
            kv = torch.zeros(shape, dtype=self.kv.dtype, device=self.kv.device)
            kv[:, :, :rows] = self.kv
            self._set_kv(kv)
            self.slots += [None] * added
            self.free.update(range(rows, rows + added))
        return min(self.free)
