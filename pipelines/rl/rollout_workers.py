"""The rollout workers of a training run: processes on this machine, on a Ray cluster, or started by
somebody else."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

from agentenv.cluster.workers import RolloutWorkers
from agentenv.config import to_plain
from agentenv.engines.pool import PooledEngineConfig
from agentenv.engines.pool.pool import EnginePool
from agentenv.journal import Journal
from agentenv.pipelines.config.cluster import (
    FOLDER,
    ExternalCluster,
    RayCluster,
    Setup,
    SpreadCluster,
)
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.rl.parts import Parts
from agentenv.pipelines.run.terminal import View
from agentenv.supervisor import ExternalPlacement, Placement, Supervisor


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
    """The rollout workers, started; `stack` ends them. None where rollouts grow in this process.
    `folder` is the run's."""
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
    placement: Placement | None = None
    if isinstance(cluster, ExternalCluster):
        placement, token = ExternalPlacement(cluster.where()), cluster.token()
    elif isinstance(cluster, RayCluster):
        assert parts.ray is not None
        parts.ray.follow(spec.name, workers.leave)
        placement = parts.ray
    logs = folder / FOLDER
    processes = Supervisor(spec, workers, setup, logs, view.warn, placement, token)
    stack.push_async_callback(processes.close)
    with view.doing("the start of the rollout workers"):
        await processes.start()
    at = f" at {processes.address}" if isinstance(cluster, ExternalCluster) else ""
    view.say(f"{cluster.workers} rollout workers{at}, logs in {logs}")
    return workers


def worker_setup(
    config: TrainConfig, parts: Parts, folder: Path, settings: str, incarnation: int
) -> Setup:
    """The message with which a worker begins."""
    return Setup(
        config=to_plain(config),
        folder=str(folder.absolute()),
        model=str(parts.model.absolute()),
        urls=parts.urls,
        vocab_size=parts.vocab_size,
        is_leased=(
            isinstance(config.engine, PooledEngineConfig)
            and config.engine.is_shared
            and isinstance(parts.actor.engine, EnginePool)
        ),
        settings=settings,
        incarnation=incarnation,
    )
