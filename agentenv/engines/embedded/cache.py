"""The keys and values of the embedded engine, and the prefixes that requests share.

A slot stands for one token sequence, with a column of keys and values for each computed token.
The slot of a running request is a row in a block of memory whose rows have one width, so that
decoding works on views:

    width 128: | running | running | running | free |        width 256: | running | free |
                 row 0     row 1     row 2

A row that is full moves to the block of twice the width. So rows of over 128 columns are at most
about twice as wide as they are long, and a long sequence widens no other row, neither in memory
nor in the columns that attention reads: with one width for all, a sequence of 4,000 tokens among
63 short ones cost four times the time and eight times the memory. Idle slots, the prefix cache,
are tensors of their exact length; the least recently used one goes first. Columns are shared only
while the version of their slot is the version of the engine.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentenv.engines.embedded.weights import Architecture

IntArray = npt.NDArray[np.int32]
FIRST_WIDTH = 128  # columns; the widths are this times the powers of two
LOOKUP_BLOCK = 256  # tokens compared at a time
NO_VERSION = -(2**62)


class Block:
    """Memory of running slots. kv: [num_layers, 2, rows, num_kv_heads, width, head_dim]; the first
    len(slots) rows are in use, each by one of `slots`."""

    def __init__(
        self, arch: Architecture, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.width = width
        self.slots: list[int] = []
        shape = (arch.num_layers, 2, 0, arch.num_kv_heads, width, arch.head_dim)
        self._set_kv(torch.zeros(shape, dtype=dtype, device=device))

    def add(self, slot: int) -> int:
        """The row that is the slot's from now on."""
        row = len(self.slots)
        if row == self.kv.shape[2]:
            # Zeros, not empty: a masked column still meets 0 * value, and 0 * NaN is NaN.
            added = self.kv.new_zeros(*self.kv.shape[:2], max(1, row), *self.kv.shape[3:])
            self._set_kv(torch.cat([self.kv, added], 2))
        self.slots.append(slot)
        return row

    def columns(self, row: int, length: int) -> Tensor:
        """A view of a row's first columns: [num_layers, 2, num_kv_heads, length, head_dim]."""
        return self.kv[:, :, row, :, :length]

    def _set_kv(self, kv: Tensor) -> None:
        self.kv = kv
        self.keys = [layer[0] for layer in kv]
        self.values = [layer[1] for layer in kv]
        self.flat_keys = [keys.view(-1, keys.shape[-1]) for keys in self.keys]
        self.flat_values = [values.view(-1, values.shape[-1]) for values in self.values]


