"""Keys of the optimizer and its learning rate schedule."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from msgspec import Struct, convert

from agentenv.base.config import ESSENTIAL, about
from agentenv.base.errors import ConfigError

# Keys that another configuration has with another default.
Optimizer = Annotated[
    Literal["muon_adamw", "adamw"],
    about("Muon on hidden matrices and AdamW on the rest, or AdamW on all", ESSENTIAL),
]
LearningRate = Annotated[float, about("learning rate of AdamW", ESSENTIAL, ge=0)]
WeightDecay = Annotated[
    float,
    about(
        "decoupled weight decay of AdamW's matrices; none for norms, biases and embeddings", ge=0
    ),
]
Schedule = Annotated[
    Literal["constant", "linear", "cosine"], about("learning rate schedule after the warm-up")
]
WarmupRatio = Annotated[
    float, about("warm-up as a fraction of all updates, instead of steps", ge=0, le=1)
]


class OptimizerConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The optimizer, by default as published runs fine-tune pretrained models; schedules are the
    controller's, as a factor on both rates (`lr_factor`).

    Weight decay acts on matrices: norms, biases and embeddings have none.
    """

    optimizer: Optimizer = "adamw"
    learning_rate: LearningRate = 1e-6
    muon_learning_rate: Annotated[
        float, about("learning rate of Muon; the default suits small models from scratch", ge=0)
    ] = 4e-3
    weight_decay: WeightDecay = 0.01
    muon_weight_decay: Annotated[
        float, about("decoupled weight decay of Muon's matrices", ge=0)
    ] = 0.01
    betas: Annotated[tuple[float, float], about("AdamW's betas")] = (0.9, 0.999)
    grad_clip: Annotated[float, about("clip the gradient's global norm to this; 0: off", ge=0)] = (
        1.0
    )


def optimizer_of(config: OptimizerConfig) -> OptimizerConfig:
    """The optimizer's part of a configuration that has more, as the learner's."""
    return convert(config, OptimizerConfig, from_attributes=True)


class ScheduleConfig(OptimizerConfig, frozen=True, kw_only=True):
    """An optimizer whose rates rise from zero, then follow the schedule to the last update."""

    schedule: Schedule = "constant"
    warmup_steps: Annotated[int, about("updates of linear warm-up", ge=0)] = 0
    warmup_ratio: WarmupRatio = 0.0
    min_lr_ratio: Annotated[
        float, about("factor on the learning rates at the end of the schedule", ge=0, le=1)
    ] = 0.0

    def check_schedule(self, key: str) -> None:
        """Raises ConfigError for settings that contradict each other."""
        if self.warmup_steps and self.warmup_ratio:
            raise ConfigError(f"{key}: set only one of warmup_steps and warmup_ratio")
        if self.schedule == "constant" and self.min_lr_ratio:
            raise ConfigError(
                f"{key}.min_lr_ratio: requires schedule = linear or cosine, not constant"
            )


def lr_factor(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """Factor for update `step`, counted from 0, of `num_steps`; beyond them the last value.

    Warm-up over w updates: (step + 1) / w. Then with t from 0 at update w to 1 at num_steps and
    m = min_lr_ratio: linear 1 - (1 - m) t, cosine m + (1 - m) (1 + cos(pi t)) / 2 (Loshchilov and
    Hutter 2017, eq. 5, without restarts).
    """
    warmup = config.warmup_steps or math.ceil(config.warmup_ratio * num_steps)
    if step < warmup:
        return (step + 1) / warmup
    if config.schedule == "constant":
        return 1.0
    passed = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    left = 1.0 - passed
    if config.schedule == "cosine":
        left = 0.5 * (1.0 + math.cos(math.pi * passed))
    return config.min_lr_ratio + (1.0 - config.min_lr_ratio) * left
