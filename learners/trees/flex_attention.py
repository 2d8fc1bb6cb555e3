"""FlexAttention over a packed tree, on GPUs.

For blocks of B queries and keys, with i the query block and j <= i the key block:

    some pair is visible    i == j, or i B < max(end in j)
    every pair is visible   j < i and (i + 1) B <= min(end in j)

and through a window the least, or the largest, difference of depths is below its width. So the mask
of blocks needs four numbers a block and no [tokens, tokens] tensor.
"""

from __future__ import annotations

from functools import cache, partial

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK_SIZE = 128
MIN_FLEX_WIDTH = 16  # channels of a head; narrower ones, of toys, are computed densely


def block_mask(
    end: Tensor,
    block_size: int = BLOCK_SIZE,
    depth: Tensor | None = None,
    window: int | None = None,
) -> BlockMask:
    """The mask of a packed tree, through a window where the depths are given too; end, depth:
    int64 [tokens], on the device of the attention."""
    partial, full = visible_blocks(end, block_size, depth, window)
    ends = _whole_blocks(end, block_size).flatten()
    width = window or 0
    depths = None if depth is None or window is None else _deepened(depth, block_size).flatten()

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (query < ends[key])
        return seen if depths is None else seen & (depths[query] - depths[key] < width)

    return BlockMask.from_kv_blocks(
        *_indices(partial),
        *_indices(full),
        BLOCK_SIZE=block_size,
        mask_mod=visible,
        seq_lengths=(len(end), len(end)),
    )


def visible_blocks(
    end: Tensor, block_size: int, depth: Tensor | None = None, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """bool [query blocks, key blocks], twice: some but not all pairs are visible; all are.

    An incomplete last block counts as padded with tokens that see only themselves.
    """
    by_block = _whole_blocks(end, block_size)
    block = torch.arange(len(by_block), device=end.device)
    query, key = block[:, None], block[None, :]
    some = (query == key) | ((query > key) & (query * block_size < by_block.amax(1)))
    full = (query > key) & ((query + 1) * block_size <= by_block.amin(1))
    if depth is not None and window is not None:
        least, most = torch.aminmax(_deepened(depth, block_size), dim=1)
        some &= (query == key) | (least[:, None] - most < window)
        full &= most[:, None] - least < window
    return some & ~full, full


def _whole_blocks(end: Tensor, block_size: int) -> Tensor:
    """[blocks, block_size]; tokens after the last one see themselves."""
    after = torch.arange(len(end), -(-len(end) // block_size) * block_size, device=end.device)
    return torch.cat([end, after + 1]).view(-1, block_size)


def _deepened(depth: Tensor, block_size: int) -> Tensor:
    """[blocks, block_size]; tokens after the last one are as deep as it."""
    more = -len(depth) % block_size
    return torch.cat([depth, depth[-1:].expand(more)]).view(-1, block_size)


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float
) -> Tensor:
    """softmax(scale q k^T) v under the mask; shapes as in `blocked_attention`.

    On a GPU only: torch 2.13 has no backward of FlexAttention on the CPU.
    """
    output: Tensor = _compiled()(
        query, key, value, block_mask=mask, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )
    return output.transpose(1, 2).contiguous()


_compiled = cache(partial(torch.compile, flex_attention))  # uncompiled it would build all scores


def _indices(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Counts int32 [1, 1, query blocks] and key blocks of each, first those that are set."""
    order = blocks.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return blocks.sum(1).int()[None, None], order.int()[None, None]
