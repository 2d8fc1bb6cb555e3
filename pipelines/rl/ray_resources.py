"""The processes of a training run on a Ray cluster: what each takes of a node, and how the engine
and the learner get theirs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

from agentenv.pipelines.cluster.engines import SLACK_S, ClusterServers
from agentenv.pipelines.cluster.ray_placement import RayPlacement, RaySetup
from agentenv.pipelines.config.cluster import FOLDER, RayCluster
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.setup.data import Say
from agentenv.processes import ProcessSpec
from agentenv.server_config import LaunchConfig
from agentenv.supervisor import WorkerSpec


def needed(config: TrainConfig, cluster: RayCluster) -> Iterator[tuple[str, dict[str, float]]]:
    """What has to fit for the run to begin, with the keys that ask for it."""
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
        cluster.object_store_mb << 20,
        cluster.host,
        [*needed(config, cluster)],
        cluster.wait_for_nodes_s,
    )
    found = RayPlacement(setup, folder / FOLDER, say)
    stack.push_async_callback(found.shut)
    await found.open()
    return found


def far_servers(
    cluster: RayCluster, places: RayPlacement, folder: Path, stack: AsyncExitStack, say: Say
) -> ClusterServers:
    """What starts the servers of the engine on nodes."""

    def spec(config: LaunchConfig) -> WorkerSpec:
        return WorkerSpec(
            "agentenv.pipelines.workers.engine_worker",
            "engine",
            "engine server",
            config.count,
            config.start_timeout_s + SLACK_S,
            config.max_restarts,
            "engine.servers",
            env=cluster.env,
            resources=cluster.of_engine(config),
            python=cluster.python,
        )

    found = ClusterServers(places, folder / FOLDER, spec, say)
    places.follow("engine", found.leave)
    stack.push_async_callback(found.shut)
    return found


class RayRanks:
    """Places of the learner's ranks, see agentenv.learners.ranks.RankPlaces."""

    def __init__(self, cluster: RayCluster, places: RayPlacement) -> None:
        self._cluster, self._places = cluster, places

    @property
    def host(self) -> str:
        return self._places.host

    async def start(self, rank: int, log_path: Path, env: dict[str, str]) -> None:
        await self._places.start(self._launch(rank, log_path, env))

    def _launch(self, rank: int, log_path: Path, env: dict[str, str]) -> ProcessSpec:
        command = [self._cluster.python or sys.executable, "-m", "agentenv.learners.worker"]
        log, needs = str(log_path.absolute()), self._cluster.of_rank()
        own = {name: os.environ[name] for name in self._cluster.env if name in os.environ}
        return ProcessSpec(f"rank-{rank}", command, own | env, log, needs)

    async def ended(self, rank: int) -> str:
        return await self._places.ended(f"rank-{rank}")

    async def stop(self, rank: int) -> None:
        await self._places.stop(f"rank-{rank}")
