from __future__ import annotations

import contextlib
import copy
from random import Random

import pytest
import torch

from agentenv.base.errors import ConfigError
from agentenv.learners.optimizer import OptimizerConfig, ScheduleConfig, lr_factor
from agentenv.learners.ranks import backend
from tests.learners.trees import VOCABULARY, tiny_model

CONFIG = OptimizerConfig(
    optimizer="muon_adamw",
    learning_rate=0.01,
    muon_learning_rate=0.02,
    weight_decay=0.1,
    muon_weight_decay=0.2,
)


def add_gradients(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=generator)


def test_each_step_equals_that_of_both_torch_optimizers() -> None:
    ours, theirs = tiny_model("llama"), tiny_model("llama")
    optimizer = backend.build_optimizer(ours, CONFIG)
    named = dict(theirs.named_parameters())
    is_hidden = {
        n: p.ndim == 2 and "embed" not in n and "lm_head" not in n for n, p in named.items()
    }
    muon = torch.optim.Muon([p for n, p in named.items() if is_hidden[n]], 0.02, weight_decay=0.2)
    rest = [n for n in named if not is_hidden[n]]
    adamw = torch.optim.AdamW(
        [
            {"params": [named[n] for n in rest if "lm_head" in n], "weight_decay": 0.1},
            {"params": [named[n] for n in rest if "lm_head" not in n], "weight_decay": 0.0},
        ],
        lr=0.01,
    )
    for step in range(3):
        add_gradients(ours, step)
        add_gradients(theirs, step)
        optimizer.step()
        with backend.InFloat32():
            muon.step()
        adamw.step()
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(mine, other)


def test_on_the_cpu_muon_differs_from_torch_by_rounding_to_bfloat16() -> None:
    updates = []
    for context in (contextlib.nullcontext(), backend.InFloat32()):
        torch.manual_seed(0)
        matrix = torch.nn.Parameter(torch.zeros(48, 96))
        matrix.grad = torch.randn(48, 96)
        with context:
            torch.optim.Muon([matrix], 0.02).step()
        assert matrix.grad.dtype == torch.float32
        updates.append(matrix.detach())
    theirs, ours = updates
    assert 0 < (ours - theirs).norm() < 0.02 * theirs.norm()


@pytest.mark.parametrize("kind", ["muon_adamw", "adamw"])
def test_state_survives_saving(kind: str) -> None:
    config = OptimizerConfig(optimizer=kind)
    model = tiny_model()
    optimizer = backend.build_optimizer(model, config)
    add_gradients(model, 0)
    optimizer.step()
    twin = copy.deepcopy(model)
    restored = backend.build_optimizer(twin, config)
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
        optimizer = backend.build_optimizer(model, CONFIG)
        assert isinstance(optimizer, backend.MuonAdamW)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        assert {id(p) for p in params} == {id(p) for p in model.parameters()}
        assert len(params) == len(list(model.parameters()))
        for _ in range(2):
            backend.scale_learning_rates(optimizer, 0.5)
        assert {group["kind"]: group["lr"] for group in optimizer.param_groups} == {
            "muon": 0.01,
            **({"adamw": 0.005} if name == "llama" else {}),  # an untied head
            "adamw_no_decay": 0.005,
        }


def test_norms_biases_and_embeddings_have_no_weight_decay() -> None:
    model = tiny_model("qwen2")  # it has biases
    optimizer = backend.build_optimizer(model, OptimizerConfig(optimizer="adamw", weight_decay=0.1))
    names = {id(param): name for name, param in model.named_parameters()}
    for group in optimizer.param_groups:
        for param in group["params"]:
            name = names[id(param)]
            is_free = "norm" in name or "bias" in name or "embed" in name
            assert group["weight_decay"] == (0.0 if is_free else 0.1), name


def factors(num_steps: int, **keys: object) -> list[float]:
    config = ScheduleConfig(**keys)  # type: ignore[arg-type]
    return [round(lr_factor(config, step, num_steps), 4) for step in range(num_steps + 1)]


def test_schedules() -> None:
    assert factors(3) == [1, 1, 1, 1]
    assert factors(4, warmup_steps=2) == [0.5, 1, 1, 1, 1]
    assert factors(4, schedule="linear") == [1, 0.75, 0.5, 0.25, 0]
    expected = [0.5, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
    assert factors(6, schedule="linear", warmup_ratio=1 / 3, min_lr_ratio=0.2) == expected
    assert factors(4, schedule="cosine", min_lr_ratio=0.1) == [1, 0.8682, 0.55, 0.2318, 0.1]
    assert lr_factor(ScheduleConfig(schedule="cosine"), 100, 4) == 0, "beyond the end"


def test_muon_refuses_a_model_without_matrices() -> None:
    with pytest.raises(ConfigError, match="hidden 2-D matrix"):
        backend.build_optimizer(torch.nn.Embedding(VOCABULARY, Random(0).randint(2, 4)), CONFIG)
