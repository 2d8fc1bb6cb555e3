"""Engine and learner give the memory of one GPU to each other: `python -m pytest tests/gpu`.
Without one they do so on the CPU, where bytes are not counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentenv.base.types import SamplingParams
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.backend import RankBackend
from agentenv.learners.ranks.offloaded_memory import OffloadedMemory
from agentenv.learners.ranks.trainer import Trainer
from agentenv.learners.trees.policy import Policy
from tests.engines.small_models import make, prompt
from tests.gpu.place import DEVICE, HAS_GPU, allocated_bytes
from tests.learners.ranks import ALGORITHM, save_tiny_model, train, uneven_trees, weights_of
from tests.learners.test_offload import size_of

pytestmark = pytest.mark.gpu


async def test_a_sleeping_engine_holds_no_weights_and_no_cache(tmp_path: Path) -> None:
    make(tmp_path / "a", "qwen3-untied")
    engine = EmbeddedEngine(EmbeddedConfig(device=DEVICE), tmp_path / "a")
    sampling = SamplingParams(40, temperature=0.0)
    try:
        whole = await engine.generate(prompt(1, 20), sampling, session="s")
        awake = allocated_bytes()
        pending = asyncio.create_task(engine.generate(prompt(1, 20), sampling, session="s"))
        await asyncio.sleep(0.02)
        await engine.sleep()
        num_weights = sum(p.nbytes for p in engine._scheduler._weights.targets.values())
        assert not HAS_GPU or awake - allocated_bytes() >= num_weights > 0
        left = [w.untyped_storage().size() for w in engine._scheduler._weights.targets.values()]
        assert not HAS_GPU or not any(left)  # on the CPU only the cache is given back
        await engine.wake()
        assert (await pending).token_ids == whole.token_ids
    finally:
        await engine.close()


def test_a_sleeping_rank_holds_no_memory_and_trains_unchanged_afterwards(tmp_path: Path) -> None:
    directory = save_tiny_model(tmp_path)
    config = LearnerConfig(zero_stage=0, optimizer="adamw", learning_rate=1e-3)
    found = []
    for sleeps in (False, True):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        backend = RankBackend(Policy(model), config)
        trainer = Trainer(backend, ALGORITHM, config)
        for _ in range(2):
            train(trainer, uneven_trees(4), 4)
            if sleeps:
                before = allocated_bytes()
                offloaded = OffloadedMemory(backend)
                assert size_of(offloaded) > 0
                assert not HAS_GPU or before - allocated_bytes() >= size_of(offloaded)
                offloaded.restore()
        found.append({name: w.cpu().clone() for name, w in weights_of(trainer).items()})
    for name, weight in found[0].items():
        assert torch.allclose(weight, found[1][name], atol=1e-6), name