class SlotCache:
    """All slots: those of running requests and up to `num_cached` idle ones."""

    def __init__(
        self,
        arch: Architecture,
        num_running: int,
        num_cached: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._arch, self._dtype, self._device = arch, dtype, device
        self._num_cached = num_cached
        num_slots = num_running + num_cached
        self.blocks: dict[int, Block] = {}  # by width
        self._free = list(range(num_slots))
        self._place: dict[int, tuple[Block, int]] = {}  # of running slots: block and row
        self.idle: OrderedDict[int, Tensor] = OrderedDict()  # columns, as of Block.columns
        self._session = [""] * num_slots
        self._version = np.full(num_slots, NO_VERSION, dtype=np.int64)
        self.lengths = np.zeros(num_slots, dtype=np.int64)  # columns computed
        self.tokens = np.zeros((num_slots, FIRST_WIDTH), dtype=np.int32)

    def location(self, slot: int) -> tuple[Block, int]:
        """Block and row of a running slot."""
        return self._place[slot]

    def version(self, slot: int) -> int:
        """Version of all columns of the slot, or NO_VERSION when the columns cannot be shared."""
        return int(self._version[slot])

    def find(self, prompt: IntArray, session: str, version: int) -> tuple[int | None, int]:
        """The slot sharing the longest prefix with the prompt, and that length (0: None).

        Of equally long ones: an idle slot that ends there, then one of the session.
        """
        slots = np.flatnonzero((self._version == version) & (self.lengths > 0))
        common = np.zeros(len(slots), dtype=np.int64)
        rest = np.arange(len(slots))
        for start in range(0, min(len(prompt), self.tokens.shape[1]), LOOKUP_BLOCK):
            block = prompt[start : start + LOOKUP_BLOCK]
            columns = self.tokens[slots[rest], start : start + LOOKUP_BLOCK][:, : len(block)]
            differs = columns != block[: columns.shape[1]]
            first = np.where(differs.any(1), differs.argmax(1), columns.shape[1])
            first = np.minimum(first, np.maximum(self.lengths[slots[rest]] - start, 0))
            common[rest] += first
            rest = rest[first == LOOKUP_BLOCK]
            if not len(rest):
                break
        if not len(slots) or not (longest := int(common.max())):
            return None, 0
        ties = slots[common == longest].tolist()

        def rank(slot: int) -> tuple[bool, bool]:
            whole = slot in self.idle and self.lengths[slot] == longest
            return whole, self._session[slot] == session

        return max(ties, key=rank), longest

    def open(
        self, prompt: IntArray, session: str, source: int | None, common: int, room: int
    ) -> tuple[int, int]:
        """Give a new running request its slot, with the shared columns of `source` in place.

        Returns the slot and how many columns the slot already has, at most len(prompt) - 1. `room`
        columns beyond the prompt are reserved. The slot cannot be shared before `publish`. An idle
        `source` that the prompt continues whole is used up.
        """
        cached = min(common, len(prompt) - 1)
        shared = None if source is None else self._columns(source, cached)
        slot = self._free.pop()
        block = self._block_for(len(prompt) + room)
        self._put(slot, block, shared)
        if source is not None and source in self.idle:
            if self.lengths[source] == common:
                del self.idle[source]
                self._free_slot(source)
            else:
                self.idle.move_to_end(source)
        self.tokens[slot, : len(prompt)] = prompt
        self._session[slot] = session
        self.lengths[slot] = len(prompt)
        return slot, cached

    def publish(self, slot: int, version: int) -> None:
        """Let others share the slot's columns, all computed under `version`."""
        self._version[slot] = version

    def append(self, slots: npt.NDArray[np.int64], token_ids: list[int]) -> None:
        """Each of the running `slots` gets its next column, of the token given."""
        self.tokens[slots, self.lengths[slots]] = token_ids
        self.lengths[slots] += 1

    def grow(self, slot: int, columns: int) -> None:
        """Move a running slot to a block in which `columns` columns fit."""
        shared = self._columns(slot, int(self.lengths[slot]))
        block, row = self._place[slot]
        self._put(slot, self._block_for(columns), shared)
        self._remove(block, row)

    def close(self, slot: int, version: int) -> None:
        """End a running slot, which stays as a cache entry if all its columns are of `version`."""
        block, row = self._place.pop(slot)
        if self._num_cached and self.version(slot) == version:
            self.idle[slot] = block.columns(row, int(self.lengths[slot])).clone()
            if len(self.idle) > self._num_cached:
                self._free_slot(self.idle.popitem(last=False)[0])
        else:
            self._free_slot(slot)
        self._remove(block, row)

    def forget_all(self) -> None:
        """Drop all idle slots and bar the running ones from ever being shared."""
        for slot in self.idle:
            self._free_slot(slot)
        self.idle.clear()
        self._version[:] = NO_VERSION

    def clear(self) -> None:
        """Drop all slots, running ones too, and their memory."""
        self.forget_all()
        for slot in self._place:
            self._free_slot(slot)
        self._place.clear()
        self.blocks.clear()

    def _columns(self, slot: int, length: int) -> Tensor:
        """A view of the first columns of a running or an idle slot."""
        if slot in self.idle:
            return self.idle[slot][:, :, :, :length]
        block, row = self._place[slot]
        return block.columns(row, length)

    def _block_for(self, columns: int) -> Block:
        width = FIRST_WIDTH
        while width < columns:
            width *= 2
        if width not in self.blocks:
            self.blocks[width] = Block(self._arch, width, self._dtype, self._device)
            added = max(0, width - self.tokens.shape[1])
            self.tokens = np.pad(self.tokens, ((0, 0), (0, added)))
        return self.blocks[width]

    def _put(self, slot: int, block: Block, columns: Tensor | None) -> None:
        """Give the slot a row of the block, which begins with `columns`."""
        row = block.add(slot)
        self._place[slot] = block, row
        if columns is not None:
            block.columns(row, columns.shape[3])[:] = columns

    def _remove(self, block: Block, row: int) -> None:
        """Close the gap that a row leaves: the last row of the block moves there. A wide block
        without rows gives its memory back."""
        last, slot = len(block.slots) - 1, block.slots.pop()
        if row != last:
            length = int(self.lengths[slot])
            block.columns(row, length)[:] = block.columns(last, length)
            block.slots[row] = slot
            self._place[slot] = block, row
        elif not block.slots and block.width > FIRST_WIDTH:
            del self.blocks[block.width]

    def _free_slot(self, slot: int) -> None:
        self._version[slot] = NO_VERSION
        self.lengths[slot] = 0
        self._free.append(slot)
