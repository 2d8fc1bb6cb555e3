"""The reference policy of a KL term: weights that the policy had once, kept when one is asked for.

There is no second model. A rank keeps what it stores of the trained weights: all of them at ZeRO
stages 0 to 2, its part at stage 3, only the adapter with LoRA. While the reference scores, they
are exchanged with the policy's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from learners.fragments import REFERENCE, Fragment, Reader, changing, held


class Reference:
    """Kept from the first use on, so that it is the policy that RL starts from, and renewed every
    `every` updates (0: never)."""

    def __init__(self, backend: Any, every: int) -> None:
        self.backend = backend
        self.every = every
        self.num_updates = 0
        self.weights: dict[str, tuple[int, Tensor]] | None = None  # first element, flat elements

    def begin_update(self) -> None:
        """To be called while the policy has the weights at the start of the update."""
        due = self.every and self.num_updates % self.every == 0
        if self.weights is None or due:
            self.weights = {
                name: (start, elements.clone()) for name, start, elements in held(self.backend)
            }
        self.num_updates += 1

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The backend computes with the reference's weights; no step may be taken inside."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        assert self.weights is not None
        with changing(self.backend):
            for name, _, elements in held(self.backend):
                kept = self.weights[name][1]
                other = elements.clone()
                elements.copy_(kept)
                kept.copy_(other)

    def piece(self, fragment: Fragment) -> Tensor:
        """The reference's elements of a fragment that this rank holds."""
        assert self.weights is not None
        start, elements = self.weights[fragment.name]
        return elements[fragment.start - start :][: fragment.size]

    def load(self, num_updates: int, read: Reader) -> None:
        """Go on from a checkpoint, before whose first use there is no reference."""
        self.num_updates, self.weights = num_updates, None
        if num_updates:
            self.weights = {
                name: (start, read(name, REFERENCE, start, elements.numel()).to(elements))
                for name, start, elements in held(self.backend)
            }
