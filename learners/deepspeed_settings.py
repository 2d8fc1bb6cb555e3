"""DeepSpeed's configuration: the learner's, merged with a compatible JSON file of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentenv.base.errors import ConfigError, DataError
from agentenv.base.model_files import read_object
from agentenv.learners.keys import LearnerConfig

Settings = dict[str, Any]

# Names that a JSON may set in addition to this project's keys. DeepSpeed ignores unknown ones
# silently, and this learner does not use its pipelines, data loaders, schedulers and quantization.
FREE = {
    "comms_logger",
    "communication_data_type",
    "dump_state",
    "flops_profiler",
    "gradient_predivide_factor",
    "memory_breakdown",
    "prescale_gradients",
    "timers",
    "wall_clock_breakdown",
}
REFUSED = {  # unless it is switched off
    "optimizer": "is set with learner.optimizer and learner.learning_rate here",
    "scheduler": "is set with learner.schedule and learner.warmup_steps here",
    "fp16": "is set with learner.dtype (float32 or bfloat16) here",
    "amp": "is set with learner.dtype (float32 or bfloat16) here",
    "train_batch_size": "is set with queue.groups_per_step here",
    "checkpoint": "is set with [checkpoint] here",
    "activation_checkpointing": "would have no effect: with learner.activation_checkpointing "
    "layers keep no activations; moving or sharing them is not supported",
    "aio": "would have no effect: it is for offloading to NVMe, which is not supported; see "
    "learner.offload",
}
OFFLOADS = ("offload_optimizer", "offload_param")


def deepspeed_settings(config: LearnerConfig) -> Settings:
    """The dict for deepspeed.initialize.

    Raises ConfigError if learner.deepspeed_config cannot be read, has an unknown or ineffective
    name, or contradicts a key of the learner.
    """
    settings = _our_settings(config)
    if config.deepspeed_config:
        path = Path(config.deepspeed_config)
        theirs = {name: value for name, value in _read(path).items() if not _is_off(name, value)}
        for name in theirs:
            if name in REFUSED:
                raise ConfigError(
                    f"learner.deepspeed_config = {path}: {name!r} {REFUSED[name]}; remove it from "
                    "the file"
                )
            if name not in FREE and name not in settings:
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


# The key of each of the learner's values, for error messages.
KEYS = {
    ("zero_optimization", "stage"): "learner.zero_stage",
    ("zero_optimization", "offload_optimizer", "device"): "learner.offload",
    ("zero_optimization", "offload_param", "device"): "learner.offload",
    ("bf16", "enabled"): "learner.dtype",
    ("data_types", "grad_accum_dtype"): "learner.dtype",
    ("gradient_clipping",): "learner.grad_clip",
    ("train_micro_batch_size_per_gpu",): "learner.max_tokens_per_microbatch",
    ("gradient_accumulation_steps",): "learner.groups_per_minibatch",
}


def _merge(ours: Settings, theirs: Settings, path: Path, where: tuple[str, ...]) -> None:
    for name, value in theirs.items():
        place = (*where, name)
        if isinstance(value, dict) and isinstance(ours.setdefault(name, {}), dict):
            _merge(ours[name], value, path, place)
        elif name in ours and value != "auto" and ours[name] != value:
            key = KEYS.get(place, "this learner, which requires it")
            raise ConfigError(
                f"learner.deepspeed_config = {path}: {'.'.join(place)} = {value!r} contradicts "
                f"{ours[name]!r} from {key}; change one of them, or remove it from the file"
            )
        elif value != "auto":
            ours[name] = value


def _is_off(name: str, value: Any) -> bool:
    off = value == "auto" or (isinstance(value, dict) and value.get("enabled") is False)
    return off and name in REFUSED


def _read(path: Path) -> Settings:
    try:
        return read_object(path, "DeepSpeed configuration")
    except DataError as error:
        raise ConfigError(f"learner.deepspeed_config = {error}") from error
