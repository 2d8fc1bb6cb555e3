"""DeepSpeed's configuration: ours, and the user's own JSON where it does not contradict ours."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from agentenv.errors import ConfigError, ForeignError
from agentenv.learners.learner import LearnerConfig
from agentenv.untrusted import decode_loose

Settings = dict[str, Any]

# Names that a JSON may set beside our keys. DeepSpeed ignores unknown ones silently, and others of
# its parts (pipelines, data loaders, schedulers, quantisation) do not take part in this learner.
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
INERT = {  # DeepSpeed reads them, and in this learner nothing follows
    "activation_checkpointing": "layers keep nothing by learner.activation_checkpointing; moving "
    "or sharing what they keep is not supported",
    "aio": "it is for offloading to NVMe, which is not supported; see learner.offload",
}
OURS = {  # setting of DeepSpeed -> where it is chosen here
    "optimizer": "learner.optimizer and learner.learning_rate",
    "scheduler": "learner.schedule and learner.warmup_steps",
    "fp16": "learner.dtype (float32 or bfloat16)",
    "amp": "learner.dtype (float32 or bfloat16)",
    "train_batch_size": "queue.groups_per_step",
    "checkpoint": "[checkpoint]",
}


def deepspeed_settings(config: LearnerConfig) -> Settings:
    """The dict for deepspeed.initialize.

    Raises ConfigError if learner.deepspeed_config cannot be read, has a name that DeepSpeed or
    this learner does not read or that would do nothing, or contradicts one of our keys.
    """
    ours = _our_settings(config)
    if not config.deepspeed_config:
        return ours
    path = Path(config.deepspeed_config)
    theirs = _read(path)
    for name, value in theirs.items():
        if name in OURS:
            if not _is_off(value):
                raise ConfigError(
                    f"learner.deepspeed_config = {path}: {name!r} is set with {OURS[name]} here; "
                    "remove it from the file"
                )
        elif name in INERT:
            raise ConfigError(
                f"learner.deepspeed_config = {path}: {name!r} would do nothing: {INERT[name]}; "
                "remove it from the file"
            )
        elif name not in FREE and name not in ours:
            raise ConfigError(f"learner.deepspeed_config = {path}: {name!r} is not read here")
    merged = copy.deepcopy(ours)
    _merge(merged, {name: theirs[name] for name in theirs if name not in OURS}, path, ())
    return merged


def _our_settings(config: LearnerConfig) -> Settings:
    config = config.resolved(on_gpu=False)
    stage = int(config.zero_stage)
    bf16 = config.dtype == "bfloat16"
    zero: Settings = {"stage": stage}
    if config.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if config.offload == "params":
        zero["offload_param"] = {"device": "cpu"}
    settings: Settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": config.grad_clip if stage else 0.0,
        "zero_optimization": zero,
        "bf16": {"enabled": bf16},
        "zero_allow_untested_optimizer": True,
        # DeepSpeedCPUAdam is compiled at its first start; torch's fused AdamW is there.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
    }
    if stage != 1:  # stage 1 goes through coalesce_grad_reduction, which manages itself
        settings["managed_gradient_accumulation"] = False
    if bf16 and stage > 1:
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return settings


# Where each of our values comes from, for the text of a contradiction.
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
            if place in (("zero_optimization", "offload_optimizer"), _PARAMS):
                _check_offload(ours[name], value, path, place)
            _merge(ours[name], value, path, place)
        elif name in ours and value != "auto" and ours[name] != value:
            key = KEYS.get(place, "this learner, which needs it")
            raise ConfigError(
                f"learner.deepspeed_config = {path}: {'.'.join(place)} = {value!r} contradicts "
                f"{ours[name]!r} from {key}; change one of them, or remove it from the file"
            )
        elif value != "auto":
            ours[name] = value


_PARAMS = ("zero_optimization", "offload_param")


def _check_offload(ours: Settings, theirs: Settings, path: Path, place: tuple[str, ...]) -> None:
    wanted = theirs.get("device", "none")
    if wanted not in ("auto", ours.get("device", "none")):
        raise ConfigError(
            f"learner.deepspeed_config = {path}: {'.'.join(place)}.device = {wanted!r} contradicts "
            f"learner.offload, which means {ours.get('device', 'none')!r}; set learner.offload"
        )


def _is_off(value: Any) -> bool:
    return value == "auto" or (isinstance(value, dict) and value.get("enabled") is False)


def _read(path: Path) -> Settings:
    try:
        value = decode_loose(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"learner.deepspeed_config = {path}: {error.strerror}") from error
    except ForeignError as error:
        raise ConfigError(f"learner.deepspeed_config = {path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"learner.deepspeed_config = {path}: expected a JSON object")
    return value
