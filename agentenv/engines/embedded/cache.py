"""The prefix cache of the embedded engine: slots for sequences, and prefixes shared between them.

A slot holds the keys and values of one token sequence, a column a token, in a row of a pool; it
keeps its number when its row moves. Idle slots are the prefix cache, least recently used first
out. A slot's columns can be shared only while its version is the engine's version.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from agentenv.engines.embedded.weights import Architecture

# Keys and values of the embedded engine: rows of equal capacity form a pool.
#
# Short sequences never pay for the padding of long ones. The rows of running requests come first,
# so that decoding works on a view:
#
#     pool of capacity 128:  | running | running | running | idle | free | idle | free |
#                            0                              num_running


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


IntArray = npt.NDArray[np.int32]
CAPACITIES = sorted([2**n for n in range(6, 31)] + [3 * 2**n for n in range(5, 30)])
LOOKUP_BLOCK = 256
NO_VERSION = -(2**62)


class SlotCache:
    """All slots: running ones of requests and up to `num_cached` idle ones."""

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
        self.pools: dict[int, Pool] = {}
        self._unused = list(range(num_slots))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._row = [0] * num_slots
        self._pool: list[Pool | None] = [None] * num_slots
        self._session = [""] * num_slots
        self._version = np.full(num_slots, NO_VERSION, dtype=np.int64)
        self.lengths = np.zeros(num_slots, dtype=np.int64)  # columns computed
        self.tokens = np.zeros((num_slots, CAPACITIES[0]), dtype=np.int32)

    def location(self, slot: int) -> tuple[Pool, int]:
        """Pool and row of a slot that is in use."""
        pool = self._pool[slot]
        assert pool is not None
        return pool, self._row[slot]

    def version(self, slot: int) -> int:
        """Version of all columns of the slot, or NO_VERSION when they cannot be shared."""
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
            whole = slot in self._idle and self.lengths[slot] == longest
            return whole, self._session[slot] == session

        return max(ties, key=rank), longest

    def open(
        self, prompt: IntArray, session: str, source: int | None, common: int, room: int
    ) -> tuple[int, int]:
        """Give a new running request its slot with the shared columns of `source` in place.

        Returns the slot and how many columns it already has, at most len(prompt) - 1. `room`
        columns beyond the prompt are reserved. The slot cannot be shared before `publish`.
        """
        cached = min(common, len(prompt) - 1)
        pool = self._pool_for(len(prompt) + room)
        if source is not None and source in self._idle and self.lengths[source] == common:
            slot = source
            del self._idle[slot]
            self._start_idle_row(slot, pool, cached)
        else:
            slot = self._unused.pop()
            row = self._claim_front(pool)
            if source is not None and cached:
                if source in self._idle:
                    self._idle.move_to_end(source)
                self._copy(self.location(source), (pool, row), cached)
            self._put(slot, pool, row)
        self.tokens[slot, : len(prompt)] = prompt
        self._session[slot] = session
        self._version[slot] = NO_VERSION
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
        """Move a running slot to a pool in which `columns` columns fit."""
        old, row = self.location(slot)
        new = self._pool_for(columns)
        target = self._claim_front(new)
        self._copy((old, row), (new, target), int(self.lengths[slot]))
        old.slots[row] = None
        self._put(slot, new, target)
        self._fill_gap(old, row)

    def close(self, slot: int, version: int) -> None:
        """End a running slot; it stays as a cache entry if all its columns are of `version`."""
        pool, row = self.location(slot)
        if self._num_cached and self.version(slot) == version:
            if row != pool.num_running - 1:
                target = pool.free_row()
                pool.free.discard(target)
                self._copy((pool, row), (pool, target), int(self.lengths[slot]))
                pool.slots[row] = None
                self._put(slot, pool, target)
                self._fill_gap(pool, row)
            else:
                pool.num_running -= 1
            self._idle[slot] = None
            if len(self._idle) > self._num_cached:
                self._drop(self._idle.popitem(last=False)[0])
        else:
            self._drop(slot)
            self._fill_gap(pool, row)

    def forget_all(self) -> None:
        """Drop all idle slots and bar the running ones from ever being shared."""
        while self._idle:
            self._drop(self._idle.popitem()[0])
        self._version[:] = NO_VERSION

    def clear(self) -> None:
        """Drop all slots, running ones too, and their memory."""
        self.pools.clear()
        self._idle.clear()
        num_slots = len(self._row)
        self._unused = list(range(num_slots))
        self._pool = [None] * num_slots
        self._version[:] = NO_VERSION
        self.lengths[:] = 0

    def _pool_for(self, columns: int) -> Pool:
        capacity = next(c for c in CAPACITIES if c >= columns)
        if capacity not in self.pools:
            self.pools[capacity] = Pool(self._arch, capacity, self._dtype, self._device)
            self.pools = dict(sorted(self.pools.items()))
            if capacity > self.tokens.shape[1]:
                added = capacity - self.tokens.shape[1]
                self.tokens = np.pad(self.tokens, ((0, 0), (0, added)))
        return self.pools[capacity]

    def _put(self, slot: int, pool: Pool, row: int) -> None:
        self._pool[slot], self._row[slot] = pool, row
        pool.slots[row] = slot
        pool.free.discard(row)

    @staticmethod
    def _copy(source: tuple[Pool, int], target: tuple[Pool, int], columns: int) -> None:
        (old, row), (new, place) = source, target
        new.kv[:, :, place, :, :columns] = old.kv[:, :, row, :, :columns]

    def _claim_front(self, pool: Pool) -> int:
        """Make the first row behind the running ones a running one; its idle slot moves away."""
        if pool.num_running == len(pool.slots):
            pool.free_row()
        row = pool.num_running
        tenant = pool.slots[row]
        if tenant is not None:
            place = pool.free_row()
            self._copy((pool, row), (pool, place), int(self.lengths[tenant]))
            self._put(tenant, pool, place)
            pool.slots[row] = None
        pool.free.discard(row)
        pool.num_running += 1
        return row

    def _start_idle_row(self, slot: int, pool: Pool, columns: int) -> None:
        """Make the row of an idle slot a running one of `pool`."""
        old, row = self.location(slot)
        if old is pool and row == pool.num_running:
            pool.num_running += 1
            return
        target = self._claim_front(pool)
        self._copy((old, row), (pool, target), columns)
        old.slots[row] = None
        old.free.add(row)
        self._put(slot, pool, target)

    def _fill_gap(self, pool: Pool, row: int) -> None:
        """Close the gap that a running row left: the last running row moves there."""
        pool.num_running -= 1
        last = pool.num_running
        if row != last:
            slot = pool.slots[last]
            assert slot is not None
            self._copy((pool, last), (pool, row), int(self.lengths[slot]))
            self._put(slot, pool, row)
            pool.slots[last] = None
        pool.free.add(last)

    def _drop(self, slot: int) -> None:
        """Free slot and row. A running row's gap is the caller's to fill."""
        pool, row = self.location(slot)
        pool.slots[row] = None
        if row >= pool.num_running:
            pool.free.add(row)
        self._pool[slot] = None
        self._version[slot] = NO_VERSION
        self.lengths[slot] = 0
        self._unused.append(slot)
