"""Training on a rank: updates, imitation and scoring of encoded trees, for any backend."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from agentenv.base.crashes import called
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.credit import Floats, Taught
from agentenv.learners.keys import Agreement, LearnerConfig, Metrics, Score
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.saved_checkpoint import Reference
from agentenv.learners.trees.encoded_tree import ActionTokens, EncodedTree, Layout, computed
from agentenv.learners.trees.minibatch import MiniBatch, over_all, ratios
from agentenv.learners.trees.partition import MicroBatch, by_tree, pack, split_by_tree
from agentenv.learners.trees.policy import Policy

# The layout of a rank's micro-batches; loss and gradient are the same, up to rounding.
#
#     tree      every shared token once, attention in the form of the device
#     segments  the same tokens, attention segment by segment, on CPUs
#
# Ranks may choose different layouts for their trees: only the number of passes must be equal, which
# `RankBackend.passes` ensures.

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


GIB = 2**30


class Trainer:
    """Trains on a rank. `optimizer_step` counts all steps; `moved`: the weights have changed since
    they were published, so that no token belongs to the current policy."""

    def __init__(self, backend: RankBackend, algorithm: Algorithm, config: LearnerConfig) -> None:
        self.backend = backend
        self.algorithm = algorithm
        self.config = config
        self.optimizer_step = 0
        self.moved = False
        self.agreement: Agreement = "exact"  # of the engine's values, in the running update
        self.skipped_steps: list[Metrics] = []  # of the last update, as evidence
        self.values: list[list[bytes]] = []  # of the last update, by mini-batch and tree
        self.reference = Reference(backend, algorithm.reference_every)
        self.layouts = Layouts(backend.config, backend.policy, backend.device)

    def update(
        self,
        minibatches: Sequence[Sequence[EncodedTree]],
        lr_scale: float,
        agreement: Agreement = "exact",
    ) -> Metrics:
        """One optimizer step per mini-batch, with zero gradients if no group has a signal. First
        recomputes the log-probs of stale tokens, or of all if the engine's differ from the
        learner's."""
        start_wall, start_cpu = time.perf_counter(), time.process_time()
        self.agreement = agreement
        steps = []
        own = [tree for minibatch in minibatches for tree in computed(minibatch)]
        with self.layouts.update(own):
            prepared = self._prepare_all(minibatches)
            for epoch in range(self.config.num_epochs_per_batch):
                for number, minibatch in enumerate(prepared):
                    place = {"minibatch": float(number), "epoch": float(epoch)}
                    steps.append((place, self._policy_step(minibatch, lr_scale)))
        self.skipped_steps = [place | step for place, step in steps if step["num_skipped"]]
        self.values = [split_by_tree(one.trees, one.values) for one in prepared]
        metrics = over_steps([step for _, step in steps])
        metrics |= means(self.backend.gather_replicas(behavior_ratios(prepared)))
        counts = [
            [one.num_computed, one.tokens.weight[: one.num_computed].sum(), one.is_measured.sum()]
            for one in prepared
        ]
        sums = over_all(np.sum(counts, axis=0), self.backend.gather_replicas).tolist()
        names = ("num_tokens", "num_flat_tokens", "num_proximal_tokens")
        metrics |= dict(zip(names, map(float, sums), strict=True))
        return metrics | gpu_peak(self.backend) | times(start_wall, start_cpu)

    def imitate(self, sequences: Sequence[EncodedTree], lr_scale: float) -> Metrics:
        """One step on the negative log-likelihood, averaged over the weights of all tokens."""
        start_wall, start_cpu = time.perf_counter(), time.process_time()
        weight = ActionTokens(sequences).weight
        total = float(over_all(weight.sum(), self.backend.gather_replicas))
        loss_sum = 0.0
        with self.layouts.update(sequences):
            batches = self.layouts.pack(sequences)
            num_computed = self._num_computed(batches)
            for batch in self.backend.passes(batches, router=self.config.router_loss > 0):
                logprobs, _, _ = self.backend.forward(batch)
                picked = torch.from_numpy(weight[batch.index]).to(logprobs)
                loss = -(picked * logprobs).sum() / total
                self.backend.backward(self._with_router(loss, batch, num_computed))
                loss_sum += float(loss.detach())
        loss_sum = sum(self.backend.gather_replicas(loss_sum))
        metrics = {"loss": loss_sum, "num_tokens": total} | self.step(lr_scale, loss_sum)
        return metrics | gpu_peak(self.backend) | times(start_wall, start_cpu)

    def score(
        self, sequences: Sequence[EncodedTree], other: nn.Module | None = None, top_k: int = 0
    ) -> list[Score]:
        """The scores of each sequence's predicted tokens, in order; with `other`, by that
        policy."""
        parts = (by_tree(sequences, values) for values in self.figures(sequences, other, top_k))
        return [Score(*(part.tolist() for part in one)) for one in zip(*parts, strict=True)]

    @torch.no_grad()
    def figures(
        self, trees: Sequence[EncodedTree], other: nn.Module | None = None, top_k: int = 0
    ) -> list[NDArray[Any]]:
        """Log-probs, entropies (nats) and arg-max matches of all trained tokens, in the order of
        `ActionTokens`, under the backend's current weights, or by another policy; with `top_k` the
        log-probs of the likeliest ids, and these, [top_k, tokens]."""
        count = sum(tree.num_action_tokens for tree in trees)
        found: list[NDArray[Any]] = [np.zeros(count), np.zeros(count), np.zeros(count, np.bool_)]
        if top_k:
            found += np.zeros((top_k, count)), np.zeros((top_k, count), np.int64)
        batches = self.layouts.pack(trees)
        # another policy is whole on each rank: no other rank takes part in its passes
        for batch in self.backend.passes(batches) if other is None else batches:
            figures = self.backend.forward(batch, other, top_k or None)
            for array, values in zip(found, figures, strict=True):
                array[..., batch.index] = values.cpu().numpy().T
        return found

    def _prepare_all(self, minibatches: Sequence[Sequence[EncodedTree]]) -> list[MiniBatch]:
        """Before the first step: log-probs of the current weights, and of the reference if the
        algorithm has one."""
        references: list[Floats | None] = [None] * len(minibatches)
        if self.algorithm.needs_reference:
            self.reference.begin_update()
            with self.reference.in_place():
                references = [self.figures(trees)[0] for trees in minibatches]
        return [self._prepare(*pair) for pair in zip(minibatches, references, strict=True)]

    def _prepare(self, trees: Sequence[EncodedTree], reference: Floats | None) -> MiniBatch:
        tokens = ActionTokens(trees)
        proximal, entropies = tokens.behavior.copy(), tokens.entropies.copy()
        flags = [self._needs_proximal(tree) for tree in trees]
        needed = [tree for tree, flag in zip(trees, flags, strict=True) if flag]
        counts = [tree.num_action_tokens for tree in trees]
        is_needed = np.repeat(flags, counts).astype(np.bool_)
        if any(self.backend.gather_replicas(bool(needed))):
            proximal[is_needed], entropies[is_needed], _ = self.figures(needed)
        gather, rest = self.backend.gather_replicas, (reference, self.algorithm)
        return MiniBatch(trees, tokens, proximal, entropies, *rest, gather, is_needed)

    def _needs_proximal(self, tree: EncodedTree) -> bool:
        """Whether log-probs and entropies under the current weights are needed; a counted tree
        needs only entropies."""
        algorithm = self.algorithm
        has_entropies = bool(tree.entropies) and self.agreement == "exact"
        return (
            self.moved
            or self.config.proximal == "always"
            or self.agreement == "unknown"
            or tree.max_staleness > 0
            or algorithm.token_mask is not None  # a mask would see only ratios of 1
            or algorithm.sequence_mask is not None
            or (algorithm.needs_entropies and not has_entropies)
        ) and (algorithm.needs_entropies or not tree.is_counted)

    def _policy_step(self, minibatch: MiniBatch, lr_scale: float) -> Metrics:
        terms = None
        if self.algorithm.clips_sequences:
            current = minibatch.proximal.copy()
            current[: minibatch.num_computed] = self.figures(computed(minibatch.trees))[0]
            terms = minibatch.terms(self.algorithm, current, self.backend.gather_replicas)
        parts: list[Metrics] = [{"loss": 0.0, "num_computed_tokens": 0.0}]
        batches = self.layouts.pack(computed(minibatch.trees))
        num_computed = self._num_computed(batches)
        rules, tokens, router = self.algorithm, minibatch.tokens, self.config.router_loss > 0
        if (width := rules.teach_top_k) and tokens.taught is None:
            tokens.taught = Taught.unknown(len(tokens.behavior), width)
        used = {"entropies": rules.entropy_bonus > 0, "router": router}
        for batch in self.backend.passes(batches, width, **used):
            others, known = None, tokens.taught
            if known is not None:
                others = torch.from_numpy(known.ids[batch.index]).to(self.backend.device)
            logprobs, entropies, _, *taught = self.backend.forward(batch, others=others)
            minibatch.record(batch.index, logprobs, entropies)
            loss_batch = minibatch.loss_batch(batch.index, logprobs, terms, *taught[:1])
            loss, metrics = called(self.algorithm.loss, loss_batch, logprobs, entropies)
            self.backend.backward(self._with_router(loss, batch, num_computed))
            counts = {"num_computed_tokens": float(len(batch.token_ids))}
            if batch.layout == "segments":
                counts["num_segments_tokens"] = float(len(batch.token_ids))
            parts.append(counts | {name: float(value) for name, value in metrics.items()})
        whole = added(self.backend.gather_replicas(added(parts)))
        return minibatch.metrics | whole | self.step(lr_scale, whole["loss"])

    def _num_computed(self, batches: Sequence[MicroBatch]) -> float:
        """Tokens that all ranks compute, if the router's loss is an average over them."""
        if not self.config.router_loss:
            return 0.0
        return float(sum(self.backend.gather(sum(len(batch.token_ids) for batch in batches))))

    def _with_router(self, loss: Tensor, batch: MicroBatch, num_computed: float) -> Tensor:
        """The loss plus the micro-batch's load-balancing loss, weighted by its share of the
        computed tokens."""
        found = self.backend.policy.router_loss
        if not self.config.router_loss or found is None:
            return loss
        return loss + self.config.router_loss * len(batch.token_ids) / num_computed * found

    def step(self, lr_scale: float, loss: float) -> Metrics:
        """Step unless the loss or the gradient is not finite; a clamp can hide a non-finite value
        in one of them."""
        grad_norm = math.nan
        if math.isfinite(loss):
            grad_norm = self.backend.step(lr_scale)
        else:
            self.backend.skip()
        skipped = not math.isfinite(grad_norm)
        self.optimizer_step += not skipped
        self.moved = self.moved or not skipped
        return {"grad_norm": grad_norm, "num_steps": 1.0 - skipped, "num_skipped": float(skipped)}


