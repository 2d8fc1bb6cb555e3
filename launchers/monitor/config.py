"""The keys of [monitor]."""

from __future__ import annotations

import importlib.util
import os
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from agentenv.errors import ConfigError

API_KEY = "WANDB_API_KEY"


class WandbConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights & Biases. Its key comes from the environment (WANDB_API_KEY), never from a file."""

    project: Annotated[str, Meta(description="project of the run")] = "agentenv"
    name: Annotated[str, Meta(description="name shown; empty: that of the run")] = ""
    entity: Annotated[str, Meta(description="user or team; empty: the default one")] = ""
    group: Annotated[str, Meta(description="group of runs, such as the seeds of one setting")] = ""
    tags: Annotated[list[str], Meta(description="tags of the run")] = field(default_factory=list)
    mode: Annotated[
        Literal["online", "offline"],
        Meta(description="offline: written to the run's folder, for `wandb sync` later"),
    ] = "online"

    def __post_init__(self) -> None:
        if self.mode == "online" and not os.environ.get(API_KEY):
            raise ConfigError(
                f"monitor.wandb: the environment variable {API_KEY} is not set; set it, or write "
                'to the run\'s folder with monitor.wandb.mode = "offline"'
            )


class MonitorConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where metrics go beside metrics.jsonl."""

    tensorboard: Annotated[bool, Meta(description="write RUN/tensorboard")] = False
    wandb: Annotated[WandbConfig | None, Meta(description="log to Weights & Biases")] = None

    def __post_init__(self) -> None:
        for package, asked in (("tensorboard", self.tensorboard), ("wandb", self.wandb)):
            if asked and importlib.util.find_spec(package) is None:
                raise ConfigError(
                    f"monitor.{package}: the package {package} is not installed; "
                    "`pip install 'agentenv[monitor]'` brings it"
                )


class RolloutMonitorConfig(MonitorConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same for a run with rollouts, of which it shows samples."""

    num_trajectories: Annotated[
        int, Meta(ge=0, description="sample trajectories of each evaluation, and of steps; 0: none")
    ] = 8
    trajectories_every: Annotated[
        int, Meta(ge=0, description="steps between samples of training; 0: evaluations only")
    ] = 10
