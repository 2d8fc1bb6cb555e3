"""Attention of packed trees on the CPU, block by block, without a masked pair wasted.

In a packed tree (`learners.encoding`) query q sees key k iff k <= q < end[k]. Runs of equal `end`
are the segments between forks. A segment, its first child, that one's first child and so on lie
side by side and are one path, a chain. So all visible pairs are

    causal   each chain with itself
    full     the later children of a segment, with their subtrees, against the keys of its chain up
             to that segment

Each block is one call of torch's flash kernel. A query's blocks are merged by their log-sum-exp,
as in flash decoding (Dao 2023); backward, the kernel is given the merged output and log-sum-exp,
which makes its part of the gradient exact (Dao 2022, algorithm 4).
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

# One call costs about as much as this many pairs; measured with 256 channels, forward and
# backward. Only the choice between one masked call and many depends on it.
CALL_PAIRS = 256


class Block(NamedTuple):
    """Queries [first_query, last_query) against keys [first_key, last_key)."""

    first_query: int
    last_query: int
    first_key: int
    last_key: int
    kind: Literal["causal", "full", "masked"]

    @property
    def pairs(self) -> int:
        """Pairs that have to be computed."""
        queries, keys = self.last_query - self.first_query, self.last_key - self.first_key
        return queries * (queries + 1) // 2 if self.kind == "causal" else queries * keys


class BlockPlan:
    """The cheaper, by counted pairs, of one masked block and the blocks between forks.

    end: int64 [tokens]. Queries of causal and masked blocks are disjoint and come first.
    """

    def __init__(self, end: NDArray[np.int64]) -> None:
        self.end = end
        blocks = chain_blocks(end)
        dense = Block(0, len(end), 0, len(end), "masked")
        cost = sum(block.pairs + CALL_PAIRS for block in blocks)
        self.blocks = blocks if cost <= dense.pairs + CALL_PAIRS else [dense]
        self._mask: Tensor | None = None

    def mask(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        """0 and -inf, [queries, keys], for a masked block; the layers share it."""
        if block.kind != "masked":
            return None
        if self._mask is None or self._mask.dtype != dtype:
            seen = visible(torch.from_numpy(self.end))
            self._mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
        return self._mask


def visible(end: Tensor) -> Tensor:
    """bool [tokens, tokens]: query q sees key k iff k <= q < end[k]."""
    place = torch.arange(len(end), device=end.device)
    return (place <= place[:, None]) & (place[:, None] < end)


def chain_blocks(end: NDArray[np.int64]) -> list[Block]:
    """Causal and full blocks that together hold each visible pair once."""
    starts = [0, *(np.flatnonzero(np.diff(end)) + 1).tolist()]
    stops = [*starts[1:], len(end)]
    ends = end[starts].tolist()
    causal: list[Block] = []
    full: list[Block] = []
    chain = 0  # first token of the chain that goes on
    for i, (stop, subtree) in enumerate(zip(stops, ends, strict=True)):
        if stop == subtree:  # a leaf ends the chain
            causal.append(Block(chain, stop, chain, stop, "causal"))
            chain = stop
        elif ends[i + 1] < subtree:
            full.append(Block(ends[i + 1], subtree, chain, stop, "full"))
    return causal + full


def visible_pairs(end: NDArray[np.int64]) -> int:
    """Number of visible pairs: the least that any attention has to compute."""
    return int((end - np.arange(len(end))).sum())


def is_available() -> bool:
    """Whether this torch has the kernels."""
    name = "_scaled_dot_product_flash_attention_for_cpu"
    return hasattr(torch.ops.aten, name) and hasattr(torch.ops.aten, f"{name}_backward")


def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: BlockPlan, scale: float
) -> Tensor:
    """softmax(scale q k^T) v over the visible pairs.

    query: [1, heads, tokens, width]; key, value: the same with as many heads or fewer, each
    shared by a group of neighbours. Returns [1, tokens, heads, width] in the dtype of the query;
    blocks are merged and gradients added up in at least float32.
    """
    output: Tensor = BlockedAttention.apply(  # type: ignore[no-untyped-call]
        query, key, value, plan, scale
    )
    return output[None]


class BlockedAttention(torch.autograd.Function):
    """See `blocked_attention`."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: BlockPlan, scale: float
    ) -> Tensor:
        """Returns [tokens, heads, width]."""
        queries, keys, values = _grouped(query, key, value)
        num_groups, groups, tokens, width = queries.shape
        exact = torch.promote_types(query.dtype, torch.float32)
        output = query.new_empty(tokens, num_groups, groups, width, dtype=exact)
        merged = output.permute(1, 2, 0, 3)
        normalizer = query.new_empty(num_groups, groups, tokens, dtype=exact)
        for block in plan.blocks:
            span = slice(block.first_query, block.last_query)
            seen = slice(block.first_key, block.last_key)
            part, part_normalizer = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries[:, :, span],
                keys[:, :, seen],
                values[:, :, seen],
                0.0,
                block.kind == "causal",
                attn_mask=plan.mask(block, query.dtype),
                scale=scale,
            )
            if block.kind != "full":
                merged[:, :, span] = part
                normalizer[:, :, span] = part_normalizer
                continue
            total = torch.logaddexp(normalizer[:, :, span], part_normalizer)
            share = (part_normalizer - total).exp_()[..., None]
            merged[:, :, span].lerp_(part.to(exact), share)
            normalizer[:, :, span] = total
        output = output.to(query.dtype)
        ctx.plan, ctx.scale = plan, scale
        ctx.save_for_backward(query, key, value, output, normalizer)
        return output.flatten(1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, normalizer = ctx.saved_tensors
        queries, keys, values = _grouped(query, key, value)
        num_groups, groups, tokens, width = queries.shape
        exact = torch.promote_types(query.dtype, torch.float32)
        grad = grad.reshape(tokens, num_groups, groups, width).permute(1, 2, 0, 3)
        output = output.permute(1, 2, 0, 3)
        by_token = query.new_empty(tokens, num_groups, groups, width, dtype=exact)
        grad_query = by_token.permute(1, 2, 0, 3)
        grad_key, grad_value = query.new_empty(2, num_groups, tokens, width, dtype=exact)
        for block in ctx.plan.blocks:
            span = slice(block.first_query, block.last_query)
            seen = slice(block.first_key, block.last_key)
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[:, :, span],
                queries[:, :, span],
                keys[:, :, seen],
                values[:, :, seen],
                output[:, :, span],
                normalizer[:, :, span],
                0.0,
                block.kind == "causal",
                attn_mask=ctx.plan.mask(block, query.dtype),
                scale=ctx.scale,
            )
            of_query, of_key, of_value = (part.to(exact) for part in parts)
            if block.kind == "full":
                grad_query[:, :, span] += of_query
                grad_key[:, seen] += of_key.sum(1)
                grad_value[:, seen] += of_value.sum(1)
            else:
                grad_query[:, :, span] = of_query
                grad_key[:, seen] = of_key.sum(1)
                grad_value[:, seen] = of_value.sum(1)
        found = by_token.flatten(1, 2).transpose(0, 1), grad_key, grad_value
        return *(one[None].to(query.dtype) for one in found), None, None


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of shape [key heads, query heads a key head, tokens, width]."""
    num_groups = key.shape[1]
    queries = query.view(num_groups, -1, *query.shape[2:])
    keys, values = (one[0][:, None].expand(-1, queries.shape[1], -1, -1) for one in (key, value))
    return queries, keys, values
