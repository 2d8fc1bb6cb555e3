"""The model of the embedded engine: keys and values, and the forward pass over a packed batch.

A slot is one token sequence, with a column of keys and values for each computed token. The slot of
a running request is a row in a block of memory whose rows have equal widths, so that decoding works
on views:

    width 128: | running | running | running | free |        width 256: | running | free |
                 row 0     row 1     row 2

A full row moves to the block of twice the width, so that a long sequence does not widen other rows:
with one width for all, 4,000 tokens among 63 short sequences would cost four times the time and
eight times the memory. Idle slots form the prefix cache; they are tensors of exact length, and the
least recently used one is evicted first. Columns are shared only within one weight version.

All tokens of a step are packed in one list [T], so that matrix products have no padding:

    | rows of width 256 | of width 512 | ... | new tokens of prompt A | of prompt B | ...

Attention runs once per block over a view of its running rows, and once per new prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from agentenv.engines.embedded.weights import (
    Architecture,
    EmbeddedWeights,
    LayerWeights,
    rope_frequencies,
)

IntArray = npt.NDArray[np.int32]
FIRST_WIDTH = 128  # columns; the widths are this times the powers of two
LOOKUP_BLOCK = 256  # tokens compared at a time
NO_VERSION = -(2**62)  # of columns that cannot be shared


class SlotBlock:
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
        """Assign a row to the slot."""
        row = len(self.slots)
        if row == self.kv.shape[2]:
            # Zeros, not empty: a masked column is still multiplied by 0, and 0 * NaN is NaN.
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
        self.blocks: dict[int, SlotBlock] = {}  # by width
        self._free = list(range(num_slots))
        self.place: dict[int, tuple[SlotBlock, int]] = {}  # of running slots: block and row
        self.idle: OrderedDict[int, Tensor] = OrderedDict()  # columns, as of Block.columns
        self._session = [""] * num_slots
        self._version = np.full(num_slots, NO_VERSION, dtype=np.int64)  # of all columns
        self.lengths = np.zeros(num_slots, dtype=np.int64)  # columns computed
        self.tokens = np.zeros((num_slots, FIRST_WIDTH), dtype=np.int32)

    def find(self, prompt: IntArray, session: str, version: int) -> tuple[int | None, int]:
        """The slot with the longest common prefix with the prompt, and its length (0: None).

        Among equally long ones: an idle slot that ends there, then one of the session.
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
        """Open a slot for a new running request, with the shared columns of `source`.

        Returns the slot and the number of its columns, at most len(prompt) - 1. `room` columns
        beyond the prompt are reserved. The slot cannot be shared before `publish`. An idle `source`
        that is a prefix of the prompt is consumed.
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
        """Allow sharing of the slot's columns, which were all computed under `version`."""
        self._version[slot] = version

    def append(self, slots: npt.NDArray[np.int64], token_ids: list[int]) -> None:
        """Add the next column, for the given token, to each of the running `slots`."""
        self.tokens[slots, self.lengths[slots]] = token_ids
        self.lengths[slots] += 1

    def grow(self, slot: int, columns: int) -> None:
        """Move a running slot to a block in which `columns` columns fit."""
        shared = self._columns(slot, int(self.lengths[slot]))
        block, row = self.place[slot]
        self._put(slot, self._block_for(columns), shared)
        self._remove(block, row)

    def close(self, slot: int, version: int) -> None:
        """End a running slot, which stays as a cache entry if all its columns are of `version`."""
        block, row = self.place.pop(slot)
        if self._num_cached and self._version[slot] == version:
            self.idle[slot] = block.columns(row, int(self.lengths[slot])).clone()
            if len(self.idle) > self._num_cached:
                self._free_slot(self.idle.popitem(last=False)[0])
        else:
            self._free_slot(slot)
        self._remove(block, row)

    def forget_all(self) -> None:
        """Drop all idle slots, and exclude the running ones from sharing."""
        for slot in self.idle:
            self._free_slot(slot)
        self.idle.clear()
        self._version[:] = NO_VERSION

    def clear(self) -> None:
        """Drop all slots, running ones too, and their memory."""
        self.forget_all()
        for slot in self.place:
            self._free_slot(slot)
        self.place.clear()
        self.blocks.clear()

    def _columns(self, slot: int, length: int) -> Tensor:
        """A view of the first columns of a running or an idle slot."""
        if slot in self.idle:
            return self.idle[slot][:, :, :, :length]
        block, row = self.place[slot]
        return block.columns(row, length)

    def _block_for(self, columns: int) -> SlotBlock:
        width = FIRST_WIDTH
        while width < columns:
            width *= 2
        if width not in self.blocks:
            self.blocks[width] = SlotBlock(self._arch, width, self._dtype, self._device)
            added = max(0, width - self.tokens.shape[1])
            self.tokens = np.pad(self.tokens, ((0, 0), (0, added)))
        return self.blocks[width]

    def _put(self, slot: int, block: SlotBlock, columns: Tensor | None) -> None:
        """Give the slot a row of the block that begins with `columns`."""
        row = block.add(slot)
        self.place[slot] = block, row
        if columns is not None:
            block.columns(row, columns.shape[3])[:] = columns

    def _remove(self, block: SlotBlock, row: int) -> None:
        """Free a row by moving the last row of the block there. A wide block without rows frees its
        memory."""
        last, slot = len(block.slots) - 1, block.slots.pop()
        if row != last:
            length = int(self.lengths[slot])
            block.columns(row, length)[:] = block.columns(last, length)
            block.slots[row] = slot
            self.place[slot] = block, row
        elif not block.slots and block.width > FIRST_WIDTH:
            del self.blocks[block.width]

    def _free_slot(self, slot: int) -> None:
        self._version[slot] = NO_VERSION
        self.lengths[slot] = 0
        self._free.append(slot)


