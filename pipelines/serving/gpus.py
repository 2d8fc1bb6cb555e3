"""Which server gets which GPU."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentenv.engine import EngineConfig
from agentenv.errors import ConfigError
from agentenv.learners.learner import LearnerConfig
from agentenv.pipelines.config.cluster import RayCluster

if TYPE_CHECKING:
    from agentenv.pipelines.config.cluster import ResourcesConfig
    from agentenv.pipelines.config.rl import TrainConfig


def visible_gpus() -> list[str]:
    """The GPUs of this process: what CUDA_VISIBLE_DEVICES names, else all of the machine."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [part.strip() for part in named.split(",") if part.strip() not in ("", "-1")]
    count = sum(path.name.removeprefix("nvidia").isdigit() for path in Path("/dev").glob("nvidia*"))
    return [str(number) for number in range(count)]


def trains_on_gpu(config: TrainConfig) -> bool:
    """Whether the learner's ranks have GPUs, as far as that is known before they start: those on
    other machines are taken to have some."""
    elsewhere = isinstance(config.cluster, RayCluster) and config.cluster.learner
    return bool(elsewhere or config.learner.launch == "external" or visible_gpus())


class GpuPlan:
    """Hands out GPUs, each to one server; numbers count the visible ones from 0."""

    def __init__(self, visible: Sequence[str] | None = None) -> None:
        self.visible = visible_gpus() if visible is None else list(visible)
        self._owners: dict[int, str] = {}
        self._lent: dict[int, str] = {}  # with their owners

    def lend(self, key: str) -> None:
        """Let one borrower have the GPUs of `key` too, which uses them in turn with it."""
        self._lent |= {n: owner for n, owner in self._owners.items() if owner == key}

    def assign(
        self, key: str, asked: Sequence[int], needed: int, *, borrows: bool = False
    ) -> list[str]:
        """`needed` GPUs as values of CUDA_VISIBLE_DEVICES. `key` names the setting in errors.
        Who `borrows` is given the lent ones first.

        Raises ConfigError for GPUs that are missing, taken, named twice, or too few or many.
        """
        if asked and len(asked) != needed:
            raise ConfigError(f"{key}: {needed} GPUs are needed, {len(asked)} are named: {asked}")
        if borrows:
            for number in self._lent:
                self._owners.pop(number, None)
        free = [n for n in range(len(self.visible)) if n not in self._owners]
        free.sort(key=lambda number: number not in self._lent)
        chosen = list(asked) or free[:needed]
        if len(chosen) < needed:
            taken = ", ".join(f"{n}: {owner}" for n, owner in self._owners.items()) or "none"
            raise ConfigError(
                f"{key}: {needed} GPUs are needed, {len(free)} of {len(self.visible)} are free "
                f"(taken: {taken})"
            )
        for number in chosen:
            if number >= len(self.visible):
                raise ConfigError(
                    f"{key}: there is no GPU {number}; visible are {len(self.visible)} "
                    f"({', '.join(self.visible) or 'none'})"
                )
            if number in self._owners:
                raise ConfigError(f"{key}: GPU {number} already belongs to {self._owners[number]}")
            self._owners[number] = key
        return [self.visible[number] for number in chosen]


SERVERS, LEARNER = "engine.servers.gpus", "resources.learner_gpus"
COLOCATED = "resources.colocated"


def learner_gpus(
    resources: ResourcesConfig, engine: EngineConfig, learner: LearnerConfig, plan: GpuPlan
) -> list[str]:
    """The GPUs of the learner's ranks as values of CUDA_VISIBLE_DEVICES, claimed before those of
    servers; empty for all, without servers or without GPUs.

    Raises ConfigError for a key that nobody reads, and for GPUs that are missing or claimed twice;
    servers and learner may claim the same ones where they are colocated.
    """
    asked, local = resources.learner_gpus, learner.launch == "local"
    named = [] if engine.launched is None else engine.launched.gpus
    if resources.colocated:
        engine.check_colocated(COLOCATED)
    if asked and not local:
        raise ConfigError(f"{LEARNER}: the ranks are started elsewhere; remove it")
    if asked and not plan.visible:
        raise ConfigError(f"{LEARNER}: {asked} are named, but no GPU is visible")
    both = set(named) & set(asked)
    if both and not resources.colocated:
        raise ConfigError(
            f"{SERVERS}: {sorted(both)} are the learner's ({LEARNER}); with {COLOCATED} = true "
            "they have them in turn"
        )
    if not asked and not (plan.visible and engine.starts_servers and local):
        return []
    left = [number for number in range(len(plan.visible)) if number not in named]
    if resources.colocated:  # first where the servers are
        left = [*named, *left]
    elif not asked and len(left) < learner.num_ranks:
        raise ConfigError(
            f"{LEARNER}: {learner.num_ranks} are needed, {len(left)} of {len(plan.visible)} are "
            "left beside the servers of the engine"
        )
    gpus = plan.assign(LEARNER, asked or left[: learner.num_ranks], learner.num_ranks)
    if resources.colocated:
        plan.lend(LEARNER)
    return gpus
