"""Context parallelism: groups of ranks that share each micro-batch.

The N members of a group have the same trees and pack them into the same micro-batches, of N times
the token budget. A member computes one N-th of the tokens; inside attention it has all tokens, but
one N-th of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509). So attention in any
form operates on whole trees:

    [1, heads, tokens / N, width]   -- all to all -->   [1, heads / N, tokens, width]

Every member gets the log-probs and entropies of all trained tokens and computes the whole loss,
whose gradient flows back through its own tokens only. So the gradients of all ranks add up to that
of a single rank.

DeepSpeed 0.19 has two implementations. `DistributedAttention` needs a key head for every rank and
`deepspeed.comm`, which plain torch does not start; `UlyssesSPAttentionHF` needs equal lengths of
all micro-batches and its own mask.
"""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from agentenv.learners.keys import check_heads
from agentenv.learners.trees.partition import MicroBatch


class ContextGroup(NamedTuple):
    """`rank` is the place of this member among `size`."""

    rank: int
    size: int
    process_group: dist.ProcessGroup


def join_context_group(size: int, timeout_s: float) -> ContextGroup | None:
    """The group of this rank, of neighboring ranks; None for a size of 1. Collective over all
    ranks."""
    if size == 1:
        return None
    timeout = timedelta(seconds=timeout_s)
    group, _ = dist.new_subgroups(size, timeout=timeout)  # type: ignore[no-untyped-call]
    return ContextGroup(dist.get_rank() % size, size, group)


def padded(batch: MicroBatch, size: int) -> MicroBatch:
    """The micro-batch with untrained tokens appended as a separate path, so that `size` divides the
    number of tokens."""
    total = len(batch.end)
    more = -total % size
    if not more:
        return batch
    zeros = np.zeros(more, np.int64)
    return replace(
        batch,
        token_ids=np.append(batch.token_ids, zeros),
        position_ids=np.append(batch.position_ids, np.arange(more)),
        end=np.append(batch.end, zeros + total + more),
    )


class ContextShare:
    """A member's share of a padded micro-batch: the tokens in `span`, and the trained
    tokens, of `num_targets`, whose predecessor is among them: `own`, int64."""

    def __init__(self, group: ContextGroup, batch: MicroBatch) -> None:
        self.group = group
        self.num_tokens = len(batch.end) // group.size
        first = group.rank * self.num_tokens
        self.span = slice(first, first + self.num_tokens)
        self.own = np.flatnonzero((batch.source >= first) & (batch.source < self.span.stop))
        self.num_targets = len(batch.targets)

    def of(self, batch: MicroBatch) -> MicroBatch:
        """The member's tokens of the micro-batch, with `source` relative to the first one; `end`
        and `index` are unchanged."""
        return replace(
            batch,
            token_ids=batch.token_ids[self.span],
            position_ids=batch.position_ids[self.span],
            source=batch.source[self.own] - self.span.start,
            targets=batch.targets[self.own],
            temperature=None if batch.temperature is None else batch.temperature[self.own],
            kept=None if batch.kept is None else batch.kept[self.own],
        )

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """Each [1, heads, own tokens, width] -> [1, heads / N, tokens, width].

        If N does not divide the number of key heads, they are repeated, so that every member has
        those of its queries.
        """
        size, num_keys = self.group.size, key.shape[1]
        check_heads(query.shape[1], size)
        times = math.lcm(num_keys, size) // num_keys
        if times > 1:
            key, value = (one.repeat_interleave(times, 1) for one in (key, value))
        parts = [one.reshape(size, -1) for one in (query, key, value)]
        received = _exchanged(torch.cat(parts, 1), self.group)
        split = torch.split(received, [part.shape[1] for part in parts], 1)
        return tuple(
            part.view(size, -1, self.num_tokens, one.shape[-1]).transpose(0, 1).flatten(1, 2)[None]
            for part, one in zip(split, (query, key, value), strict=True)
        )

    def to_tokens(self, attended: Tensor) -> Tensor:
        """[1, tokens, heads / N, width] -> [1, own tokens, heads, width]."""
        size, width = self.group.size, attended.shape[-1]
        received = _exchanged(attended.reshape(size, -1), self.group)
        by_head = received.view(size, self.num_tokens, -1, width)
        return by_head.transpose(0, 1).flatten(1, 2)[None]

    def joined(self, *figures: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs, entropies and matches: of the member's trained tokens -> of all."""
        joined: tuple[Tensor, Tensor, Tensor] = _Joined.apply(*figures, self)  # type: ignore[no-untyped-call]
        return joined


def _exchanged(parts: Tensor, group: ContextGroup) -> Tensor:
    """Row i goes to member i; row j of the result comes from member j."""
    received: Tensor = _Exchange.apply(parts.contiguous(), group)  # type: ignore[no-untyped-call]
    return received


class _Exchange(torch.autograd.Function):
    """See `_exchanged`; it is its own transpose."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: ContextGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group.process_group)
        return received

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        returned = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(returned, grad.contiguous(), group=ctx.group.process_group)
        return returned, None


class _Joined(torch.autograd.Function):
    """See `Share.joined`."""

    @staticmethod
    def forward(
        ctx: Any, logprobs: Tensor, entropy: Tensor, matches: Tensor, share: ContextShare
    ) -> tuple[Tensor, Tensor, Tensor]:
        own = torch.from_numpy(share.own).to(logprobs.device)
        every = logprobs.new_zeros(3, share.num_targets)
        every[:, own] = torch.stack([logprobs, entropy, matches.to(logprobs)])
        dist.all_reduce(every, group=share.group.process_group)
        found = every[2] > 0.5
        ctx.own = own
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found)
        return every[0], every[1], found

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        # Never None for both: the backward passes of the layers' exchanges need every member.
        if grad is None and grad_entropy is not None:
            grad = torch.zeros_like(grad_entropy)
        own = (None if one is None else one[ctx.own] for one in (grad, grad_entropy))
        return *own, None, None
