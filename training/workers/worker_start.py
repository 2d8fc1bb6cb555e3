"""Starts the rollout workers of a training run: on this machine, on a Ray cluster, or elsewhere."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from agentenv.assembly.keys.cluster import (
    FOLDER,
    ExternalCluster,
    RayCluster,
    Setup,
    SpreadCluster,
)
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.terminal import View
from agentenv.assembly.serving.gpus import encodes_on_gpu
from agentenv.base.config import to_plain
from agentenv.cluster.workers import RolloutWorkers
from agentenv.processes.supervisor import ExternalPlacement, Placement, Supervisor
from agentenv.rollout.journal import Journal
from agentenv.training.loop.parts import Parts
from agentenv.training.workers.ray_placement import RayPlacement


async def start_workers(
    config: TrainConfig,
    parts: Parts,
    folder: Path,
    journal: Journal | None,
    view: View,
    stack: AsyncExitStack,
    *,
    settings: str,
    incarnation: int,
) -> RolloutWorkers | None:
    """Start the rollout workers; `stack` stops them. None if rollouts grow in this process.
    `folder`: that of the run."""
    cluster = config.cluster
    if not isinstance(cluster, SpreadCluster):
        return None
    workers = RolloutWorkers(
        parts.actor,
        silence_s=cluster.silence_s,
        report=view.warn,
        journal=journal,
        plan=parts.plan,
    )
    setup = worker_setup(config, parts, folder, settings, incarnation)
    spec, token = cluster.processes(), None
    spec = spec._replace(sees_gpus=encodes_on_gpu(config))
    placement: Placement | None = None
    if isinstance(cluster, ExternalCluster):
        placement, token = ExternalPlacement(cluster.where()), cluster.token()
    elif isinstance(cluster, RayCluster):
        assert isinstance(parts.ray, RayPlacement)
        parts.ray.follow(spec.name, workers.leave)
        placement = parts.ray
    logs = folder / FOLDER
    processes = Supervisor(spec, workers, setup, logs, view.warn, placement, token)
    stack.push_async_callback(processes.close)
    with view.doing("the start of the rollout workers"):
        await processes.start()
    at = f" at {processes.address}" if isinstance(cluster, ExternalCluster) else ""
    view.log(f"{cluster.workers} rollout workers{at}, logs in {logs}")
    return workers


def worker_setup(
    config: TrainConfig, parts: Parts, folder: Path, settings: str, incarnation: int
) -> Setup:
    """The first message to a worker."""
    return Setup(
        config=to_plain(config),
        folder=str(folder.absolute()),
        model=str(parts.model.absolute()),
        urls=parts.urls,
        vocab_size=parts.vocab_size,
        is_leased=config.engine.is_shared,
        settings=settings,
        incarnation=incarnation,
    )
