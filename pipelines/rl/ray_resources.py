"""The processes of a training run on a Ray cluster: what each takes of a node, and where engine
servers and learner ranks run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from agentenv.config import Say
from agentenv.learners.ranks import RemoteRanks
from agentenv.pipelines.config.cluster import FOLDER, RayCluster
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.serving.servers import MAX_RESTARTS
from agentenv.pipelines.workers.engine_worker import SLACK_S, ClusterServers
from agentenv.pipelines.workers.ray_placement import RayPlacement, RaySetup
from agentenv.server_config import LaunchConfig
from agentenv.supervisor import WorkerSpec

OBJECT_STORE_BYTES = 80 << 20  # the least that Ray accepts; nothing of ours uses it


def needed(config: TrainConfig, cluster: RayCluster) -> Iterator[tuple[str, dict[str, float]]]:
    """The bundles that must fit for the run to begin, with the keys that ask for them."""
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
    config: TrainConfig, cluster: RayCluster, folder: Path, stack: AsyncExitStack, say: Say
) -> RayPlacement:
    """The connection to Ray. Raises ConfigError for what does not fit there."""
    setup = RaySetup(
        cluster.address,
        OBJECT_STORE_BYTES,
        cluster.host,
        [*needed(config, cluster)],
        cluster.wait_for_nodes_s,
    )
    found = RayPlacement(setup, folder / FOLDER, say)
    stack.push_async_callback(found.shut)
    await found.open()
    return found


def far_servers(
    cluster: RayCluster, placement: RayPlacement, folder: Path, stack: AsyncExitStack, say: Say
) -> ClusterServers:
    """The starter of the engine's servers on nodes."""

    def spec(config: LaunchConfig) -> WorkerSpec:
        return WorkerSpec(
            "agentenv.pipelines.workers.engine_worker",
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

    found = ClusterServers(placement, folder / FOLDER, spec, say)
    placement.follow("engine", found.leave)
    stack.push_async_callback(found.shut)
    return found


def ray_ranks(cluster: RayCluster, placement: RayPlacement) -> RemoteRanks:
    """Where the ranks of the learner run."""
    own = {name: os.environ[name] for name in cluster.env if name in os.environ}
    return RemoteRanks(placement, cluster.python, own, cluster.of_rank())
