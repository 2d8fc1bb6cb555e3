"""What a rank does with encoded trees: updates, imitation and scoring on some backend."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from agentenv.errors import DataError
from learners.algorithm import Algorithm
from learners.batch import ActionTokens, Floats, MicroBatch, pack
from learners.encoding import EncodedTree
from learners.learner import LearnerConfig, Metrics, Score
from learners.losses import LossBatch, entropy_statistics
from learners.policy import Policy


class Backend(Protocol):
    """Runs the policy and steps its optimizer."""

    policy: Policy
    device: torch.device

    def forward(
        self, batch: MicroBatch, *, entropies: bool = False, matches: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `Policy.forward`."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients."""
        ...

    def step(self, lr_scale: float) -> float:
        """Clip and step, and clear the gradients. Returns the norm before clipping; a norm that
        is not finite means that the step was skipped."""
        ...

    def skip(self) -> None:
        """Clear the gradients without a step."""
        ...


class Trainer:
    """Counts `optimizer_step` (all steps taken) and knows whether the weights have `moved`
    since they were published; if so, no token is of the current policy any more."""

    def __init__(self, backend: Backend, algorithm: Algorithm, config: LearnerConfig) -> None:
        self.backend = backend
        self.algorithm = algorithm
        self.config = config
        self.optimizer_step = 0
        self.moved = False
        self._pair_cost = backend.policy.pair_cost()

    def update(self, minibatches: Sequence[Sequence[EncodedTree]], lr_scale: float) -> Metrics:
        """One optimizer step per mini-batch; log-probs of stale tokens are recomputed before."""
        start_wall, start_cpu = time.perf_counter(), time.process_time()
        prepared = [self._prepare(trees) for trees in minibatches]
        steps = []
        for _ in range(self.config.num_epochs_per_batch):
            steps += [self._policy_step(*parts, lr_scale) for parts in prepared]
        tokens = [action_tokens for _, action_tokens, _, _ in prepared]
        metrics = _over_steps(steps)
        metrics |= _behaviour_ratios(tokens, [proximal for _, _, proximal, _ in prepared])
        metrics["num_tokens"] = float(sum(len(part.weight) for part in tokens))
        metrics["num_flat_tokens"] = float(sum(part.weight.sum() for part in tokens))
        return metrics | _times(start_wall, start_cpu)

    def imitate(self, sequences: Sequence[EncodedTree], lr_scale: float) -> Metrics:
        """One step on the negative log-likelihood, averaged over the weights of all tokens."""
        start_wall, start_cpu = time.perf_counter(), time.process_time()
        weight = ActionTokens.of(sequences).weight
        total = float(weight.sum())
        loss_sum = 0.0
        for batch in self._pack(sequences):
            logprobs, _, _ = self.backend.forward(batch)
            loss = -(self._tensor(weight[batch.index], logprobs) * logprobs).sum() / total
            self.backend.backward(loss)
            loss_sum += float(loss.detach())
        metrics = {"loss": loss_sum, "num_tokens": total} | self._step(lr_scale, loss_sum)
        return metrics | _times(start_wall, start_cpu)

    @torch.no_grad()
    def score(self, sequences: Sequence[EncodedTree]) -> list[Score]:
        """Figures of each sequence's predicted tokens, in their order."""
        counts = [sequence.num_action_tokens for sequence in sequences]
        logprobs, entropies = np.zeros((2, sum(counts)))
        matches = np.zeros(sum(counts), np.bool_)
        for batch in self._pack(sequences):
            outputs = self.backend.forward(batch, entropies=True, matches=True)
            for array, values in zip((logprobs, entropies, matches), outputs, strict=True):
                array[batch.index] = values.cpu().numpy()
        cuts = np.cumsum(counts)[:-1]
        return [
            Score(*(part.tolist() for part in parts))
            for parts in zip(
                np.split(logprobs, cuts),
                np.split(entropies, cuts),
                np.split(matches, cuts),
                strict=True,
            )
        ]

    def _pack(self, trees: Sequence[EncodedTree]) -> list[MicroBatch]:
        return pack(trees, self.config.max_tokens_per_microbatch, self._pair_cost)

    def _tensor(self, values: Floats, like: Tensor) -> Tensor:
        return torch.from_numpy(values).to(like)

    @torch.no_grad()
    def _prepare(
        self, trees: Sequence[EncodedTree]
    ) -> tuple[Sequence[EncodedTree], ActionTokens, Floats, Floats]:
        """Trees, their tokens, proximal log-probs, and entropies of the old policy."""
        tokens = ActionTokens.of(trees)
        proximal, entropies = tokens.behaviour.copy(), tokens.entropies.copy()
        needed = [tree for tree in trees if self._needs_proximal(tree)]
        if needed:
            is_needed = np.repeat(
                [self._needs_proximal(tree) for tree in trees],
                [tree.num_action_tokens for tree in trees],
            )
            places = np.flatnonzero(is_needed)
            for batch in self._pack(needed):
                logprobs, exact, _ = self.backend.forward(batch, entropies=True)
                proximal[places[batch.index]] = logprobs.cpu().numpy()
                entropies[places[batch.index]] = exact.cpu().numpy()
        if self.algorithm.needs_entropies and np.isnan(entropies).any():
            raise DataError("the algorithm needs entropies and the engine gave none")
        return trees, tokens, proximal, entropies

    def _needs_proximal(self, tree: EncodedTree) -> bool:
        return (
            self.moved
            or self.config.proximal == "always"
            or tree.max_staleness > 0
            or (self.algorithm.needs_entropies and not tree.entropies)
        )

    def _policy_step(
        self,
        trees: Sequence[EncodedTree],
        tokens: ActionTokens,
        proximal: Floats,
        entropies: Floats,
        lr_scale: float,
    ) -> Metrics:
        total = float(tokens.weight.sum())
        mean, std = entropy_statistics(torch.from_numpy(entropies), torch.from_numpy(tokens.weight))
        sums: Counter[str] = Counter()
        maxima: dict[str, float] = {}
        for batch in self._pack(trees):
            logprobs, current, _ = self.backend.forward(batch, entropies=True)
            pick = self._picker(batch, logprobs)
            loss_batch = LossBatch(
                behaviour=pick(tokens.behaviour),
                proximal=pick(proximal),
                entropies=pick(entropies),
                adv_pos=pick(tokens.adv_pos),
                adv_neg=pick(tokens.adv_neg),
                weight=pick(tokens.weight),
                total_weight=total,
                entropy_mean=mean.to(logprobs),
                entropy_std=std.to(logprobs),
            )
            loss, metrics = self.algorithm.loss(loss_batch, logprobs, current)
            self.backend.backward(loss)
            for name, value in metrics.items():
                if name.endswith("_max"):
                    maxima[name] = max(maxima.get(name, -math.inf), float(value))
                else:
                    sums[name] += float(value)  # type: ignore[assignment]
        return {**sums, **maxima, **self._step(lr_scale, sums["loss"])}

    def _picker(self, batch: MicroBatch, like: Tensor) -> Callable[[Floats], Tensor]:
        return lambda values: self._tensor(values[batch.index], like)

    def _step(self, lr_scale: float, loss: float) -> Metrics:
        """Step unless the loss or the gradient is not finite; a clamp can hide one from the
        other."""
        grad_norm = math.nan
        if math.isfinite(loss):
            grad_norm = self.backend.step(lr_scale)
        else:
            self.backend.skip()
        skipped = not math.isfinite(grad_norm)
        self.optimizer_step += not skipped
        self.moved = self.moved or not skipped
        return {"grad_norm": grad_norm, "num_steps": 1.0 - skipped, "num_skipped": float(skipped)}


def _over_steps(steps: Sequence[Metrics]) -> Metrics:
    """Counts add up, maxima stay maxima, the rest is averaged over the steps."""

    def reduce(name: str) -> float:
        values = [step[name] for step in steps]
        if name.startswith("num_"):
            return sum(values)
        return max(values) if name.endswith("_max") else sum(values) / len(values)

    return {name: reduce(name) for name in steps[0]} if steps else {}


def _behaviour_ratios(tokens: Sequence[ActionTokens], proximal: Sequence[Floats]) -> Metrics:
    """Mean of proximal / behaviour over trained tokens, by staleness in published updates."""
    staleness = np.concatenate([part.staleness for part in tokens])
    log_ratio = np.concatenate(
        [ours - part.behaviour for part, ours in zip(tokens, proximal, strict=True)]
    )
    ratio = np.exp(np.clip(log_ratio, -20.0, 20.0))
    return {
        f"behaviour_ratio/staleness_{age}": float(ratio[staleness == age].mean())
        for age in np.unique(staleness).tolist()
    }


def _times(start_wall: float, start_cpu: float) -> Metrics:
    return {
        "wall_s": time.perf_counter() - start_wall,
        "cpu_s": time.process_time() - start_cpu,
    }
