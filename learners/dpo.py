"""Direct preference optimization (DPO, Rafailov et al. 2023, arXiv 2305.18290, eq. 7).

    L = -E log sigmoid( beta * [ log pi(y+|x) / ref(y+|x)  -  log pi(y-|x) / ref(y-|x) ] )

y+ is the chosen and y- the rejected answer to x; log pi(y|x) sums over the tokens that the policy
wrote. Tool results are part of the context and not of the sum: the paper has no tools, and the
environment's text is not the policy's to prefer. The mean is over pairs. Tokens that both answers
share cancel out; they are computed once.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from agentenv.errors import ConfigError
from learners.batch import MicroBatch
from learners.dpo_pairs import Floats, Longs, PairTokens, preference_metrics, preference_sums
from learners.encoding import EncodedTree
from learners.learner import Metrics
from learners.lora import ADAPTER
from learners.trainer import Trainer


def preference_loss(margins: Tensor, beta: float) -> Tensor:
    """[pairs] -> [pairs]: -log sigmoid(beta * margin); `margins` as of PairTokens.margins."""
    return -nn.functional.logsigmoid(beta * margins)


def prefer(trainer: Trainer, pairs: Sequence[EncodedTree], beta: float, lr_scale: float) -> Metrics:
    """One optimizer step on the mean loss over the pairs of all ranks.

    `pairs` are this rank's, with the reference's log-probs. Where a pair is larger than a
    micro-batch and so cut, its margin is computed before, and the loss is replaced by its tangent
    there, whose gradient is the same.
    """
    start_wall, start_cpu = time.perf_counter(), time.process_time()
    backend, tokens = trainer.backend, PairTokens.of(pairs)
    batches = trainer.pack(pairs)
    total = float(sum(backend.gather(len(pairs))))
    slopes = None
    if any(backend.gather(_is_any_cut(tokens, batches))):
        slopes = _slopes(tokens.margins(_logprobs(trainer, tokens, batches)), beta)
    found = np.zeros_like(tokens.reference)
    for batch in backend.passes(batches):
        logprobs, _, _ = backend.forward(batch)
        found[batch.index] = logprobs.detach().cpu().numpy()
        backend.backward(_loss(tokens, batch.index, logprobs, slopes, beta) / total)
    sums = preference_sums(tokens, found, beta)
    metrics = preference_metrics(backend.gather(sums))
    metrics |= trainer.step(lr_scale, metrics["loss"])
    metrics["wall_s"] = time.perf_counter() - start_wall
    metrics["cpu_s"] = time.process_time() - start_cpu
    return metrics


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without what its adapters add: the policy that LoRA started from.

    Their scale is set to 0, so that every layer still runs in its order, as ZeRO stage 3 needs.
    Raises ConfigError for a model without adapters.
    """
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "lora_A")]
    if not layers:
        raise ConfigError("there is no adapter to switch off: learner.lora is not given")
    before = [layer.scaling[ADAPTER] for layer in layers]
    try:
        for layer in layers:
            layer.scaling[ADAPTER] = 0.0
        yield
    finally:
        for layer, scale in zip(layers, before, strict=True):
            layer.scaling[ADAPTER] = scale


def _loss(
    tokens: PairTokens, index: Longs, logprobs: Tensor, slopes: Floats | None, beta: float
) -> Tensor:
    """Sum over the pairs of a micro-batch, of their loss or of its tangent; in float64."""
    wide = logprobs.double()

    def tensor(values: Floats | Longs) -> Tensor:
        return torch.from_numpy(values).to(wide.device)

    sign = tensor(tokens.sign[index])
    if slopes is not None:
        return (tensor(slopes[tokens.pair[index]]) * sign * wide).sum()
    numbers, place = np.unique(tokens.pair[index], return_inverse=True)
    differences = sign * (wide - tensor(tokens.reference[index]))
    margins = wide.new_zeros(len(numbers)).index_add(0, tensor(place), differences)
    return preference_loss(margins, beta).sum()


def _slopes(margins: Floats, beta: float) -> Floats:
    """d loss / d margin: -beta * sigmoid(-beta * margin)."""
    slopes: Floats = -beta * np.exp(-np.logaddexp(0.0, beta * margins))
    return slopes


def _is_any_cut(tokens: PairTokens, batches: Sequence[MicroBatch]) -> bool:
    parts = sum(len(np.unique(tokens.pair[batch.index])) for batch in batches)
    return parts > tokens.num_pairs


@torch.no_grad()
def _logprobs(trainer: Trainer, tokens: PairTokens, batches: Sequence[MicroBatch]) -> Floats:
    found = np.zeros_like(tokens.reference)
    for batch in trainer.backend.passes(batches):
        logprobs, _, _ = trainer.backend.forward(batch)
        found[batch.index] = logprobs.cpu().numpy()
    return found
