"""The rows of a step: which request is where in the batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from agentenv.engines.embedded_cache import SlotCache
from agentenv.engines.embedded_model import Batch, DecodeGroup, Prefill
from agentenv.engines.embedded_request import Request
from agentenv.engines.embedded_sampling import Sampler


class Rows:
    """The decoding rows pool by pool, then the prompts of `fresh` in order. Kept while the same
    requests go on in the same rows.

    `slots` are those of the decoding rows, `inputs` their tokens, which the next step computes;
    `num_steps` is how many steps there is room for until a slot is full.
    """

    def __init__(
        self,
        cache: SlotCache,
        running: Mapping[int, Request],
        fresh: Sequence[Request],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        new_slots = {request.slot for request in fresh}
        groups: list[DecodeGroup] = []
        slots: list[int] = []
        spare: list[int] = []  # steps until a slot is full
        for pool in cache.pools.values():
            rows = [slot for slot in pool.running() if slot not in new_slots]
            if rows:
                lengths = cache.lengths[rows].tolist()
                groups.append(DecodeGroup(pool, len(slots), lengths, device))
                spare.append(pool.capacity - max(lengths))
                slots += rows
        self.slots = np.array(slots, dtype=np.int64)
        positions = cache.lengths[self.slots].tolist()
        self.requests = [running[slot] for slot in slots]
        token_ids = [request.token_ids[-1] for request in self.requests]
        self.inputs = token_ids[:]
        prefills: list[Prefill] = []
        for request in fresh:
            pool, row = cache.location(request.slot)
            past, start = request.num_cached, len(token_ids)
            token_ids += request.context[past:].tolist()
            positions += range(past, len(request.context))
            prefills.append(Prefill(pool, row, past, start, len(token_ids), device))
            spare.append(pool.capacity - len(request.context) + 1)
        self.requests += fresh
        self.num_steps = min(spare)
        order = self.requests
        self.sampler = Sampler(
            [request.sampling for request in order],
            device,
            vocab_size,
            lambda row: [*order[row].prompt.tolist(), *order[row].token_ids],
        )
        tokens = torch.tensor(token_ids, device=device)
        self.batch = Batch(tokens, torch.tensor(positions, device=device), groups, prefills)

    def advance(self, sampled: Tensor, token_ids: list[int]) -> None:
        """Go on with the tokens just sampled, given twice; only without prompts."""
        self.batch.advance(sampled)
        self.inputs = token_ids
