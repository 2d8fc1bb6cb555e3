"""The embedded engine against transformers: log-probs, batches, streams, samples."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from agentenv.base.types import Chunk, SamplingParams
from tests.engines.small_models import MODELS, VOCAB, check, make, prompt, serving


@pytest.mark.parametrize("kind", MODELS)
async def test_logprobs_equal_transformers(kind: str, tmp_path: Path) -> None:
    """Ragged batches that outgrow slots, forks, continued turns; before and after an update."""
    model = make(tmp_path / "a", kind)
    other = make(tmp_path / "b", kind, seed=1)
    async with serving(tmp_path / "a", max_num_seqs=3) as engine:

        async def turns(name: int, reference: Any) -> None:
            ids = prompt(name, 3 + 21 * name)
            for turn in range(2):
                first = await engine.generate(
                    ids, SamplingParams(max_tokens=5 + 15 * name), session=f"s{name}"
                )
                check(reference, ids, first)
                assert first.num_cached_tokens >= (len(ids) - 4 if turn else 0)
                forks = await asyncio.gather(
                    *(
                        engine.generate(ids, SamplingParams(max_tokens=5), session=f"s{name}")
                        for _ in range(2)
                    )
                )
                for fork in forks:
                    check(reference, ids, fork)
                    assert fork.num_cached_tokens == len(ids) - 1
                ids = ids + first.token_ids + prompt(name + 50, 3)

        await asyncio.gather(*(turns(name, model) for name in range(5)))
        await engine.load_weights(tmp_path / "b", 1)
        await asyncio.gather(*(turns(name, other) for name in range(5)))
        assert engine.stats()["running"] == engine.stats()["waiting"] == 0


async def test_ragged_arrivals_wait_in_order(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    ended: list[int] = []
    async with serving(folder, max_num_seqs=2) as engine:

        async def call(index: int) -> None:
            ids = prompt(index, 5 + 7 * (index % 4))
            done = await engine.generate(ids, SamplingParams(max_tokens=8), session=str(index))
            check(model, ids, done)
            ended.append(index)

        await asyncio.gather(*(call(index) for index in range(9)))
        stats = engine.stats()
    assert ended == sorted(ended)
    assert stats["requests"] == 9
    assert stats["sampled_tokens"] == 72
    assert stats["steps"] == 40  # pairs of equal length leave together: 5 x 8
    assert stats["prompt_tokens"] == sum(5 + 7 * (i % 4) for i in range(9))
    assert stats["busy_s"] > 0


async def test_streaming(tiny: tuple[Path, Any]) -> None:
    folder, _ = tiny
    async with serving(folder) as engine:

        async def call(size: int, interval: int) -> None:
            chunks: list[Chunk] = []
            done = await engine.generate(
                prompt(0, 9),
                SamplingParams(max_tokens=size),
                session="s",
                on_tokens=chunks.append,
                stream_interval=interval,
            )
            count = len(chunks)
            await asyncio.sleep(0.01)
            assert len(chunks) == count == size // interval
            assert all(len(c.token_ids) == interval for c in chunks)
            for name in ("token_ids", "logprobs", "entropies"):
                values = [value for chunk in chunks for value in getattr(chunk, name)]
                assert values == getattr(done, name)[: count * interval]

        await asyncio.gather(*(call(size, n) for size in (1, 8, 10) for n in (1, 4, 20)))


async def test_sampled_distribution(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    ids = prompt(5, 12)
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0, -1].softmax(-1) * 2000
    async with serving(folder) as engine:
        each = (SamplingParams(max_tokens=1, seed=seed) for seed in range(2000))
        calls = (engine.generate(ids, sampling, session="s") for sampling in each)
        tokens = [done.token_ids[0] for done in await asyncio.gather(*calls)]
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB)
    assert ((counts - expected).abs() < 5 * expected.sqrt() + 3).all()


async def test_bfloat16_runs(tiny: tuple[Path, Any]) -> None:
    folder, model = tiny
    ids = prompt(0, 30)
    async with serving(folder, dtype="bfloat16") as engine:
        for session in ("a", "b"):
            params = SamplingParams(max_tokens=40)
            done = await engine.generate(ids, params, session=session)
            with torch.no_grad():
                logits = model(torch.tensor([ids + done.token_ids])).logits[0, len(ids) - 1 : -1]
            chosen = logits.log_softmax(-1).gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
            assert (torch.tensor(done.logprobs) - chosen).abs().mean() < 0.1
