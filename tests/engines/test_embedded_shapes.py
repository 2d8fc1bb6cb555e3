"""On a GPU the shapes of attention come from a small set; cuDNN, which plans for each, is
disabled."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from agentenv.base.types import SamplingParams
from agentenv.engines.embedded.model import avoid_cudnn, rounded_length, rounded_rows
from tests.engines.small_models import SIZES, VOCAB, check, make, prompt, serving
from tests.engines.traffic import ragged_load

NUM_ROLLOUTS, NUM_STEPS = 96, 500


class Shapes:
    """The shapes of each call of attention, with the strides of cached keys and values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: Counter[tuple[Any, ...]] = Counter()
        attend = F.scaled_dot_product_attention

        def recorded(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
            mask = options.get("attn_mask")
            shape = None if mask is None else tuple(mask.shape)
            self.calls[tuple(query.shape), tuple(key.shape), key.stride(), shape] += 1
            return attend(query, key, value, **options)

        monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)


async def count_shapes(folder: Path, shapes: Shapes, finite: bool) -> tuple[int, int]:
    """The different shapes of the first half of a ragged load, and those that the second half
    added."""
    async with serving(folder, max_num_seqs=NUM_ROLLOUTS) as engine:
        engine._scheduler.finite_shapes = finite

        async def run_to(num_steps: float) -> int:
            while engine.stats()["steps"] < num_steps:  # noqa: ASYNC110 - steps set no event
                await asyncio.sleep(0.02)
            return len(shapes.calls)

        async with ragged_load(engine, NUM_ROLLOUTS, VOCAB):
            first = await run_to(NUM_STEPS / 2)
            return first, await run_to(NUM_STEPS) - first


@pytest.mark.parametrize("finite", [True, False])
async def test_a_ragged_load_meets_few_shapes_of_attention(
    finite: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = SIZES | {"num_hidden_layers": 1, "max_position_embeddings": 4096}
    Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16)).save_pretrained(tmp_path)
    first, added = await count_shapes(tmp_path, Shapes(monkeypatch), finite)
    if finite:
        assert first < 80
        assert added < 20
    else:  # a CPU computes the exact shapes, whose number is unbounded
        assert first > 300
        assert added > 150


@pytest.mark.parametrize("kind", ["qwen3-tied", "llama"])
async def test_rounded_shapes_change_no_result(kind: str, tmp_path: Path) -> None:
    """Prompts of many lengths, forks, rows that grow and end: log-probs and entropies are those of
    transformers."""
    model = make(tmp_path, kind)
    async with serving(tmp_path, max_num_seqs=16) as engine:
        engine._scheduler.finite_shapes = True

        async def roll_out(number: int) -> None:
            ids = prompt(number // 3, 1 + 7 * (number // 3))
            for turn in range(3):
                sampling = SamplingParams(3 + 5 * number, seed=number)
                done = await engine.generate(ids, sampling, session=str(number // 3))
                check(model, ids, done)
                ids = [*ids, *done.token_ids, *prompt(100 * turn + number, number % 3)]

        await asyncio.gather(*(roll_out(number) for number in range(20)))
        assert engine.stats()["cached_tokens"] > 0


def test_numbers_are_rounded_up_to_few_sizes() -> None:
    rows = [rounded_rows(number) for number in range(1, 513)]
    assert sorted(set(rows)) == [*(1, 2, 4, 8, 16, 24, 32, 48), *(64, 96, 128, 192, 256, 384, 512)]
    assert all(number <= size < 2 * number for number, size in enumerate(rows, 1))
    lengths = {number: rounded_length(number) for number in (1, 16, 17, 128, 129, 4096)}
    assert lengths == {1: 16, 16: 16, 17: 32, 128: 128, 129: 256, 4096: 4096}


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
