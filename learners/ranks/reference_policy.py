"""The reference policy of a KL term."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.checkpoint import REFERENCE, LocalWeights
from agentenv.learners.ranks.saved_checkpoint import Checkpoint, changing_weights, local_weights


class Reference:
    """The reference policy of a KL term: a copy from its first use, so that it is the initial
    policy of RL, renewed every `every` updates (0: never).

    There is no second model. A rank keeps a copy of its trained weights: all of them at ZeRO stages
    0 to 2, its part at stage 3, only the adapter with LoRA. Its weights are exchanged with the
    policy's while the reference scores.
    """

    def __init__(self, backend: RankBackend, every: int) -> None:
        self.backend = backend
        self.every = every
        self.num_updates = 0
        self.weights: LocalWeights | None = None

    def begin_update(self) -> None:
        """Call this at the start of an update, before its first step."""
        due = self.every and self.num_updates % self.every == 0
        if self.weights is None or due:
            self.weights = {
                name: (start, elements.clone())
                for name, start, elements in local_weights(self.backend)
            }
        self.num_updates += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within the block, the backend computes with the reference's weights; steps are not
        allowed."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        assert self.weights is not None
        with changing_weights(self.backend):
            for name, _, elements in local_weights(self.backend):
                kept = self.weights[name][1]
                other = elements.clone()
                elements.copy_(kept)
                kept.copy_(other)

    def load(self, saved: Checkpoint) -> None:
        """Restore the reference from a checkpoint; checkpoints before its first use have none."""
        self.num_updates, self.weights = saved.meta.reference_updates, None
        if self.num_updates:
            self.weights = {
                name: (start, saved.read(name, REFERENCE, start, elements.numel()).to(elements))
                for name, start, elements in local_weights(self.backend)
            }
