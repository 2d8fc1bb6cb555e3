"""Placement of a training run's engine servers and learner ranks on a Ray cluster, and of its
rollout workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
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
from agentenv.assembly.serving.servers import MAX_RESTARTS
from agentenv.base.config import Reporter, to_plain
from agentenv.cluster.workers import RolloutWorkers
from agentenv.contract.server_config import LaunchConfig
from agentenv.learners.ranks.rank_group import RemoteRanks
from agentenv.processes.supervisor import ExternalPlacement, Placement, Supervisor
from agentenv.processes.worker_group import WorkerSpec
from agentenv.rollout.journal import Journal
from agentenv.training.loop.parts import Parts
from agentenv.training.workers.engine_worker import SLACK_S, ClusterServers
from agentenv.training.workers.ray_placement import RayPlacement, RaySetup

OBJECT_STORE_BYTES = 80 << 20  # the minimum that Ray accepts; agentenv does not use it


def needed(config: TrainConfig, cluster: RayCluster) -> Iterator[tuple[str, dict[str, float]]]:
    """The bundles that must fit for the run to start, each with the key that requires it."""
    launched = config.engine.launched
    if cluster.learner:
        for _ in range(config.learner.num_ranks):
            yield "learner.num_ranks", cluster.of_rank()
    if cluster.engines and launched is not None:
        for _ in range(launched.count):
            yield "engine.servers.num_servers", cluster.of_engine(launched)
    for _ in range(cluster.least):
        yield "cluster.workers", cluster.of_worker()


async def open_ray(
    config: TrainConfig, cluster: RayCluster, folder: Path, stack: AsyncExitStack, report: Reporter
) -> RayPlacement:
    """Connect to Ray. Raises ConfigError if the bundles do not fit."""
    setup = RaySetup(
        cluster.address,
        OBJECT_STORE_BYTES,
        cluster.host,
        [*needed(config, cluster)],
        cluster.wait_for_nodes_s,
    )
    found = RayPlacement(setup, folder / FOLDER, report)
    stack.push_async_callback(found.shut)
    await found.open()
    return found


def node_servers(
    cluster: RayCluster,
    placement: RayPlacement,
    folder: Path,
    stack: AsyncExitStack,
    report: Reporter,
) -> ClusterServers:
    """The starter of engine servers on the nodes of Ray."""

    def spec(config: LaunchConfig) -> WorkerSpec:
        return WorkerSpec(
            "agentenv.training.workers.engine_worker",
            "engine",
            "engine server",
            config.count,
            config.start_timeout_s + SLACK_S,
            MAX_RESTARTS,
            "engine.servers",
            env=cluster.env,
            resources=cluster.of_engine(config),
            python=cluster.python,
        )

    found = ClusterServers(placement, folder / FOLDER, spec, report)
    placement.follow("engine", found.leave)
    stack.push_async_callback(found.shut)
    return found


def ray_ranks(cluster: RayCluster, placement: RayPlacement) -> RemoteRanks:
    """Placement of the learner's ranks on Ray."""
    env = {name: os.environ[name] for name in cluster.env if name in os.environ}
    return RemoteRanks(placement, cluster.python, env, cluster.of_rank())


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
        placement, token = ExternalPlacement(cluster.host or "0.0.0.0"), cluster.token()
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