def times(start_wall: float, start_cpu: float) -> Metrics:
    """Seconds since the start of a command: wall time, and CPU time of this process."""
    return {"wall_s": time.perf_counter() - start_wall, "cpu_s": time.process_time() - start_cpu}


def gpu_peak(backend: RankBackend) -> Metrics:
    """Peak GiB of the fullest rank's GPU since the last call: of tensors, and of torch's allocator;
    CUDA's context comes on top. Empty on the CPU."""
    if backend.device.type != "cuda":
        return {}
    device = backend.device
    peaks = torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    allocated, reserved = (max(one) / GIB for one in zip(*backend.gather(peaks), strict=True))
    return {"gpu_allocated_gib": allocated, "gpu_reserved_gib": reserved}


def over_steps(steps: Sequence[Metrics]) -> Metrics:
    """Counts add up, maxima stay maxima, the rest is averaged over the steps."""

    def reduce(name: str) -> float:
        values = [step[name] for step in steps if name in step]
        if name.startswith("num_"):
            return sum(values)
        return max(values) if name.endswith("_max") else sum(values) / len(values)

    names = dict.fromkeys(name for step in steps for name in step)
    return {name: reduce(name) for name in names}


def added(parts: Sequence[Metrics]) -> Metrics:
    """Metrics over micro-batches, or over ranks: sums, and maxima of those that end in _max. A part
    without tokens has none."""
    found: Metrics = {}
    for part in parts:
        for name, value in part.items():
            if name.endswith("_max"):
                found[name] = max(found.get(name, -math.inf), value)
            else:
                found[name] = found.get(name, 0.0) + value
    return found


def means(parts: Sequence[dict[str, tuple[float, int]]]) -> Metrics:
    """Means from the sums and counts of all ranks."""
    names = sorted({name for part in parts for name in part})
    found = {name: np.sum([part[name] for part in parts if name in part], axis=0) for name in names}
    return {name: float(total / count) for name, (total, count) in found.items()}


def behavior_ratios(minibatches: Sequence[MiniBatch]) -> dict[str, tuple[float, int]]:
    """Sum of proximal / behavior over the trained tokens whose proximal log-prob was computed, and
    their number, by staleness in published updates."""
    staleness = np.concatenate([one.tokens.staleness[one.is_measured] for one in minibatches])
    ratio = np.concatenate(
        [ratios(one.proximal, one.tokens.behavior)[one.is_measured] for one in minibatches]
    )
    of_age = {age: ratio[staleness == age] for age in np.unique(staleness).tolist()}
    return {
        f"behaviour_ratio/staleness_{age}": (float(found.sum()), len(found))
        for age, found in of_age.items()
    }
