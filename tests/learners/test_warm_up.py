"""A learner that has compiled its kernels ahead of time trains as one that has not, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentenv.learners.lora import LoRAConfig
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.deepspeed_learner import DeepSpeedLearner
from tests.learners.ranks import ALGORITHM, save_tiny_model, two_ranks, uneven_trees, weights_in
from tests.learners.trees import credited

TREES = uneven_trees(4)
LORA = LoRAConfig(r=4, dropout=0.1)


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize(
    "keys",
    [
        {"backend": "torch", "num_ranks": 1},
        {"zero_stage": 0, "num_ranks": 1, "lora": LORA},
        {"zero_stage": 1, "num_ranks": 1, "dtype": "bfloat16"},
        {"zero_stage": 2},
        {"zero_stage": 3},
    ],
    ids=["torch", "lora", "bfloat16", "stage2", "stage3"],
)
async def test_a_warm_up_changes_nothing(tmp_path: Path, keys: dict[str, Any]) -> None:
    model = save_tiny_model(tmp_path / "model")
    found = []
    for name in ("cold", "warm"):
        log = tmp_path / f"{name}.log"
        learner = await DeepSpeedLearner.start(two_ranks(**keys), ALGORITHM, model, log, seed=3)
        try:
            if name == "warm":
                await learner.call_all(wire.WarmUp("cpu"))
            for number in range(2):
                await learner.update(credited(TREES, learner.algorithm))
                if name == "warm" and not number:
                    await learner.call_all(wire.WarmUp("cpu"))
            assert learner.policy_version == 0
            found.append(weights_in(await learner.publish(tmp_path / name)))
        finally:
            await learner.close()
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
