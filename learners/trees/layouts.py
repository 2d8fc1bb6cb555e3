"""The layout of a rank's micro-batches; loss and gradient are the same, up to rounding.

    tree      every shared token once, attention in the form of the device
              (`agentenv.learners.trees.attention`)
    segments  the same tokens, attention by `agentenv.learners.trees.segments`, on CPUs

Ranks may choose different layouts for their trees: only the number of passes must be equal, which
`RankBackend.passes` ensures.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from agentenv.learners.keys import LearnerConfig
from agentenv.learners.trees.batch import EncodedTree, Layout
from agentenv.learners.trees.partition import MicroBatch, pack
from agentenv.learners.trees.policy import Policy

SHORT_PATH = 256  # tokens; for longer paths trees are faster on CPUs


class Layouts:
    """Packs trees into micro-batches."""

    def __init__(self, config: LearnerConfig, policy: Policy, device: torch.device) -> None:
        self.max_tokens = config.replica_tokens
        self.now: Layout = "tree"
        is_cpu, has_recurrence = device.type != "cuda", policy.masks is not None
        supports_segments = is_cpu and not has_recurrence and config.context_parallel == 1
        self._follows_lengths = config.layout == "auto" and supports_segments

    @contextmanager
    def update(self, trees: Sequence[EncodedTree]) -> Iterator[None]:
        """Around an update on the rank's trees. All its passes have one layout, so that log-probs
        before and in it differ only by the weights. Passes outside of updates use trees."""
        if self._follows_lengths and has_short_paths(self.pack(trees)):
            self.now = "segments"
        try:
            yield
        finally:
            self.now = "tree"

    def pack(self, trees: Sequence[EncodedTree]) -> list[MicroBatch]:
        """Micro-batches within a replica's token budget, in the current layout."""
        return pack(trees, self.max_tokens, self.now)


def has_short_paths(batches: Sequence[MicroBatch]) -> bool:
    """Whether paths are, on average over segments, short enough that segments are faster on a
    CPU."""
    paths = [one.paths for one in batches]
    return sum(map(np.sum, paths)) < SHORT_PATH * sum(map(len, paths))
