"""The embedded engine on a GPU: `python -m pytest tests/gpu/test_embedded_gpu.py -s`, of which `-k
ragged` prints the speed under turns of many lengths. Without a GPU it runs scaled down on the CPU,
and its figures are meaningless."""

from __future__ import annotations

import asyncio
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from msgspec import Struct
from transformers import LlamaConfig, LlamaForCausalLM

from agentenv.base.types import SamplingParams
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from tests.engines.small_models import check, make, prompt
from tests.engines.traffic import ragged_load
from tests.gpu.place import DEVICE, HAS_GPU
from tests.gpu.test_tree_gpu import random_policy

pytestmark = pytest.mark.gpu
KINDS = ["qwen3-tied", "qwen3-untied", "qwen2", "llama"]
DRIVER = "nvidia-smi -i 0 --query-gpu=utilization.gpu --format=csv,noheader,nounits"


def gpu_use() -> float:
    """The utilization of the first GPU, in [0, 1]."""
    return float(subprocess.run(DRIVER.split(), capture_output=True, check=True).stdout) / 100


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


async def test_concurrent_turns_of_a_model_of_half_a_billion_weights(tmp_path: Path) -> None:
    """New weights arrive during the turns; each token has its version."""
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


SMOLLM2: dict[str, Any] = {  # SmolLM2-135M
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
}
SMALL = SMOLLM2 | {"vocab_size": 97, "hidden_size": 36, "intermediate_size": 48}


class Mode(Struct, frozen=True):
    """Whether cuDNN attention is off, as the engine has it, and the dtype."""

    avoid_cudnn: bool = True
    dtype: Literal["bfloat16", "float32"] = "bfloat16"


MODES = {"default": Mode(), "cudnn": Mode(avoid_cudnn=False), "float32": Mode(dtype="float32")}
WARM_UP_S, MEASURED_S = (6.0, 10.0) if HAS_GPU else (0.5, 1.0)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights in SmolLM2-135M's shape; 2 small layers on the CPU."""
    path = tmp_path_factory.mktemp("smollm2")
    sizes = SMOLLM2 if HAS_GPU else SMALL | {"num_hidden_layers": 2}
    tokens = {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 8192}
    config = LlamaConfig(**sizes, **tokens, tie_word_embeddings=True)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.parametrize("number", [190, 512] if HAS_GPU else [16])
@pytest.mark.parametrize("name", MODES)
async def test_speed_of_ragged_turns(name: str, number: int, smollm2: Path) -> None:
    """Wall time, since the engine's thread also waits for the event loop's."""
    mode = MODES[name]
    was_enabled = torch.backends.cuda.cudnn_sdp_enabled()
    config = EmbeddedConfig(device=DEVICE, dtype=mode.dtype, max_num_seqs=number)
    engine = EmbeddedEngine(config, smollm2)
    torch.backends.cuda.enable_cudnn_sdp(not mode.avoid_cudnn)
    used: list[float] = []
    try:
        async with ragged_load(engine, number, SMOLLM2["vocab_size"] if HAS_GPU else 97):
            await asyncio.sleep(WARM_UP_S)
            before, start = engine.stats(), time.perf_counter()
            while time.perf_counter() - start < MEASURED_S:
                await asyncio.sleep(MEASURED_S / 10)
                used.append(await asyncio.to_thread(gpu_use) if HAS_GPU else 0.0)
            after, wall_s = engine.stats(), time.perf_counter() - start
    finally:
        await engine.close()
        torch.backends.cuda.enable_cudnn_sdp(was_enabled)
    found = {key: after[key] - before[key] for key in before}
    steps = max(1.0, found["steps"])
    print(
        f"\nembedded, SmolLM2-135M's shape, {number} rollouts, {name}: "
        f"{1e3 * wall_s / steps:.1f} ms a step ({1e3 * found['busy_s'] / steps:.1f} of the "
        f"thread's CPU), {found['sampled_tokens'] / wall_s:,.0f} tokens/s; "
        f"{found['requests'] / steps:.1f} requests a step, GPU {sum(used) / len(used):.0%}"
    )
    assert found["sampled_tokens"] > 0
