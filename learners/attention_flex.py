"""Attention of packed trees on a GPU: FlexAttention with a block mask that follows from `end`.

In a packed tree query q sees key k iff k <= q < end[k]. For blocks of B queries and keys, with
i the query block and j <= i the key block:

    some pair is visible    i == j, or i B < max(end in j)
    every pair is visible   j < i and (i + 1) B <= min(end in j)

So the mask of blocks needs two numbers a block and no [tokens, tokens] tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK_SIZE = 128


def block_mask(end: Tensor, block_size: int = BLOCK_SIZE) -> BlockMask:
    """The mask of a packed tree; end: int64 [tokens], on the device of the attention."""
    partial, full = visible_blocks(end, block_size)
    ends = _whole_blocks(end, block_size).flatten()

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < ends[key])

    return BlockMask.from_kv_blocks(
        *_indices(partial),
        *_indices(full),
        BLOCK_SIZE=block_size,
        mask_mod=visible,
        seq_lengths=(len(end), len(end)),
    )


def visible_blocks(end: Tensor, block_size: int) -> tuple[Tensor, Tensor]:
    """bool [query blocks, key blocks], twice: some but not all pairs are visible; all are.

    A last block that is not full counts as one with more tokens behind it, which see themselves.
    """
    by_block = _whole_blocks(end, block_size)
    block = torch.arange(len(by_block), device=end.device)
    query, key = block[:, None], block[None, :]
    some = (query == key) | ((query > key) & (query * block_size < by_block.amax(1)))
    full = (query > key) & ((query + 1) * block_size <= by_block.amin(1))
    return some & ~full, full


def _whole_blocks(end: Tensor, block_size: int) -> Tensor:
    """[blocks, block_size]; tokens behind the last one see themselves."""
    behind = torch.arange(len(end), -(-len(end) // block_size) * block_size, device=end.device)
    return torch.cat([end, behind + 1]).view(-1, block_size)


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float
) -> Tensor:
    """softmax(scale q k^T) v under the mask; shapes as in `blocked_attention`.

    On a GPU only: torch 2.13 has no backward of FlexAttention on the CPU.
    """
    grouped = query.shape[1] != key.shape[1]
    output: Tensor = _compiled()(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=grouped
    )
    return output.transpose(1, 2).contiguous()


@cache
def _compiled() -> Callable[..., Any]:
    """Compiled once; uncompiled it would build all scores."""
    return torch.compile(flex_attention)


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts int32 [1, 1, query blocks] and key blocks of each, first those that are set."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None]
