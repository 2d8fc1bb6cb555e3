"""The learner without compilation, and with weights in main memory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentenv.learners.keys import LearnerConfig
from agentenv.learners.ranks.backend import moved_weights
from agentenv.learners.ranks.checkpoint import stored_dtype
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.trees.policy import Policy
from tests.learners import ranks
from tests.learners.trees import credited, tiny_model


@pytest.mark.parametrize(
    "keys",
    [
        {"zero_stage": 3, "offload": "params"},
        {"zero_stage": 2, "offload": "optimizer"},
        {"optimizer": "muon_adamw", "muon_learning_rate": 1e-3},
    ],
    ids=["params offloaded", "optimizer offloaded", "muon"],
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
    model_dir = ranks.save_tiny_model(tmp_path / "model")
    config: LearnerConfig = ranks.two_ranks(num_ranks=1, **keys)
    learner = await DeepSpeedLearner.start(
        config, ranks.ALGORITHM, model_dir, tmp_path / "learner.log"
    )
    oracle = ranks.plain_torch(model_dir, config, torch.float32)
    try:
        for step in range(2):
            metrics = await learner.update(
                credited(ranks.uneven_trees(4 + step), learner.algorithm)
            )
            expected = ranks.train(
                oracle, ranks.uneven_trees(4 + step), config.groups_per_minibatch
            )
            assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-5, abs=1e-7)
        found = ranks.weights_in(await learner.export(tmp_path / "export"))
        exact = not config.resolved(on_gpu=False).zero_stage
        assert ranks.largest_difference(found, ranks.weights_of(oracle)) <= (0.0 if exact else 1e-5)
        await learner.save(tmp_path / "checkpoint")
        await learner.load(tmp_path / "checkpoint")
        again = ranks.weights_in(await learner.export(tmp_path / "again"))
        assert ranks.largest_difference(found, again) == 0
        assert not list(extensions.rglob("*"))
    finally:
        await learner.close()


def test_weights_are_mapped_in_their_common_dtype(tmp_path: Path) -> None:
    """Not in that of config.json, which need not be theirs, and not in a narrower one than one of
    them has."""
    one, other = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    assert stored_dtype(tmp_path) is None
    save_file({"a": one, "places": torch.arange(2)}, tmp_path / "a.safetensors")
    (tmp_path / "config.json").write_text('{"dtype": "float32"}')
    assert stored_dtype(tmp_path) == torch.bfloat16
    save_file({"b": other}, tmp_path / "b.safetensors")
    assert stored_dtype(tmp_path) is None


@pytest.mark.parametrize("copy", [False, True])
def test_weights_are_loaded_one_by_one_on_request(copy: bool) -> None:
    """In the dtype of the file until then; with `copy` the mapped tensors stay unchanged."""
    policy = Policy(tiny_model().bfloat16())
    before = [param.data for param in policy.parameters()]
    rotary = policy.model.model.rotary_emb.inv_freq
    arriving = moved_weights(policy, torch.device("cpu"), torch.float32, copy=copy)
    for number, param in enumerate(arriving):
        assert torch.equal(param.data, before[number].float())
        param.data = torch.empty(0)  # as DeepSpeed does at stage 3
        for later, waiting in list(zip(before, policy.parameters(), strict=True))[number + 1 :]:
            assert waiting.data.data_ptr() == later.data_ptr()
    assert number == len(before) - 1
    assert torch.equal(policy.model.model.rotary_emb.inv_freq, rotary)
    policy = Policy(tiny_model())
    before = [param.data for param in policy.parameters()]
    for old, param in zip(
        before, moved_weights(policy, torch.device("cpu"), torch.float32, copy=copy), strict=True
    ):
        assert (old.data_ptr() != param.data_ptr()) == copy
        assert torch.equal(old, param)
