"""The embedded engine on a GPU: `python -m pytest tests/gpu`. Without one, on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentenv.engines.embedded import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from agentenv.types import SamplingParams
from tests.engines.small_models import check, make, prompt
from tests.gpu.place import DEVICE, HAS_GPU

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
