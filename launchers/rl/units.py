"""Sizes of a run that must fit together, and how many updates they make."""

from __future__ import annotations

from agentenv.errors import ConfigError
from agentenv.native import NativeConfig
from launchers.config import TrainConfig


def check_units(config: TrainConfig) -> None:
    """Refuse sizes that do not divide and names that do not exist."""
    groups, part = config.queue.groups_per_step, config.learner.groups_per_minibatch
    if groups % part:
        raise ConfigError(
            f"learner.groups_per_minibatch = {part} does not divide queue.groups_per_step = "
            f"{groups}"
        )
    if config.sft is not None and isinstance(config.renderer, NativeConfig):
        raise ConfigError(
            "renderer.name: the demonstrations of [sft] are written in the tag protocol; choose "
            "'tags', or remove [sft]"
        )
    known = sorted(config.eval.sets)
    for key, name in (
        ("eval.report", config.eval.report),
        ("checkpoint.best_metric", config.checkpoint.best_metric.partition("/")[0]),
    ):
        if name and name not in known:
            raise ConfigError(f"{key}: there is no evaluation set {name!r}; known: {known}")
    metric = config.checkpoint.best_metric
    if metric and metric.partition("/")[2] not in ("success", "reward"):
        raise ConfigError(
            f"checkpoint.best_metric: expected SET/success or SET/reward, got {metric!r}"
        )


def count_steps(config: TrainConfig, num_tasks: int) -> int:
    """Updates of the run; from train.num_epochs, the last incomplete one is dropped."""
    if config.train.num_steps is not None:
        return config.train.num_steps
    assert config.train.num_epochs is not None
    num_steps = int(config.train.num_epochs * num_tasks) // config.queue.groups_per_step
    if num_steps < 1:
        raise ConfigError(
            f"train.num_epochs = {config.train.num_epochs} of {num_tasks} questions are less than "
            f"one step of queue.groups_per_step = {config.queue.groups_per_step}"
        )
    return num_steps
