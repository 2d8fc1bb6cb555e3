"""Attention of a packed tree by segments: each run of tokens between forks against its path.

A segment and the keys of its path form a sequence whose last tokens are the queries, as in TRL's
TreeRow. The keys are gathered, and one varlen kernel computes all segments; the CPU has no such
kernel, so that each segment is a call.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class SegmentKeys(NamedTuple):
    """The keys of the paths of all segments, concatenated: `tokens`, int64 [keys], are their
    indices; `num_queries` and `num_keys` of each segment; `ends`, int32 [segments + 1] each, the
    offsets of its queries and its keys."""

    tokens: Tensor
    num_queries: list[int]
    num_keys: list[int]
    ends: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, starts: Tensor, parents: Tensor, device: torch.device) -> SegmentKeys:
        """Of `TreeLayout.segments`."""
        paths = list[Tensor]()
        sizes = starts.diff().tolist()
        for start, size, parent in zip(starts.tolist(), sizes, parents.tolist(), strict=False):
            own = torch.arange(start, start + size)
            paths.append(own if parent < 0 else torch.cat([paths[parent], own]))
        num_keys = [len(path) for path in paths]
        ends = torch.tensor([0, *num_keys]).cumsum(0).int()
        return cls(
            torch.cat(paths).to(device), sizes, num_keys, (starts.to(device), ends.to(device))
        )


@cache
def varlen_kernel() -> tuple[Any, bool] | None:
    """PyTorch's varlen kernel, and whether it supports fewer key heads; None if it is missing or
    cannot align queries with the last keys."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    return (varlen_attn, "enable_gqa" in known) if "window_size" in known else None


def fits(query: Tensor, value: Tensor) -> bool:
    """Whether the device's kernel supports the width of these heads."""
    width = query.shape[-1]
    return not query.is_cuda or (width == value.shape[-1] and width % 8 == 0 and width <= 256)


def segment_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: SegmentKeys,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """softmax(scale q k^T) v over the visible pairs, each query through the last `window` tokens of
    its path; shapes as in `blocked_attention`. On a GPU in half precision only."""
    keys, values = (one.index_select(2, segments.tokens) for one in (key, value))
    if query.is_cuda:
        return _at_once(query, keys, values, segments, scale, window)
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


def _at_once(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    segments: SegmentKeys,
    scale: float,
    window: int | None,
) -> Tensor:
    kernel = varlen_kernel()
    assert kernel is not None  # `agentenv.learners.trees.layouts` refuses the layout without it
    attend, has_groups = kernel
    copies = 1 if has_groups else query.shape[1] // keys.shape[1]
    by_token = (
        one[0].repeat_interleave(copies, 0) if copies > 1 else one[0] for one in (keys, values)
    )
    attended: Tensor = attend(
        query[0].transpose(0, 1),
        *(one.transpose(0, 1) for one in by_token),
        *segments.ends,
        max(segments.num_queries),
        max(segments.num_keys),
        scale=scale,
        window_size=(-1 if window is None else window - 1, 0),  # aligned at the last key
        **({"enable_gqa": True} if has_groups else {}),
    )
    return attended[None]
