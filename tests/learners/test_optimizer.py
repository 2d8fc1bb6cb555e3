from __future__ import annotations

import copy
from random import Random

import pytest
import torch

from agentenv.errors import ConfigError
from learners.learner import OptimizerConfig
from learners.optimizer import MuonAdamW, build_optimizer, scale_learning_rates
from tests.learners.trees import VOCABULARY, tiny_model

CONFIG = OptimizerConfig(
    learning_rate=0.01, muon_learning_rate=0.02, weight_decay=0.1, muon_weight_decay=0.2
)


def add_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def test_equal_to_both_torch_optimizers_step_for_step() -> None:
    ours, theirs = tiny_model("llama"), tiny_model("llama")
    optimizer = build_optimizer(ours, CONFIG)
    named = dict(theirs.named_parameters())
    is_hidden = {
        n: p.ndim == 2 and "embed" not in n and "lm_head" not in n for n, p in named.items()
    }
    muon = torch.optim.Muon([p for n, p in named.items() if is_hidden[n]], 0.02, weight_decay=0.2)
    rest = [p for n, p in named.items() if not is_hidden[n]]
    adamw = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    for step in range(3):
        add_gradients(ours, step)
        add_gradients(theirs, step)
        optimizer.step()
        muon.step()
        adamw.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)


@pytest.mark.parametrize("kind", ["muon_adamw", "adamw"])
def test_state_survives_saving(kind: str) -> None:
    config = OptimizerConfig(optimizer=kind)
    model = tiny_model()
    optimizer = build_optimizer(model, config)
    add_gradients(model, 0)
    optimizer.step()
    twin = copy.deepcopy(model)
    restored = build_optimizer(twin, config)
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in (model, twin):
        add_gradients(each, 1)
    optimizer.step()
    restored.step()
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_every_parameter_has_one_group_and_scaled_rates() -> None:
    for name in ("qwen3", "llama"):
        model = tiny_model(name)
        optimizer = build_optimizer(model, CONFIG)
        assert isinstance(optimizer, MuonAdamW)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in params} == {id(p) for p in model.parameters()}
        assert len(params) == len(list(model.parameters()))
        for _ in range(2):
            scale_learning_rates(optimizer, 0.5)
        assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.005, 0.005]


def test_muon_refuses_a_model_without_matrices() -> None:
    with pytest.raises(ConfigError, match="no hidden 2-D matrix"):
        build_optimizer(torch.nn.Embedding(VOCABULARY, Random(0).randint(2, 4)), CONFIG)
