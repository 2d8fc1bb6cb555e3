"""One encoded dialogue: token ids, and which of them are learned."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from learners.encoding import EncodedTree, encode_sequence


class Example(NamedTuple):
    """int32 and bool, [tokens]; `mask` is True on the tokens that are learned."""

    token_ids: NDArray[np.int32]
    mask: NDArray[np.bool_]

    @classmethod
    def of(cls, token_ids: ArrayLike, mask: ArrayLike) -> Example:
        return cls(np.asarray(token_ids, np.int32), np.asarray(mask, np.bool_))

    def cut(self, max_length: int) -> Example:
        """Its first tokens."""
        return Example(self.token_ids[:max_length], self.mask[:max_length])

    def encoded(self) -> EncodedTree:
        """As the learner takes it."""
        return encode_sequence(self.token_ids.tolist(), self.mask.tolist())

    def equals(self, other: Example) -> bool:
        return np.array_equal(self.token_ids, other.token_ids) and np.array_equal(
            self.mask, other.mask
        )
