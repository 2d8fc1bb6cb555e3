from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.keys.supervised import DPORunConfig, SFTConfig, SFTRunConfig
from agentenv.base.config import load_config
from agentenv.base.errors import ConfigError
from agentenv.learners.deepspeed_settings import deepspeed_settings
from agentenv.learners.keys import LearnerConfig
from agentenv.learners.lora import LoRAConfig


def with_file(tmp_path: Path, content: object, **keys: Any) -> LearnerConfig:
    path = tmp_path / "ds.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    known = {"optimizer": "adamw", "zero_stage": 2, "deepspeed_config": str(path)}
    return LearnerConfig(**{**known, **keys})


def test_a_file_adds_settings_without_a_key_of_ours(tmp_path: Path) -> None:
    theirs = {
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1000},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": 1.0,
        "train_batch_size": "auto",
        "fp16": {"enabled": False},
        "communication_data_type": "fp32",
    }
    settings = deepspeed_settings(with_file(tmp_path, theirs))
    assert settings["zero_optimization"] == theirs["zero_optimization"]
    assert settings["bf16"] == {"enabled": False}
    assert settings["communication_data_type"] == "fp32"
    assert "train_batch_size" not in settings
    assert settings["managed_gradient_accumulation"] is False


@pytest.mark.parametrize(
    ("theirs", "keys", "text"),
    [
        ({"zero_optimization": {"stage": 3}}, {}, r"zero_optimization\.stage = 3 .*zero_stage"),
        ({"bf16": {"enabled": True}}, {}, r"bf16\.enabled = True .*learner\.dtype"),
        ({"gradient_clipping": 0.3}, {}, r"gradient_clipping = 0\.3 .*learner\.grad_clip"),
        ({"optimizer": {"type": "AdamW"}}, {}, r"'optimizer' is set with learner\.optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, r"'scheduler' is set with learner\.schedule"),
        ({"fp16": {"enabled": True}}, {}, r"'fp16' is set with learner\.dtype"),
        ({"train_batch_size": 64}, {}, r"'train_batch_size' is set with queue\.groups_per_step"),
        ({"gradient_accumulation_steps": 8}, {}, r"contradicts 1 .*groups_per_minibatch"),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
            {},
            r"offload_optimizer\.device = 'cpu' contradicts 'none' from learner\.offload",
        ),
        (
            {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}},
            {"offload": "optimizer"},
            r"device = 'nvme' contradicts 'cpu' from learner\.offload",
        ),
        ({"zero_optimisation": {}}, {}, r"'zero_optimisation' is not supported"),
        (
            {"activation_checkpointing": {"cpu_checkpointing": True}},
            {},
            r"'activation_checkpointing' would have no effect: .*learner\.activation_checkpointing",
        ),
        ({"aio": {"block_size": 1}}, {}, r"'aio' would have no effect: .*learner\.offload"),
        ("{", {}, "not a readable"),
        ("[]", {}, "not a readable"),
    ],
)
def test_contradictions_name_both_settings(
    theirs: object, keys: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=rf"learner\.deepspeed_config = .*ds\.json: {text}|{text}"
    ):
        deepspeed_settings(with_file(tmp_path, theirs, **keys))


def test_offload_buffers_can_be_tuned(tmp_path: Path) -> None:
    theirs = {"zero_optimization": {"offload_optimizer": {"device": "cpu", "pin_memory": True}}}
    settings = deepspeed_settings(with_file(tmp_path, theirs, offload="optimizer"))
    wanted = {"device": "cpu", "pin_memory": True}
    assert settings["zero_optimization"]["offload_optimizer"] == wanted


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    config = LearnerConfig(deepspeed_config=str(tmp_path / "none.json"))
    with pytest.raises(ConfigError, match=r"none\.json"):
        deepspeed_settings(config)


QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.toml"


def test_the_defaults_suit_a_pretrained_model() -> None:
    plain = LearnerConfig()
    assert (plain.optimizer, plain.learning_rate, plain.grad_clip) == ("adamw", 1e-6, 1.0)
    for config in (
        plain,
        *(one.__struct_defaults__ for one in (SFTRunConfig, DPORunConfig, SFTConfig)),
    ):
        assert "optimizer='muon_adamw'" not in str(config)


@pytest.mark.parametrize(
    ("keys", "on_cpu", "on_gpu"),
    [
        ({}, ("float32", 0), ("bfloat16", 1)),
        ({"lora": LoRAConfig()}, ("float32", 0), ("bfloat16", 1)),
        ({"zero_stage": 0}, ("float32", 0), ("float32", 0)),
        ({"zero_stage": 2}, ("float32", 2), ("bfloat16", 2)),
        ({"dtype": "float32"}, ("float32", 0), ("float32", 0)),
        ({"dtype": "bfloat16"}, ("bfloat16", 1), ("bfloat16", 1)),
        ({"offload": "optimizer"}, ("float32", 1), ("bfloat16", 1)),
        ({"offload": "params"}, ("float32", 3), ("bfloat16", 3)),
        ({"optimizer": "muon_adamw"}, ("float32", 0), ("float32", 0)),
        ({"deepspeed_config": "ds.json"}, ("float32", 1), ("bfloat16", 1)),
    ],
)
def test_dtype_and_stage_follow_the_device_unless_given(
    keys: dict[str, Any], on_cpu: tuple[str, int], on_gpu: tuple[str, int]
) -> None:
    for expected, is_gpu in ((on_cpu, False), (on_gpu, True)):
        found = LearnerConfig(**keys).resolved(on_gpu=is_gpu)
        assert (found.dtype, found.zero_stage) == expected
        assert found.resolved(on_gpu=not is_gpu) == found


def test_the_quick_start_trains_with_adamw_on_request() -> None:
    config = load_config(TrainConfig, QUICKSTART, ["learner.optimizer=adamw"])
    assert config.learner.zero_stage == 0, "whole matrices for the Muon of its cold start"
