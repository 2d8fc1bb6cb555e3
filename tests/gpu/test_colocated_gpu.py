"""Engine and learner give the memory of one GPU to each other: `python -m pytest tests/gpu -m gpu`.
Skipped without one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentenv.engines.embedded import EmbeddedConfig
from agentenv.engines.embedded.engine import EmbeddedEngine
from agentenv.types import SamplingParams
from learners.backend import Aside, TorchBackend
from learners.learner import LearnerConfig
from learners.policy import Policy
from learners.trainer import Trainer
from tests.engines.small_models import make, prompt
from tests.learners.ranks import ALGORITHM, save_tiny_model, train, uneven_trees, weights_of
from tests.learners.test_offload import size_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


async def test_a_sleeping_engine_holds_no_weights_and_no_cache(tmp_path: Path) -> None:
    make(tmp_path / "a", "qwen3-untied")
    engine = EmbeddedEngine(EmbeddedConfig(device="cuda"), tmp_path / "a")
    sampling = SamplingParams(40, temperature=0.0)
    try:
        whole = await engine.generate(prompt(1, 20), sampling, session="s")
        awake = torch.cuda.memory_allocated()
        asking = asyncio.create_task(engine.generate(prompt(1, 20), sampling, session="s"))
        await asyncio.sleep(0.02)
        await engine.sleep()
        num_weights = sum(p.nbytes for p in engine._scheduler._weights.targets.values())
        assert awake - torch.cuda.memory_allocated() >= num_weights
        assert all(
            place.untyped_storage().size() == 0
            for place in engine._scheduler._weights.targets.values()
        )
        await engine.wake()
        assert (await asking).token_ids == whole.token_ids
    finally:
        await engine.close()


def test_a_sleeping_rank_holds_nothing_and_trains_on_as_if_it_had_not_slept(
    tmp_path: Path,
) -> None:
    directory = save_tiny_model(tmp_path)
    config = LearnerConfig(backend="torch", optimizer="adamw", learning_rate=1e-3)
    found = []
    for sleeps in (False, True):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        backend = TorchBackend(Policy(model), config)
        trainer = Trainer(backend, ALGORITHM, config)
        for _ in range(2):
            train(trainer, uneven_trees(4), 4)
            if sleeps:
                before = torch.cuda.memory_allocated()
                aside = Aside(backend)
                assert before - torch.cuda.memory_allocated() >= size_of(aside) > 0
                aside.take_back()
        found.append({name: w.cpu().clone() for name, w in weights_of(trainer).items()})
    for name, weight in found[0].items():
        assert torch.allclose(weight, found[1][name], atol=1e-6), name
