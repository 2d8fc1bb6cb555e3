"""Placement of a training run's engine servers and learner ranks on a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from agentenv.assembly.keys.cluster import FOLDER, RayCluster
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.serving.servers import MAX_RESTARTS
from agentenv.base.config import Reporter
from agentenv.contract.server_config import LaunchConfig
from agentenv.learners.ranks.rank_group import RemoteRanks
from agentenv.processes.worker_group import WorkerSpec
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
