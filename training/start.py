"""The start of a training run: the checks, and what the provinces add to its loop: placement on
Ray, rollout workers, cold start, self-critic, and records."""

from __future__ import annotations

import copy
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agentenv.assembly.checks.checks import refuse
from agentenv.assembly.checks.memory import WeightPassage, find_passage, stored_bytes
from agentenv.assembly.keys.cluster import RayCluster
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.assembly import TRAINED, once
from agentenv.assembly.run.checkpoints import COLD_START
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.assembly.serving.gpus import trains_on_gpu
from agentenv.base.config import Reporter
from agentenv.base.disk import SHARED_MEMORY, WEIGHTS_PREFIX, remove_left
from agentenv.base.offload import in_thread
from agentenv.contract.engine import EngineStart
from agentenv.learners.ranks.deepspeed_learner import DeepSpeedLearner
from agentenv.rollout.actor import Actor
from agentenv.training.loop.parts import LoopAssembly, Parts
from agentenv.training.loop.training import Training
from agentenv.training.reports.recorder import RunRecorder
from agentenv.training.supervised.cold_start import cold_start
from agentenv.training.supervised.data import Demonstrations, check_stages, load_demonstrations
from agentenv.training.supervised.self_critic import SelfCritic
from agentenv.training.workers.placement import node_servers, open_ray, ray_ranks
from agentenv.training.workers.worker_start import start_workers

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
        ray = assembly.ray = await open_ray(config, cluster, run.path, stack, report)
        if cluster.engines:
            assembly.engine_servers = node_servers(cluster, ray, run.path, stack, report)
        if cluster.learner:
            assembly.remote_ranks = ray_ranks(cluster, ray)
    if checkpoint is None:  # else the checks have passed before
        await refuse(assembly, "files")
    async with assembly.starting():
        await refuse(assembly, first="model" if checkpoint is None else "configuration")
        return await assembly.parts()


class TrainingAssembly(LoopAssembly):
    """All parts of one training run, with the demonstrations of its cold start."""

    @once
    async def demonstrations(self) -> tuple[Demonstrations, Demonstrations] | None:
        sft = self.config.sft
        resumed = self.checkpoint
        if sft is None or not (resumed is None or resumed.name.startswith(COLD_START)):
            return None
        renderer = (await self.renderers())[TRAINED]
        messages, info = (await self.episodes())[TRAINED]
        tools = list(info.get("tools", ()))
        system = next((one.content for one in messages if one.role == "system"), "")
        trained, gate = [
            await in_thread(load_demonstrations, self.resolve(path), renderer, tools, system)
            for path in (sft.data, sft.gate)
        ]
        check_stages(sft, trained)
        return trained, gate

    async def overlapping(self, actor: Actor, learner: DeepSpeedLearner) -> Actor | None:
        config = self.config
        if config.eval.engine is None:
            return None
        other = copy.copy(actor)
        other.engine = await config.eval.engine.start(
            EngineStart(
                model=await self.model(),
                tokenizer=await self.tokenizer(),
                policy_version=learner.policy_version,
                limits=config.limits,
                stack=self.stack,
                servers=self.servers,
                seed=config.run.seed,
                use="evaluation",
            )
        )
        return other

    async def weights_place(self) -> Path:
        return (await self.passage()).folder

    @once
    async def passage(self) -> WeightPassage:
        """The place of new weights: on one machine, shared memory if it has enough space."""
        config, model = self.config, await self.model()
        chosen = config.resources.weights_dir
        return await in_thread(
            find_passage,
            self.folder,
            stored_bytes(
                self.resolve(config.model.path) if model is None else model,
                config.learner.resolved(on_gpu=trains_on_gpu(config)),
                config.engine,
            ),
            chosen=self.resolve(chosen).expanduser() if chosen else None,
            is_wide=self.is_wide,
            memory=MEMORY,
        )


ADDED: dict[str, Any] = {  # arguments of Training
    "build": build_parts,
    "make_recorder": RunRecorder,
    "start_workers": start_workers,
    "cold_start": cold_start,
    "make_critic": SelfCritic,
}


def make_training(config: TrainConfig, run: RunDirectory, view: View, **keys: Any) -> Training:
    """A whole training run; `keys`: other arguments of Training."""
    return Training(config, run, view, **{**ADDED, **keys})
