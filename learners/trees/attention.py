"""Attention of packed trees inside Hugging Face models, with one interface for all forms.

`use_tree_attention(model)` once; then pass `tree_layout=` and `attention_mask=NO_MASK` to the
model. Without a layout the model computes as before.

In a packed tree (encoded_tree.py) query q sees key k iff k <= q < end[k]. The layout
chooses how to compute that:

    blocked   on the CPU: blocks of visible pairs without a masked one, `BlockPlan`
    flex      on a GPU: FlexAttention, whose mask of blocks follows from `end`
    dense     on the CPU through a window, and for narrow heads: a [tokens, tokens] mask
    segments  each segment between forks against the gathered keys of its path

A layer that looks through a window of w tokens sees k only if depth[q] - depth[k] < w too. A window
at least as long as the longest path is ignored.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from agentenv.base.errors import ConfigError
from agentenv.learners.trees.context import ContextShare
from agentenv.learners.trees.flex_attention import MIN_FLEX_WIDTH, block_mask, flex_tree_attention

# Attention of a packed tree by segments: each run of tokens between forks against its path.
#
# A segment and the keys of its path form a sequence whose last tokens are the queries, as in TRL's
# TreeRow. The keys are gathered, and each segment is a call.


class SegmentKeys:
    """The keys of the paths of all segments (`TreeLayout.segments`), concatenated: `tokens`, int64
    [keys], are their indices; `num_queries` and `num_keys` of each segment."""

    def __init__(self, starts: Tensor, parents: Tensor) -> None:
        paths = list[Tensor]()
        self.num_queries: list[int] = starts.diff().tolist()
        segments = zip(starts.tolist(), self.num_queries, parents.tolist(), strict=False)
        for start, size, parent in segments:
            own = torch.arange(start, start + size)
            paths.append(own if parent < 0 else torch.cat([paths[parent], own]))
        self.tokens, self.num_keys = torch.cat(paths), [len(path) for path in paths]


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: SegmentKeys,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over the visible pairs, each query through the last `window` tokens of
    its path; shapes as in `blocked_attention`."""
    keys, values = (one.index_select(2, segments.tokens) for one in (key, value))
    found = []
    parts = (
        torch.split(query, segments.num_queries, 2),
        torch.split(keys, segments.num_keys, 2),
        torch.split(values, segments.num_keys, 2),
    )
    for own, path, content in zip(*parts, strict=True):
        num_before = path.shape[2] - own.shape[2]
        seen = torch.ones(own.shape[2], path.shape[2], dtype=torch.bool).tril(num_before)
        if window is not None:
            seen = seen.triu(num_before - window + 1)
        found.append(
            scaled_dot_product_attention(
                own, path, content, attn_mask=seen, scale=scale, enable_gqa=True
            )
        )
    return torch.cat(found, 2).transpose(1, 2).contiguous()


# Blocked. Runs of equal `end` are the segments between forks. A segment, its first child, that
# one's first child and so on lie side by side and are one path, a chain. So all visible pairs are
#
#     causal   each chain with itself
#     full     the later children of a segment, with their subtrees, against the keys of its chain
#              up to that segment
#
# Each block is one call of torch's flash kernel. A query's blocks are merged by their log-sum-exp,
# as in flash decoding (Dao 2023); backward, the kernel is given the merged output and log-sum-exp,
# which makes its part of the gradient exact (Dao 2022, algorithm 4).

# One call costs about as much as this many pairs; measured with 256 channels, forward and
# backward. Only the choice between one masked call and many depends on it.
CALL_PAIRS = 256


class AttentionBlock(NamedTuple):
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
        dense = AttentionBlock(0, len(end), 0, len(end), "masked")
        cost = sum(block.pairs + CALL_PAIRS for block in blocks)
        self.blocks = blocks if cost <= dense.pairs + CALL_PAIRS else [dense]
        self._mask: Tensor | None = None

    def mask(self, block: AttentionBlock, dtype: torch.dtype) -> Tensor | None:
        """0 and -inf, [queries, keys], for a masked block; the layers share it."""
        if block.kind != "masked":
            return None
        if self._mask is None or self._mask.dtype != dtype:
            seen = visible(torch.from_numpy(self.end))
            self._mask = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf)
        return self._mask


