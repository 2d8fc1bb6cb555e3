"""What runs where nothing may be compiled, and where weights lie in main memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from learners.deepspeed_learner import DeepSpeedLearner
from learners.learner import LearnerConfig
from tests.learners.ranks import (
    ALGORITHM,
    largest_difference,
    plain_torch,
    save_tiny_model,
    train,
    two_ranks,
    uneven_trees,
    weights_in,
    weights_of,
)
from tests.learners.trees import credited


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"zero_stage": 3, "offload": "params"},
        {"zero_stage": 2, "offload": "optimizer"},
        {"backend": "torch"},
        {"optimizer": "muon_adamw", "muon_learning_rate": 1e-3},
    ],
    ids=["params offloaded", "optimizer offloaded", "torch", "muon"],
)
async def test_backends_agree_and_the_first_start_compiles_nothing(
    keys: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extensions = tmp_path / "extensions"
    extensions.mkdir()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))
    monkeypatch.setenv("PATH", "/nonexistent")  # no compiler, no ninja
    if keys.get("zero_stage"):
        settings = {"zero_optimization": {"stage": keys["zero_stage"], "reduce_bucket_size": 4096}}
        (tmp_path / "ds.json").write_text(json.dumps(settings))
        keys = {**keys, "deepspeed_config": str(tmp_path / "ds.json")}
    model_dir = save_tiny_model(tmp_path / "model")
    config: LearnerConfig = two_ranks(num_ranks=1, **keys)
    learner = await DeepSpeedLearner.start(config, ALGORITHM, model_dir, tmp_path / "learner.log")
    oracle = plain_torch(model_dir, config, torch.float32)
    try:
        for step in range(2):
            metrics = await learner.update(credited(uneven_trees(4 + step), learner.algorithm))
            expected = train(oracle, uneven_trees(4 + step), config.groups_per_minibatch)
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-7)
        found = weights_in(await learner.export(tmp_path / "export"))
        exact = "zero_stage" not in keys
        assert largest_difference(found, weights_of(oracle)) <= (0.0 if exact else 1e-5)
        await learner.save(tmp_path / "checkpoint")
        await learner.load(tmp_path / "checkpoint")
        again = weights_in(await learner.export(tmp_path / "again"))
        assert largest_difference(found, again) == 0
        assert not list(extensions.rglob("*"))
    finally:
        await learner.close()
