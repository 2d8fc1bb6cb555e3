"""min_p and the repetition penalty of the embedded engine against a computation token by token."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentenv.base.errors import EngineError
from agentenv.base.types import SamplingParams
from agentenv.engines.embedded.sampler import TokenSampler
from tests.engines.small_models import VOCAB, prompt, serving


def distribution(logits: Tensor, seen: list[int], params: SamplingParams) -> list[float]:
    """The distribution of a token, by the definitions, in plain Python."""
    scores = [float(x) for x in logits]
    for token in set(seen):
        penalty = params.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    if params.temperature == 0:
        return torch.tensor(scores, dtype=torch.float64).softmax(-1).tolist()
    weights = torch.tensor(scores, dtype=torch.float64).div(params.temperature).exp()
    weights[weights < params.min_p * weights.max()] = 0.0
    if params.top_k > 0:
        weights[weights < weights.sort(descending=True).values[params.top_k - 1]] = 0.0
    probs = weights / weights.sum()
    kept: set[int] = set()
    for token in probs.argsort(descending=True).tolist():
        kept.add(token)
        if sum(float(probs[t]) for t in kept) >= params.top_p:
            break
    return [
        float(p) / sum(float(probs[t]) for t in kept) if t in kept else 0.0
        for t, p in enumerate(probs)
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"min_p": 0.2},
        {"min_p": 0.05, "temperature": 1.7},
        {"repetition_penalty": 1.3},
        {"repetition_penalty": 0.7, "temperature": 0.0},
        {"repetition_penalty": 1.2, "min_p": 0.02, "top_k": 20, "top_p": 0.8, "temperature": 1.4},
        {"min_p": 1.0},
        {"top_k": 3},
        {"top_p": 0.5, "temperature": 0.7},
        {"top_k": 4, "top_p": 0.6, "temperature": 2.0},
    ],
)
async def test_reported_log_probs_are_of_the_sampled_distribution(
    tiny: tuple[Path, Any], settings: dict[str, Any]
) -> None:
    folder, model = tiny
    ids = prompt(3, 20)
    params = SamplingParams(max_tokens=12, seed=5, **settings)
    async with serving(folder) as engine:
        done = await engine.generate(ids, params, session="s")
        plain = await engine.generate(ids, SamplingParams(max_tokens=12, seed=5), session="s")
    with torch.no_grad():
        logits = model(torch.tensor([ids + done.token_ids])).logits[0, len(ids) - 1 : -1]
    for number, token in enumerate(done.token_ids):
        probs = distribution(logits[number], ids + done.token_ids[:number], params)
        assert probs[token] > 0
        expected = torch.tensor(probs, dtype=torch.float64)
        assert done.logprobs[number] == pytest.approx(float(expected[token].log()), abs=1e-4)
        entropy = -sum(p * float(torch.tensor(p).log()) for p in probs if p > 0)
        assert done.entropies[number] == pytest.approx(entropy, abs=1e-4)
    assert done.logprobs != plain.logprobs


async def test_rows_with_and_without_penalties_share_a_batch(tiny: tuple[Path, Any]) -> None:
    """A penalty of one request does not touch its neighbors, also as the batch changes."""
    folder, _ = tiny
    ids = prompt(4, 10)
    lengths = [5, 9, 14]
    plain = [SamplingParams(n, seed=n) for n in lengths]
    penalized = [SamplingParams(n, seed=n, repetition_penalty=1.5, min_p=0.01) for n in lengths]
    async with serving(folder) as engine:
        alone = [await engine.generate(ids, p, session="s") for p in [*plain, *penalized]]
        together = await asyncio.gather(
            *(engine.generate(ids, p, session="s") for p in [*plain, *penalized])
        )
    for one, other in zip(alone, together, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_penalty_counts_a_token_from_the_next_step() -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 7] = 4.0
    logits[0, 8] = 3.0
    params = [SamplingParams(3, temperature=0.0, repetition_penalty=2.0)]
    sampler = TokenSampler(params, torch.device("cpu"), VOCAB, lambda row: [1])
    half = torch.full((1,), 0.5, dtype=torch.float64)
    assert [int(sampler.sample(logits, half)[0]) for _ in range(3)] == [7, 8, 7]


@pytest.mark.parametrize("settings", [{"min_p": 1.5}, {"min_p": -0.1}, {"repetition_penalty": 0.0}])
async def test_values_out_of_range_are_refused(
    tiny: tuple[Path, Any], settings: dict[str, Any]
) -> None:
    async with serving(tiny[0]) as engine:
        with pytest.raises(EngineError, match=next(iter(settings))):
            await engine.generate([1], SamplingParams(1, **settings), session="s")
