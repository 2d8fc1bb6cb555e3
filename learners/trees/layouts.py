"""The layout of a rank's micro-batches: the fastest one, as measured in the first updates.

    tree      every shared token once, attention in the form of the device
    (`agentenv.learners.trees.attention`) segments  the same tokens, attention by
    `agentenv.learners.trees.segments` padded    one row per trajectory
    (`agentenv.learners.trees.partition.pack`)

Loss and gradient are the same, up to rounding. The time of a micro-batch in layout L is fitted, by
non-negative least squares of the relative error, as

    seconds  =  a[L]  +  b tokens  +  c[L] pairs

with a the time to start kernels, b the time per token outside attention, equal for all layouts, and
c the time per pair of a token and a visible one. Each update uses the layout with the least sum. On
a CPU only the length of the paths decides between trees and segments, so that equal runs are
bitwise equal.

Each rank fits the times of all ranks, so that all have equal coefficients. Ranks may choose
different layouts for their trees: only the number of passes must be equal, which
`RankBackend.passes` ensures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from agentenv.base.errors import ConfigError
from agentenv.learners.learner import LayoutSample, LearnerConfig, Trial
from agentenv.learners.trees.batch import EncodedTree, Layout
from agentenv.learners.trees.partition import MicroBatch, pack
from agentenv.learners.trees.policy import Policy
from agentenv.learners.trees.segments import is_right_on

WARM_UP, TIMED = 2, 3  # updates in each layout; the first ones compile kernels
SHORT_PATH = 256  # tokens; for longer paths trees are faster on CPUs, without measurements
MOST_SAMPLES = 32  # per update and rank, in a checkpoint
MOST_TOKENS = 3.0  # limit of the tokens in rows relative to those in trees
MOST_KEYS = 4.0  # limit of the gathered keys of segments relative to tokens, for memory

Gather = Callable[[list[LayoutSample]], list[list[LayoutSample]]]


class Layouts:
    """Packs trees into micro-batches. `trials`, by kind of update and device, are part of a
    checkpoint, so that a resumed run keeps its layout. Raises ConfigError for a layout that the
    device does not support."""

    def __init__(self, config: LearnerConfig, policy: Policy, device: torch.device) -> None:
        """`config`: resolved for the device."""
        self.device, self.max_tokens = device, config.replica_tokens
        self.offered = offered(config, policy, device)
        self.trials: dict[str, Trial] = {}
        layout = config.layout
        self.is_counted = layout == "auto" and device.type != "cuda" and "segments" in self.offered
        if layout == "auto":
            layout = "tree"
        self.is_measured = layout == "measured" and len(self.offered) > 1
        self.is_decided = False  # the update that runs comes after the trials
        self.now: Layout = "tree" if layout == "measured" else layout
        if self.now not in self.offered:
            raise ConfigError(
                f"learner.layout = {layout}: supported here: {' or '.join(self.offered)}; segments "
                "on a GPU need learner.dtype = bfloat16 and torch 2.11 or newer"
            )
        self._samples: list[LayoutSample] | None = None  # of an update whose times count

    @contextmanager
    def update(
        self, kind: str, trees: Sequence[EncodedTree], gather: Gather = lambda own: [own]
    ) -> Iterator[None]:
        """Around an update of some kind on the rank's trees. All its passes have one layout, so
        that log-probs before and in it differ only by the weights. Passes outside of updates use
        trees, unless the layout is given. `gather`: see `RankBackend.gather`."""
        if not self.is_measured:
            before = self.now
            if self.is_counted and has_short_paths(self.pack(trees)):
                self.now = "segments"
            try:
                yield
            finally:
                self.now = before
            return
        on = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        trial = self.trials.setdefault(f"{kind} on {on}", Trial())
        options = dict(self._options(trees))
        turn, place = divmod(trial.num_updates, len(self.offered))
        self.is_decided = turn >= WARM_UP + TIMED
        if self.is_decided:
            costs = Costs(trial.samples)
            self.now = min(options, key=lambda layout: costs.of(options[layout]))
        elif self.offered[place] in options:
            self.now = self.offered[place]
        self._samples = [] if turn >= WARM_UP and not self.is_decided else None
        try:
            yield
            if self._samples is not None:
                own = self._samples[:: 1 + len(self._samples) // MOST_SAMPLES]
                trial.samples += [one for part in gather(own) for one in part]
            trial.num_updates += 1
        finally:
            self.now, self._samples = "tree", None

    def _options(
        self, trees: Sequence[EncodedTree]
    ) -> Iterator[tuple[Layout, Sequence[MicroBatch]]]:
        """The micro-batches of the layouts within the limits."""
        as_trees = self.pack(trees, "tree")
        num_tokens = sum(len(one.end) for one in as_trees)
        yield "tree", as_trees
        if "segments" in self.offered:
            found = [replace(one, layout="segments") for one in as_trees]
            if sum(one.paths.sum() for one in found) <= MOST_KEYS * num_tokens:
                yield "segments", found
        if "padded" in self.offered:
            found = self.pack(trees, "padded")
            if sum(len(one.end) for one in found) <= MOST_TOKENS * num_tokens:
                yield "padded", found

    def pack(self, trees: Sequence[EncodedTree], layout: Layout | None = None) -> list[MicroBatch]:
        """Micro-batches within a replica's token budget; by default in the current layout."""
        return pack(trees, self.max_tokens, layout or self.now)

    def timed(self, batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yields the batches; in a timed update, records the seconds of each one's passes."""
        if self._samples is None:
            yield from batches
            return
        for batch in batches:
            start = self._clock()
            yield batch
            seconds = self._clock() - start
            self._samples.append(LayoutSample(batch.layout, len(batch.end), batch.pairs, seconds))

    def _clock(self) -> float:
        if self.device.type != "cuda":
            return time.process_time()  # independent of other processes
        torch.cuda.synchronize(self.device)
        return time.perf_counter()


def offered(config: LearnerConfig, policy: Policy, device: torch.device) -> tuple[Layout, ...]:
    """The layouts that model and device support."""
    if policy.masks is not None or config.context_parallel > 1:
        return ("tree",)
    found: list[Layout] = ["tree"]
    if device.type != "cuda" or (config.dtype == "bfloat16" and is_right_on(device)):
        found.append("segments")
    if not config.router_loss:  # an average over the computed tokens
        found.append("padded")
    return tuple(found)


def has_short_paths(batches: Sequence[MicroBatch]) -> bool:
    """Whether paths are, on average over segments, short enough that segments are faster on a
    CPU."""
    paths = [one.paths for one in batches]
    return sum(map(np.sum, paths)) < SHORT_PATH * sum(map(len, paths))


class Costs:
    """The fitted coefficients of samples."""

    def __init__(self, samples: Sequence[LayoutSample]) -> None:
        from scipy.optimize import nnls  # slow to import

        self.layouts = sorted({one.layout for one in samples})
        if not samples:
            return
        rows = np.array([self._row(*one[:3]) for one in samples])
        rows /= np.array([max(one.seconds, 1e-9) for one in samples])[:, None]
        scale = np.maximum(rows.max(0), np.finfo(float).tiny)
        self.coefficients = nnls(rows / scale, np.ones(len(rows)))[0] / scale

    def _row(self, layout: Layout, tokens: int, pairs: int) -> list[float]:
        here = [float(layout == one) for one in self.layouts]
        return [*here, *(pairs * one for one in here), tokens]

    def of(self, batches: Sequence[MicroBatch]) -> float:
        """Seconds of these micro-batches; infinite in a layout without samples."""
        if any(one.layout not in self.layouts for one in batches):
            return np.inf
        rows = [self._row(one.layout, len(one.end), one.pairs) for one in batches]
        return float(np.sum(np.array(rows) @ self.coefficients)) if rows else 0.0
