"""The embedded engine on a GPU: `python -m pytest tests/gpu`. Without one, on the CPU."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Literal

import pytest
import torch

from agentenv.engines.embedded import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from agentenv.types import SamplingParams
from tests.engines.small_models import check, make, prompt
from tests.gpu.place import DEVICE, HAS_GPU
from tests.gpu.test_tree_gpu import random_policy

pytestmark = pytest.mark.gpu
KINDS = ["qwen3-tied", "qwen3-untied", "qwen2", "llama"]


@pytest.mark.parametrize("kind", KINDS if HAS_GPU else KINDS[:1])
async def test_logprobs_equal_transformers_before_and_after_an_update(
    kind: str, tmp_path: Path
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    first, second = make(tmp_path / "a", kind), make(tmp_path / "b", kind, seed=1)
    engine = EmbeddedEngine(EmbeddedConfig(device=DEVICE), tmp_path / "a")
    ids = prompt(1, 20)
    try:
        for version, model in ((0, first), (1, second)):
            if version:
                await engine.load_weights(tmp_path / "b", 1)
            completion = await engine.generate(ids, SamplingParams(12, seed=3), session="s")
            check(model, ids, completion)
            assert completion.version_spans[0].version == version
    finally:
        await engine.close()


async def test_many_turns_at_a_time_of_half_a_billion_weights(tmp_path: Path) -> None:
    """New weights arrive in the middle; each token says whose it is."""
    path = tmp_path / "model"
    random_policy("0.5B").model.save_pretrained(path)
    num_turns, num_tokens = (128, 256) if HAS_GPU else (4, 16)
    dtype: Literal["bfloat16", "float32"] = "bfloat16" if HAS_GPU else "float32"
    engine = EmbeddedEngine(EmbeddedConfig(device=DEVICE, dtype=dtype), path)
    try:
        await engine.generate(prompt(0, 20), SamplingParams(4, seed=0), session="warm")
        start = time.perf_counter()
        turns = [
            asyncio.create_task(
                engine.generate(prompt(i, 500), SamplingParams(num_tokens, seed=i), session=str(i))
            )
            for i in range(num_turns)
        ]
        await asyncio.sleep(0.5 if HAS_GPU else 0)
        loading = time.perf_counter()
        await engine.load_weights(path, 1)
        load_s = time.perf_counter() - loading
        done = await asyncio.gather(*turns)
        took = time.perf_counter() - start
    finally:
        await engine.close()
    count = sum(len(one.token_ids) for one in done)
    print(
        f"\nembedded, 0.5B, {num_turns} turns at a time: {count / took:,.0f} tokens/s, prefills of "
        f"500 included; new weights meanwhile {load_s:.2f} s"
    )
    assert count == num_turns * num_tokens
    assert max(one.version_spans[-1].version for one in done) == 1
