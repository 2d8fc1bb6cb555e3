"""Options that are requested where they are unavailable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentenv.assembly.keys.supervised import SFTRunConfig
from agentenv.base.config import load_config
from agentenv.base.errors import ConfigError, MissingError
from agentenv.launchers import sft
from agentenv.learners.ranks import messages as wire
from agentenv.learners.ranks.rank import Rank
from agentenv.learners.trees import liger
from tests.commands.supervised import make_supervised
from tests.commands.test_dry_run_data import change_json
from tests.learners.ranks import ALGORITHM
from tests.learners.trees import tiny_model

UP = "model.layers.1.mlp.up_proj.weight"


def test_liger_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(MissingError, match=r"pip install liger-kernel"):
        liger.use_liger(tiny_model())


@pytest.mark.parametrize(
    ("key", "of_model"),
    [
        ("learner.fused=liger", {}), ("learner.router_loss=0.1", {}),
        ("learner={optimizer='adamw',lora={target_modules=['embed_tokens']}}", {}),
        ("learner={optimizer='adamw',lora={target_modules=['none']}}", {}),
        ("", {"hidden_act": "none"}), ("", {"attention_dropout": 0.5}),
        ("", {"model_type": "none"}), ("", {"quantization_config": {"quant_method": "none"}}),
        ("", {UP: None}), ("", {UP: torch.zeros(3, 128)}),
    ],
    ids=str,
)  # fmt: skip
def test_a_dry_run_refuses_what_a_rank_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, of_model: dict[str, Any]
) -> None:
    make_supervised(tmp_path, "[data]\ntrain = '{folder}/sharegpt.jsonl'\n")
    model, settings = tmp_path / "model", [key] if key else []
    config = load_config(SFTRunConfig, tmp_path / "small.toml", settings)
    weights = load_file(model / "model.safetensors")
    if UP in of_model:
        weights |= of_model
        weights = {name: one for name, one in weights.items() if one is not None}
        save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    else:
        change_json(model / "config.json", **of_model)
    with pytest.raises(ConfigError) as refused:
        Rank(wire.Init.of(config.learner, ALGORITHM, str(model), seed=0))
    assert sft.main([str(tmp_path / "small.toml"), *settings, "--dry-run"]) == 2
    assert str(refused.value) in " ".join(capsys.readouterr().err.split())
