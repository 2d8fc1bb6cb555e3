"""The start of a training run: the checks, and what the provinces add to its loop: placement on
Ray, rollout workers, cold start, self-critic, and records."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agentenv.assembly.checks.checks import refuse
from agentenv.assembly.keys.cluster import RayCluster
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.config import Reporter
from agentenv.base.disk import remove_left
from agentenv.base.disk_errors import SHARED_MEMORY, WEIGHTS_PREFIX
from agentenv.base.offload import in_thread
from agentenv.training.loop.parts import Parts
from agentenv.training.loop.training import Training
from agentenv.training.supervised.assembly import TrainingAssembly
from agentenv.training.supervised.cold_start import cold_start
from agentenv.training.supervised.self_critic import SelfCritic
from agentenv.training.workers.placement import open_ray, start_workers

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
    assembly = TrainingAssembly(config, run.path, checkpoint, stack, report)
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
        return await assembly.parts()


ADDED: dict[str, Any] = {  # arguments of Training
    "build": build_parts,
    "start_workers": start_workers,
    "cold_start": cold_start,
    "make_critic": SelfCritic,
}


def make_training(config: TrainConfig, run: RunDirectory, view: View, **keys: Any) -> Training:
    """A whole training run; `keys`: other arguments of Training."""
    return Training(config, run, view, **{**ADDED, **keys})