def visible(end: Tensor, depth: Tensor | None = None, window: int | None = None) -> Tensor:
    """bool [tokens, tokens]: query q sees key k iff k <= q < end[k], and k is among the last
    `window` tokens of the path that ends with q."""
    place = torch.arange(len(end), device=end.device)
    seen = (place <= place[:, None]) & (place[:, None] < end)
    if depth is not None and window is not None:
        seen &= depth[:, None] - depth < window
    return seen


def chain_blocks(end: NDArray[np.int64]) -> list[AttentionBlock]:
    """Causal and full blocks that together hold each visible pair once."""
    starts = [0, *(np.flatnonzero(np.diff(end)) + 1).tolist()]
    stops = [*starts[1:], len(end)]
    ends = end[starts].tolist()
    causal, full = list[AttentionBlock](), list[AttentionBlock]()
    chain = 0  # first token of the current chain
    for i, (stop, subtree) in enumerate(zip(stops, ends, strict=True)):
        if stop == subtree:  # a leaf ends the chain
            causal.append(AttentionBlock(chain, stop, chain, stop, "causal"))
            chain = stop
        elif ends[i + 1] < subtree:
            full.append(AttentionBlock(ends[i + 1], subtree, chain, stop, "full"))
    return causal + full


def blocked_attention(
    query: Tensor, key: Tensor, value: Tensor, plan: BlockPlan, scale: float
) -> Tensor:
    """softmax(scale q k^T) v over the visible pairs.

    query: [1, heads, tokens, width]; key, value: the same with as many heads or fewer, each
    shared by a group of neighbors. Returns [1, tokens, heads, width] in the dtype of the query;
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
        """Gradients of query, key and value, of `grad` (tokens, heads, width), block by block."""
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


NAME = "agentenv_tree"
# Arguments for any attention that this one need not read: dropout is refused before.
_HARMLESS = {"dropout", "is_causal", "position_ids", "use_cache", "output_attentions"}
_HARMLESS |= {"output_router_logits", "tree_cu_seqlens_q", "tree_segment_parents"}
Form = Literal["blocked", "flex", "dense", "segments"]

# Transformers passes a four-dimensional mask on unchanged. Without one it would read a tree as
# packed sequences, from its positions, and build a wrong [tokens, tokens] mask.
NO_MASK = torch.empty(1, 1, 0, 0, dtype=torch.bool)


class TreeLayout:
    """Which keys each token of a micro-batch sees: k <= q < end[k].

    end: int64 [tokens]. The data of a form are built once and shared by all layers. `share`: this
    rank's tokens, if several ranks compute the micro-batch together.
    """

    def __init__(
        self,
        end: NDArray[np.int64],
        device: torch.device,
        form: Form | None = None,
        share: ContextShare | None = None,
    ) -> None:
        self.end, self.device, self.share = end, device, share
        self.form = form or ("flex" if device.type == "cuda" else "blocked")
        self._masks: dict[int | None, Tensor] = {}  # by window
        self._block_masks: dict[int | None, BlockMask] = {}

    @cached_property
    def blocks(self) -> BlockPlan:
        return BlockPlan(self.end)

    def block_mask(self, window: int | None = None) -> BlockMask:
        """For FlexAttention, through a window of so many tokens."""
        if window not in self._block_masks:
            end, depth = self._end_and_depth
            self._block_masks[window] = block_mask(end, depth=depth, window=window)
        return self._block_masks[window]

    def mask(self, window: int | None = None) -> Tensor:
        """bool [tokens, tokens], through a window of so many tokens."""
        if window not in self._masks:
            self._masks[window] = visible(*self._end_and_depth, window)
        return self._masks[window]

    @cached_property
    def segment_keys(self) -> SegmentKeys:
        return SegmentKeys(*self.segments)

    @property
    def _end_and_depth(self) -> tuple[Tensor, Tensor]:
        end, depth = (torch.from_numpy(one).to(self.device) for one in (self.end, self.depth))
        return end, depth

    @cached_property
    def depth(self) -> NDArray[np.int64]:
        """Of each token, how many are before it on its path."""
        place = np.arange(len(self.end))
        num_ended = np.searchsorted(np.sort(self.end), place, side="right")  # subtrees before it
        return place - num_ended

    @cached_property
    def segments(self) -> tuple[Tensor, Tensor]:
        """The segments between forks: first tokens, int32 [segments + 1], the last one after all;
        the segment before each on its path, int64 [segments], -1 at the start of a path."""
        ends = self.end[self.end < len(self.end)]
        changes = np.flatnonzero(np.diff(self.end)) + 1
        starts = np.unique(np.concatenate([[0, len(self.end)], changes, ends]))
        above, parents = list[int](), list[int]()
        for number, start in enumerate(starts[:-1].tolist()):
            while above and self.end[starts[above[-1]]] <= start:
                above.pop()
            parents.append(above[-1] if above else -1)
            above.append(number)
        return torch.from_numpy(starts).int(), torch.tensor(parents)


def use_tree_attention(model: Any, *, is_known: bool = False) -> None:
    """Let the model's attention read tree layouts.

    Raises ConfigError for models whose attention cannot be replaced, and for attention dropout.
    `is_known`: it can be replaced, although the model does not declare it.
    """
    config, name = model.config, type(model).__name__
    if getattr(config, "attention_dropout", 0.0):
        raise ConfigError(
            f"{name}: attention_dropout = {config.attention_dropout}, expected 0 in config.json"
        )
    if not (is_known or getattr(model, "_supports_attention_backend", False)):
        raise ConfigError(
            f"{name}: its attention cannot be replaced; expected a model such as Qwen2, Qwen3 or "
            "Llama"
        )
    AttentionInterface.register(NAME, _attention)
    # A name without a function for masks would drop the mask of calls without a layout.
    AttentionMaskInterface.register(NAME, sdpa_mask)
    model.set_attn_implementation(NAME)


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    tree_layout: TreeLayout | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Transformers calls it in each layer; query, key, value: [1, heads, tokens, width]."""
    has_none = attention_mask is not None and not attention_mask.numel()  # families may slice it
    if tree_layout is None:
        if has_none:
            raise ValueError("NO_MASK requires tree_layout")
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **others
        )
        return output
    if not has_none:
        raise ValueError("tree_layout requires attention_mask = NO_MASK")
    share = tree_layout.share
    num_tokens = len(tree_layout.end) if share is None else share.num_tokens
    if query.shape[0] != 1 or query.shape[2] != num_tokens:
        raise ValueError(f"a layout of {num_tokens} tokens for {tuple(query.shape)}")
    unknown = [name for name in others if name not in _HARMLESS and others[name] is not None]
    if unknown:
        raise ConfigError(
            f"{type(module).__name__}: attention with {', '.join(sorted(unknown))} is not "
            "supported over trees"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if share is not None:
        query, key, value = share.to_heads(query, key, value)
    attended = _attend(query, key, value, tree_layout, scale, sliding_window)
    return attended if share is None else share.to_tokens(attended), None


def _attend(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scale: float, window: int | None
) -> Tensor:
    """In the form of the layout; shapes as in `blocked_attention`."""
    if window is not None and window > layout.depth.max():  # all of every path
        window = None
    if layout.form == "blocked" and window is None:
        width = max(query.shape[-1], value.shape[-1])  # the kernel has one; zeros change nothing
        wide = [pad(one, (0, width - one.shape[-1])) for one in (query, key, value)]
        attended = blocked_attention(wide[0], wide[1], wide[2], layout.blocks, scale)
        return attended[..., : value.shape[-1]].contiguous()
    if layout.form == "segments":
        return segment_attention(query, key, value, layout.segment_keys, scale, window)
    if layout.form == "flex" and query.shape[-1] >= MIN_FLEX_WIDTH:
        return flex_tree_attention(query, key, value, layout.block_mask(window), scale)
    attended = scaled_dot_product_attention(
        query, key, value, attn_mask=layout.mask(window), scale=scale, enable_gqa=True
    )
    return attended.transpose(1, 2).contiguous()
