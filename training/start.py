"""The start of a training run: the checks, and what the provinces add to its loop: placement on
Ray, rollout workers, cold start, self-critic, and records."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from agentenv.adapters.trial import watch
from agentenv.assembly.checks.checks import refuse
from agentenv.assembly.keys.cluster import FOLDER, ExternalCluster, RayCluster, Setup, SpreadCluster
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.assembly.serving.gpus import encodes_on_gpu
from agentenv.base.config import Reporter
from agentenv.base.disk import remove_left
from agentenv.base.disk_errors import SHARED_MEMORY, WEIGHTS_PREFIX
from agentenv.base.offload import in_thread
from agentenv.cluster.workers import RolloutWorkers
from agentenv.contract.server_config import KEY_ENV
from agentenv.learners.ranks.rank_group import RemoteRanks
from agentenv.processes.supervisor import ExternalPlacement, Placement, Supervisor
from agentenv.training.loop.loop import Loop
from agentenv.training.loop.parts import LoopAssembly, Parts
from agentenv.training.loop.training import Training
from agentenv.training.reports.recorder import RunRecorder
from agentenv.training.supervised.assembly import TrainingAssembly
from agentenv.training.supervised.cold_start import cold_start
from agentenv.training.supervised.self_critic import SelfCritic
from agentenv.training.supervised.teaching import make_teacher
from agentenv.training.workers.engine_worker import ClusterServers
from agentenv.training.workers.ray_placement import RayPlacement, RaySetup

# Placement of a training run's engine servers and learner ranks on a Ray cluster, and of its
# rollout workers.


def needed(config: TrainConfig, cluster: RayCluster) -> Iterator[tuple[str, dict[str, float]]]:
    """The bundles that must fit for the run to start, each with the key that requires it."""
    launched = config.engine.launched
    if cluster.learner:
        for _ in range(config.learner.num_ranks):
            yield "learner.num_ranks", cluster.of_rank()
    if cluster.engines and launched is not None:
        for _ in range(launched.num_servers):
            yield "engine.servers.num_servers", cluster.of_engine(launched)
    for _ in range(cluster.least):
        yield "cluster.workers", cluster.of_worker()


async def open_ray(assembly: LoopAssembly, cluster: RayCluster) -> None:
    """Connect to Ray, and let the assembly place engine servers and learner ranks there as the
    configuration says. Raises ConfigError if the bundles do not fit."""
    folder, stack, report = assembly.folder / FOLDER, assembly.stack, assembly.report
    setup = RaySetup(
        cluster.address, cluster.host, [*needed(assembly.config, cluster)], cluster.wait_for_nodes_s
    )
    assembly.ray = placement = RayPlacement(setup, folder, report)
    stack.push_async_callback(placement.shut)
    await placement.open()
    if cluster.engines:
        servers = ClusterServers(placement, folder, cluster, report)
        placement.follow("engine", servers.leave)
        stack.push_async_callback(servers.shut)
        assembly.engine_servers = servers
    if cluster.learner:
        env = {name: os.environ[name] for name in cluster.env if name in os.environ}
        assembly.remote_ranks = RemoteRanks(placement, cluster.python, env, cluster.of_rank())


async def start_workers(loop: Loop, stack: AsyncExitStack) -> RolloutWorkers | None:
    """Start the rollout workers; `stack` stops them. None if rollouts grow in this process."""
    config, parts, view, folder = loop.config, loop.parts, loop.view, loop.recorder.run.path
    cluster = config.cluster
    if not isinstance(cluster, SpreadCluster):
        return None
    workers = RolloutWorkers(
        parts.actor,
        silence_s=cluster.silence_s,
        report=view.warn,
        journal=loop.feeder.journal,
        plan=parts.plan,
    )
    setup = Setup(
        config=to_builtins(config),
        folder=str(folder.absolute()),
        model=str(parts.model.absolute()),
        urls=parts.urls,
        vocab_size=parts.vocab_size,
        is_leased=config.engine.is_shared,
        key=os.environ.get(KEY_ENV, ""),
        settings=loop.settings,
        incarnation=loop.state.incarnation,
    )
    spec, token = cluster.processes(), None
    spec = spec._replace(sees_gpus=encodes_on_gpu(config))
    placement: Placement | None = None
    if isinstance(cluster, ExternalCluster):
        placement, token = ExternalPlacement(cluster.host), cluster.token()
    elif isinstance(cluster, RayCluster):
        assert isinstance(parts.ray, RayPlacement)
        parts.ray.follow(spec.name, workers.leave)
        placement = parts.ray
    logs = folder / FOLDER
    processes = Supervisor(spec, workers, setup, logs, view.warn, placement, token, view.log)
    stack.push_async_callback(processes.close)
    with view.doing("the start of the rollout workers"):
        await processes.start()
    at = f" at {processes.address}" if isinstance(cluster, ExternalCluster) else ""
    view.log(f"{cluster.workers} rollout workers{at}, logs in {logs}")
    return workers


MEMORY = SHARED_MEMORY


async def build_parts(
    config: TrainConfig,
    run: RunDirectory,
    checkpoint: Path | None,
    stack: AsyncExitStack,
    report: Reporter,
) -> Parts:
    """Check and build all parts; `stack` closes them. With a checkpoint, engine and learner start
    from it and no set-up runs. Raises ConfigError or DataError for bad input."""
    assembly = TrainingAssembly(config, run.path, stack, report, checkpoint)
    if not assembly.is_wide:  # free shared memory, which the model may need
        await in_thread(remove_left, MEMORY, WEIGHTS_PREFIX)
    await in_thread(remove_left, run.path, WEIGHTS_PREFIX)
    cluster = config.cluster
    if isinstance(cluster, RayCluster):
        await refuse(assembly, "configuration")
        await open_ray(assembly, cluster)
    if checkpoint is None:  # else the checks have passed before
        await refuse(assembly, "files")
    async with assembly.starting():
        await refuse(assembly, first="model" if checkpoint is None else "configuration")
        parts = await assembly.parts()
    watch(parts.actor, config)
    return parts


ADDED: dict[str, Any] = {  # arguments of Training
    "build": build_parts,
    "make_recorder": RunRecorder,
    "start_workers": start_workers,
    "cold_start": cold_start,
    "make_critic": SelfCritic,
    "make_teacher": make_teacher,
}


def make_training(config: TrainConfig, run: RunDirectory, view: View, **keys: Any) -> Training:
    """A whole training run; `keys`: other arguments of Training."""
    return Training(config, run, view, **{**ADDED, **keys})
