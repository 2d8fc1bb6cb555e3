"""min_p and the repetition penalty of the embedded engine against a computation token by token; and
cuDNN, which is off on a GPU."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from agentenv.base.types import SamplingParams
from agentenv.engines.embedded.model import avoid_cudnn
from agentenv.engines.embedded.sampler import TokenSampler
from agentenv.learners.trees.encoded_tree import encode_sequence
from agentenv.learners.trees.partition import pack
from agentenv.learners.trees.policy import Policy, tensors
from tests.engines.reference import processed
from tests.engines.small_models import VOCAB, prompt, serving


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


CASES: list[dict[str, float]] = [
    {"temperature": 0.4}, {"temperature": 1.7}, {"top_k": 7},
    {"temperature": 1.7, "top_k": 40, "top_p": 0.7, "min_p": 0.02},
]  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_the_learner_scores_a_turn_as_the_engine_and_transformers_do(
    tiny: tuple[Path, Any], case: dict[str, Any]
) -> None:
    """Next to a turn of which nothing is kept."""
    folder, model = tiny
    ids = prompt(6, 12)
    sampling = SamplingParams(20, seed=3, returns_kept="top_k" in case, **case)
    plain = SamplingParams(20, top_k=3)
    async with serving(folder) as engine:
        done, other = await asyncio.gather(
            *(engine.generate(ids, one, session="s") for one in (sampling, plain))
        )
    assert (other.num_kept, other.kept_ids) == ([], [])
    rows = processed(model, ids, done.token_ids, **case)
    expected = [float(row[token]) for row, token in zip(rows, done.token_ids, strict=True)]
    assert done.logprobs == pytest.approx(expected, abs=1e-4)
    if sampling.returns_kept:
        assert done.num_kept == (rows > -torch.inf).sum(-1).tolist()
        assert done.kept_ids == (rows > -torch.inf).nonzero()[:, 1].tolist()
    mask = [False] * len(ids) + [True] * 20
    kept = {"num_kept": done.num_kept, "kept_ids": done.kept_ids}
    sequence = encode_sequence(ids + done.token_ids, mask, sampling.temperature, **kept)
    (batch,) = pack([sequence], 100)
    policy = Policy(Qwen3ForCausalLM.from_pretrained(folder))
    logprobs, entropies, _ = policy(*tensors(batch, torch.device("cpu")))
    assert logprobs.tolist() == pytest.approx(done.logprobs, abs=1e-4)
    assert entropies.tolist() == pytest.approx(done.entropies, abs=1e-4)


def test_a_penalty_counts_a_token_from_the_next_step() -> None:
    logits = torch.full((1, VOCAB), -5.0)
    logits[0, 7] = 4.0
    logits[0, 8] = 3.0
    params = [SamplingParams(3, temperature=0.0, repetition_penalty=2.0)]
    sampler = TokenSampler(params, torch.device("cpu"), VOCAB, lambda row: [1])
    half = torch.full((1,), 0.5, dtype=torch.float64)
    assert [int(sampler.sample(logits, half)[0]) for _ in range(3)] == [7, 8, 7]


def test_cudnn_attention_is_disabled_on_a_gpu() -> None:
    enabled = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        avoid_cudnn(torch.device("cpu"))
        assert torch.backends.cuda.cudnn_sdp_enabled()
        avoid_cudnn(torch.device("cuda"))
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)
