"""Attention of a packed tree by segments: each run of tokens between forks against its path.

A segment and the keys of its path form a sequence whose last tokens are the queries, as in TRL's
TreeRow. The keys are gathered, and each segment is a call.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


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
