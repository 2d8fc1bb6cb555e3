"""Learner and engine of a run, started side by side or one after the other."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agentenv.engine import Engine
from agentenv.engines.remote_config import VLLMConfig
from agentenv.errors import ConfigError
from launchers.config import TrainConfig
from launchers.rundir import RunDirectory
from launchers.serving.engines import start_engine
from launchers.serving.servers import ServerFactory
from learners.checkpoint import saved_version
from learners.deepspeed_learner import DeepSpeedLearner
from learners.lora import ADAPTER_FOLDER, frozen_model


async def start_both(
    config: TrainConfig,
    run: RunDirectory,
    model: Path,
    checkpoint: Path | None,
    tokenizer: Any,
    gpus: Sequence[str],
    factory: ServerFactory,
    stack: AsyncExitStack,
) -> tuple[DeepSpeedLearner, Engine]:
    """Learner and engine, both at the version of the checkpoint; side by side, or one after the
    other where they share GPUs."""
    base, rank = frozen_model(checkpoint) or model, adapter_rank(config)
    colocated = config.resources.colocated

    async def learner() -> DeepSpeedLearner:
        started = await DeepSpeedLearner.start(
            config.learner,
            config.algorithm,
            base,
            run.path / "learner.log",
            seed=config.run.seed,
            gpus=gpus,
        )
        stack.push_async_callback(started.close)
        if checkpoint is not None:
            await started.load(checkpoint / "trainer")
        if colocated:
            await started.sleep()
        return started

    async def engine() -> Engine:
        return await start_engine(
            config.engine,
            base if rank else model,
            tokenizer,
            0 if checkpoint is None else saved_version(checkpoint / "trainer"),
            config.limits,
            factory,
            stack,
            config.run.seed,
            colocated=colocated,
            lora_rank=rank,
            adapter=checkpoint / ADAPTER_FOLDER if rank and checkpoint is not None else None,
        )

    if colocated:
        return await learner(), await engine()
    first, second = asyncio.create_task(learner()), asyncio.create_task(engine())
    try:
        return await asyncio.gather(first, second)
    finally:  # where one fails, the other ends too
        for task in (first, second):
            task.cancel()
        await asyncio.wait((first, second))


def adapter_rank(config: TrainConfig) -> int:
    """Rank of the adapters that the engine loads; 0 if it gets whole models. Raises ConfigError if
    it should load what the learner does not train."""
    if not isinstance(config.engine, VLLMConfig) or config.engine.lora == "merged":
        return 0
    if config.learner.lora is None:
        raise ConfigError('engine.lora = "adapter" needs [learner.lora], which trains one')
    return config.learner.lora.r
