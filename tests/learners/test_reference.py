"""The reference policy of a KL term on several ranks and over restarts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.lora import LoRAConfig, is_adapter
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.checkpoint import REFERENCE
from agentenv.learners.ranks.rank import Rank
from agentenv.learners.ranks.saved_checkpoint import Checkpoint
from tests.learners import ranks

ALGORITHM = ARPO(group_size=4, importance_cap=1e9, kl_loss=0.3, kl_reward=0.05)


def test_the_policy_is_restored_to_the_bit_even_after_a_failure(model_dir: Path) -> None:
    trainer = ranks.plain_torch(model_dir, ranks.two_ranks(num_ranks=1), torch.float32, ALGORITHM)
    trainer.update([ranks.encoded(ranks.uneven_trees(3))], 1.0)
    before = {name: weight.clone() for name, weight in ranks.weights_of(trainer).items()}

    def fail() -> None:
        with trainer.reference.in_place():
            assert ranks.largest_difference(ranks.weights_of(trainer), before) > 1e-4
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert ranks.largest_difference(ranks.weights_of(trainer), before) == 0


def test_the_saved_reference_has_only_adapters(model_dir: Path, tmp_path: Path) -> None:
    config = ranks.two_ranks(num_ranks=1, zero_stage=0, lora=LoRAConfig(r=2), learning_rate=1e-2)
    one, other = (Rank(wire.Init.of(config, ALGORITHM, str(model_dir), seed=0)) for _ in range(2))
    trees = ranks.encoded(ranks.uneven_trees(3))
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