COLUMN_STEP = 16  # decode attention reads a multiple of this many columns


def avoid_cudnn(device: torch.device) -> None:
    """Disable cuDNN attention on a GPU, in the whole process: torch prefers it, but it takes about
    a tenth of a second to plan each new shape."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


class DecodeGroup:
    """Rows 0..n-1 of one block, one new token each: packed tokens [start, stop)."""

    def __init__(
        self, block: SlotBlock, start: int, positions: Sequence[int], device: torch.device
    ) -> None:
        num_rows, kv_heads, width = len(positions), block.kv.shape[3], block.width
        self.block, self.start, self.stop = block, start, start + num_rows
        self.longest = max(positions)
        self._positions = torch.tensor(positions, device=device).unsqueeze(1)
        self._columns = torch.arange(width, device=device)
        heads = torch.arange(num_rows * kv_heads, device=device)
        # Position of each new key in the block viewed as [rows * num_kv_heads * width, head_dim].
        self.places = heads * width + self._positions.repeat_interleave(kv_heads)
        self.prepare()

    def prepare(self) -> None:
        """Set the additive mask [stop - start, 1, 1, columns] for the current positions."""
        wanted = (self.longest // COLUMN_STEP + 1) * COLUMN_STEP
        self.num_columns = min(wanted, self.block.width)
        hidden = self._columns[: self.num_columns] > self._positions
        mask = torch.zeros(hidden.shape, dtype=self.block.kv.dtype, device=hidden.device)
        self.mask = mask.masked_fill_(hidden, -torch.inf)[:, None, None]

    def advance(self) -> None:
        """Advance every row to its next column."""
        self.longest += 1
        self._positions += 1
        self.places += 1
        self.prepare()


class Prefill:
    """Tokens [past, past + n) of a prompt, for row `row`: packed tokens [start, stop)."""

    def __init__(
        self, block: SlotBlock, row: int, past: int, start: int, num_new: int, device: torch.device
    ) -> None:
        self.block, self.row, self.past, self.start = block, row, past, start
        self.stop, self.num_columns = start + num_new, past + num_new
        self.causal = past == 0 and num_new > 1
        self.mask: Tensor | None = None
        if past and num_new > 1:
            seen = torch.ones(num_new, self.num_columns, dtype=torch.bool, device=device)
            self.mask = seen.tril_(past)


@dataclass(eq=False)
class ModelBatch:
    """One step. token_ids, positions: int64 [T]; sampled: packed indices that get logits."""

    token_ids: Tensor
    positions: Tensor
    decodes: list[DecodeGroup]
    prefills: list[Prefill]

    def __post_init__(self) -> None:
        self.sampled: Tensor | None = None
        ends = [index for group in self.decodes for index in range(group.start, group.stop)]
        ends += [new.stop - 1 for new in self.prefills]
        if len(ends) < len(self.token_ids):
            self.sampled = torch.tensor(ends, device=self.token_ids.device)

    def advance(self, token_ids: Tensor) -> None:
        """Continue with the tokens just sampled; only for a batch without prefills."""
        self.token_ids = token_ids
        self.positions += 1
        for group in self.decodes:
            group.advance()


class DecoderModel:
    """A Qwen3, Qwen2 or Llama decoder as a function over blocks of keys and values."""

    def __init__(self, arch: Architecture, weights: EmbeddedWeights) -> None:
        self._arch, self._weights = arch, weights
        self._frequencies = rope_frequencies(arch).to(weights.embed.device)
        self._extend_rope(1024)

    def _extend_rope(self, length: int) -> None:
        positions = torch.arange(length, device=self._frequencies.device)
        angles = positions[:, None] * self._frequencies
        dtype, cos, sin = self._weights.embed.dtype, angles.cos(), angles.sin()
        self._cos = torch.cat([cos, cos], -1).to(dtype).unsqueeze(1)
        # rotate_half(x) = cat(-x2, x1) = roll(x) with the sign moved into the sine.
        self._sin = torch.cat([-sin, sin], -1).to(dtype).unsqueeze(1)

    def reserve(self, length: int) -> None:
        """Extend the rotary tables to `length` positions."""
        if length > len(self._cos):
            self._extend_rope(max(length, 2 * len(self._cos)))

    def forward(self, batch: ModelBatch) -> Tensor:
        """Write the keys and values of the batch; float32 logits [S, vocab_size].

        S rows: every decoding row, then the last token of each prefill.
        """
        weights, eps = self._weights, self._arch.norm_eps
        size = (self._arch.hidden_size,)
        cos, sin = self._cos[batch.positions], self._sin[batch.positions]
        hidden = F.embedding(batch.token_ids, weights.embed)
        for index, layer in enumerate(weights.layers):
            normed = F.rms_norm(hidden, size, layer.attn_norm, eps)
            attended = self._attention(index, layer, normed, cos, sin, batch)
            hidden = hidden + F.linear(attended, layer.out, layer.out_bias)
            normed = F.rms_norm(hidden, size, layer.mlp_norm, eps)
            gate, up = F.linear(normed, layer.gate_up).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, layer.down)
        if batch.sampled is not None:
            hidden = hidden[batch.sampled]
        return F.linear(F.rms_norm(hidden, size, weights.final_norm, eps), weights.head).float()

    def _attention(
        self,
        index: int,
        layer: LayerWeights,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: ModelBatch,
    ) -> Tensor:
        """Attention output [T, num_heads * head_dim] of one layer, before its last product."""
        arch = self._arch
        heads, kv_heads, d = arch.num_heads, arch.num_kv_heads, arch.head_dim
        qkv = F.linear(normed, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, d)
        qk, values = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.qk_norm is not None:
            qk = F.rms_norm(qk, (d,), None, arch.norm_eps) * layer.qk_norm
        qk = qk * cos + qk.roll(d // 2, -1) * sin
        # Query heads that share a key are positions of one query: keys are never repeated.
        queries = qk[:, :heads].view(-1, kv_heads, heads // kv_heads, d)
        keys = qk[:, heads:]
        parts = [decode_attention(index, group, queries, keys, values) for group in batch.decodes]
        parts += [prefill_attention(index, new, queries, keys, values) for new in batch.prefills]
        return torch.cat(parts) if len(parts) > 1 else parts[0]


def decode_attention(
    index: int, group: DecodeGroup, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Store one column per row, attend over the row: [stop - start, num_heads * head_dim]."""
    block, rows, d = group.block, slice(group.start, group.stop), queries.shape[-1]
    size, columns = group.stop - group.start, group.num_columns
    block.flat_keys[index].index_copy_(0, group.places, keys[rows].reshape(-1, d))
    block.flat_values[index].index_copy_(0, group.places, values[rows].reshape(-1, d))
    out = F.scaled_dot_product_attention(
        queries[rows],
        block.keys[index][:size, :, :columns],
        block.values[index][:size, :, :columns],
        attn_mask=group.mask,
    )
    return out.reshape(size, -1)


def prefill_attention(
    index: int, new: Prefill, queries: Tensor, keys: Tensor, values: Tensor
) -> Tensor:
    """Store n columns of one row, attend over past and new ones: [stop - start, num_heads *
    head_dim]."""
    span = slice(new.start, new.stop)
    columns = slice(new.past, new.past + new.stop - new.start)
    row_keys = new.block.keys[index][new.row]
    row_values = new.block.values[index][new.row]
    row_keys[:, columns] = keys[span].transpose(0, 1)
    row_values[:, columns] = values[span].transpose(0, 1)
    # [num_kv_heads, group, stop - start, head_dim]
    query = queries[span].permute(1, 2, 0, 3)
    shape = (-1, query.shape[1], -1, -1)
    out = F.scaled_dot_product_attention(
        query,
        row_keys[:, None, : new.num_columns].expand(shape),
        row_values[:, None, : new.num_columns].expand(shape),
        attn_mask=new.mask,
        is_causal=new.causal,
    )
    return out.permute(2, 0, 1, 3).reshape(new.stop - new.start, -1)
