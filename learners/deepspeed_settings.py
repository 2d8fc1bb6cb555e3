"""DeepSpeed's configuration: the learner's, merged with a compatible JSON file of the user."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from agentenv.base.errors import ConfigError, DataError, reported_as
from agentenv.base.model_files import read_object
from agentenv.learners.keys import LearnerConfig

Settings = dict[str, Any]

_TABLES = tomllib.loads(Path(__file__).with_name("deepspeed.toml").read_text("utf-8"))
REFUSED: dict[str, str] = _TABLES["refused"]
OFFLOADS = ("offload_optimizer", "offload_param")


def deepspeed_settings(config: LearnerConfig) -> Settings:
    """The dict for deepspeed.initialize.

    Raises ConfigError if learner.deepspeed_config cannot be read, has an unknown or ineffective
    name, or contradicts a key of the learner.
    """
    settings = _our_settings(config)
    if config.deepspeed_config:
        path = Path(config.deepspeed_config)
        with reported_as(ConfigError, "learner.deepspeed_config", DataError):
            given = read_object(path, "DeepSpeed configuration")
        theirs = {name: value for name, value in given.items() if not _is_off(name, value)}
        for name in theirs:
            if name in REFUSED:
                raise ConfigError(
                    f"learner.deepspeed_config = {path}: {name!r} {REFUSED[name]}; remove it from "
                    "the file"
                )
            if name not in _TABLES["free"] and name not in settings:
                raise ConfigError(f"learner.deepspeed_config = {path}: {name!r} is not supported")
        _merge(settings, theirs, path, ())
    zero = settings["zero_optimization"]
    for name in OFFLOADS:
        if zero[name]["device"] == "none":
            del zero[name]
    return settings


def _our_settings(config: LearnerConfig) -> Settings:
    config = config.resolved(on_gpu=False)
    stage = int(config.zero_stage)
    bf16 = config.dtype == "bfloat16"
    moved = {"none": (), "optimizer": OFFLOADS[:1], "params": OFFLOADS}[config.offload]
    zero: Settings = {"stage": stage}
    zero |= {name: {"device": "cpu" if name in moved else "none"} for name in OFFLOADS}
    settings: Settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.grad_clip,
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
        # DeepSpeedCPUAdam is compiled at its first start; torch's fused AdamW is not.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    if stage != 1:  # stage 1 goes through coalesce_grad_reduction, which manages itself
        settings["managed_gradient_accumulation"] = False
    if bf16 and stage > 1:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


def _merge(ours: Settings, theirs: Settings, path: Path, where: tuple[str, ...]) -> None:
    for name, value in theirs.items():
        place = (*where, name)
        if isinstance(value, dict) and isinstance(ours.setdefault(name, {}), dict):
            _merge(ours[name], value, path, place)
        elif name in ours and value != "auto" and ours[name] != value:
            dotted = ".".join(place)
            key = _TABLES["keys"].get(dotted, "this learner, which requires it")
            raise ConfigError(
                f"learner.deepspeed_config = {path}: {dotted} = {value!r} contradicts "
                f"{ours[name]!r} from {key}; change one of them, or remove it from the file"
            )
        elif value != "auto":
            ours[name] = value


def _is_off(name: str, value: Any) -> bool:
    off = value == "auto" or (isinstance(value, dict) and value.get("enabled") is False)
    return off and name in REFUSED
