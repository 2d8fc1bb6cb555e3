"""The reference policy of a KL term on several ranks and over restarts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from agentenv.learners import messages as wire
from agentenv.learners.arpo import ARPO
from agentenv.learners.checkpoint import REFERENCE, Checkpoint, restore
from agentenv.learners.deepspeed_learner import DeepSpeedLearner
from agentenv.learners.lora import LoRAConfig, is_adapter
from agentenv.learners.rank import Rank
from agentenv.learners.trainer import Trainer
from tests.learners.ranks import (
    OF_THE_RANKS,
    encoded,
    largest_difference,
    plain_torch,
    train,
    two_ranks,
    uneven_trees,
    weights_in,
    weights_of,
)
from tests.learners.trees import credited

ALGORITHM = ARPO(group_size=4, importance_cap=1e9, kl_loss=0.3, kl_reward=0.05)


def go_on(trainer: Trainer, directory: Path) -> None:
    saved = Checkpoint(directory)
    restore(trainer.backend, saved)
    trainer.reference.load(saved)
    trainer.moved = saved.meta.moved


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zero-2", "zero-3"])
async def test_two_ranks_equal_one(case: str, model_dir: Path, tmp_path: Path) -> None:
    keys: dict[str, object] = {"zero_stage": int(case[5])}
    if case == "zero-3":  # matrices are cut and norms stay whole on every rank, as in a large model
        settings = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 100}}
        (tmp_path / "ds.json").write_text(json.dumps(settings))
        keys["deepspeed_config"] = str(tmp_path / "ds.json")
    config = two_ranks(**keys)
    learner = await DeepSpeedLearner.start(config, ALGORITHM, model_dir, tmp_path / "learner.log")
    oracle = plain_torch(model_dir, config, torch.float32, ALGORITHM)
    try:
        for count in (7, 5, 1):  # with the last, a rank has no tree
            metrics = await learner.update(credited(uneven_trees(count), learner.algorithm))
            expected = train(oracle, uneven_trees(count), config.groups_per_minibatch)
            for name in expected.keys() - OF_THE_RANKS:
                assert metrics[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name
        assert abs(metrics["kl_to_reference"]) > 1e-2
        found = weights_in(await learner.publish(tmp_path / "published"))
        assert largest_difference(found, weights_of(oracle)) < 1e-5

        await learner.save(tmp_path / "many")
        resumed = plain_torch(model_dir, config, torch.float32, ALGORITHM)
        go_on(resumed, tmp_path / "many")
        results = []
        for _ in range(2):
            await learner.load(tmp_path / "many")
            last = await learner.update(credited(uneven_trees(4, version=1), learner.algorithm))
            results.append(weights_in(await learner.export(tmp_path / "export")))
        expected = train(resumed, uneven_trees(4, version=1), config.groups_per_minibatch)
        assert largest_difference(*results) == 0
        assert largest_difference(results[0], weights_of(resumed)) < 1e-5
        assert last["kl_to_reference"] == pytest.approx(expected["kl_to_reference"], rel=1e-4)
        assert abs(last["kl_to_reference"]) > 1e-2, "the model of the start, not of the checkpoint"
    finally:
        await learner.close()


def test_the_policy_is_restored_to_the_bit_even_after_a_failure(model_dir: Path) -> None:
    trainer = plain_torch(model_dir, two_ranks(num_ranks=1), torch.float32, ALGORITHM)
    trainer.update([encoded(uneven_trees(3))], 1.0)
    before = {name: weight.clone() for name, weight in weights_of(trainer).items()}

    def fail() -> None:
        with trainer.reference.in_place():
            assert largest_difference(weights_of(trainer), before) > 1e-4
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert largest_difference(weights_of(trainer), before) == 0


@pytest.mark.slow
def test_the_saved_reference_has_only_adapters(model_dir: Path, tmp_path: Path) -> None:
    config = two_ranks(num_ranks=1, backend="torch", lora=LoRAConfig(r=2), learning_rate=1e-2)
    one, other = (Rank(wire.Init.of(config, ALGORITHM, str(model_dir), seed=0)) for _ in range(2))
    trees = encoded(uneven_trees(3))
    for rank in (one, other):
        rank.run(wire.Update([trees], 1.0))
    one.run(wire.Save(str(tmp_path / "trainer")))
    saved = Checkpoint(tmp_path / "trainer")
    for name, shape in saved.shapes.items():
        assert is_adapter(name)
        kept = saved.read(name, REFERENCE, 0, torch.Size(shape).numel())
        assert bool(kept.any()) == ("lora_A" in name), "B begins at zero"
    resumed = Rank(wire.Init.of(config, ALGORITHM, str(model_dir), seed=1))
    resumed.run(wire.Load(str(tmp_path / "trainer")))
    expected = other.run(wire.Update([trees], 1.0)).metrics
    found = resumed.run(wire.Update([trees], 1.0)).metrics
    assert found["kl_to_reference"] == expected["kl_to_reference"] != 0
