"""The parts of a training run, built from its configuration in the order that finds mistakes
first: data and environment before engine and learner.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentenv.actor import Actor
from agentenv.engine import Engine, EngineStart, check_context
from agentenv.engines.pool.engine import PooledEngineConfig
from agentenv.engines.pool.pool import EnginePool
from agentenv.env import close_shared
from agentenv.errors import ConfigError
from agentenv.model_files import vocab_size
from agentenv.plan import RolloutPlan
from agentenv.renderer import Renderer
from agentenv.types import Task
from launchers.assembly import load_function, load_tokenizer, make_renderer
from launchers.config import TrainConfig, divide
from launchers.data import EnvMaker, check_files, load_questions, tables_of, try_env
from launchers.rl.publishing import (
    AdapterPublisher,
    BroadcastPublisher,
    Colocation,
    DirectoryPublisher,
    ParityProbe,
    Publisher,
    learner_turn,
    sleeping_engine,
)
from launchers.rl.units import check_units, count_steps
from launchers.rundir import RunDirectory, find_checkpoint
from launchers.serving.roles import check_roles, start_roles
from launchers.serving.servers import ServerFactory
from learners.checkpoint import saved_version
from learners.deepspeed_learner import DeepSpeedLearner, LearnerSender
from learners.lora import ADAPTER_FOLDER, frozen_model

# Learner and engine of a run, started side by side or one after the other.


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
        version = 0 if checkpoint is None else saved_version(checkpoint / "trainer")
        return await config.engine.start(
            EngineStart(
                model=base if rank else model,
                tokenizer=tokenizer,
                policy_version=version,
                limits=config.limits,
                stack=stack,
                servers=factory,
                seed=config.run.seed,
                colocated=colocated,
                lora_rank=rank,
                adapter=checkpoint / ADAPTER_FOLDER if rank and checkpoint is not None else None,
            )
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
    if config.engine.new_weights != "adapter":
        return 0
    if config.learner.lora is None:
        raise ConfigError('engine.lora = "adapter" needs [learner.lora], which trains one')
    return config.learner.lora.r


NUM_PROBE_PROMPTS = 8


@dataclass
class Parts:
    """What a run is made of. `tools` are the schemas that the environment offers."""

    tokenizer: Any
    renderer: Renderer
    tools: list[dict[str, Any]]
    tasks: Sequence[Task]
    eval_tasks: dict[str, Sequence[Task]]
    num_steps: int
    plan: RolloutPlan
    engine: Engine
    learner: DeepSpeedLearner
    actor: Actor
    eval_actor: Actor
    probe: ParityProbe
    publisher: Publisher
    colocation: Colocation | None  # engine and learner share their GPUs
    overlapping: Actor | None = None  # on an engine of its own

    def learner_turn(self) -> AbstractAsyncContextManager[None]:
        """See `launchers.rl.publishing.learner_turn`."""
        return learner_turn(self.colocation)

    async def publish(self) -> None:
        """New weights into the engine while rollouts are running, and a probe of them begun."""
        await self.publisher.publish()
        self.probe.start()


async def build_parts(
    config: TrainConfig,
    run: RunDirectory,
    checkpoint: Path | None,
    stack: AsyncExitStack,
    say: Callable[[str], None],
) -> Parts:
    """Build everything; `stack` closes it. Raises ConfigError or DataError for the user's
    mistakes. With a checkpoint, engine and learner start from it and no set-up is run."""
    check_units(config)
    adapter_rank(config)
    check_roles(config)
    check_files(config, run.resolve, is_new=checkpoint is None)
    if config.run.setup and checkpoint is None:
        setup = load_function(config.run.setup, "run.setup")
        told = await asyncio.to_thread(setup, run.path, config.run.seed)
        if isinstance(told, str):
            say(told)
    model = checkpoint or find_checkpoint(run.resolve(config.model.path))
    tokenizer = await asyncio.to_thread(load_tokenizer, model)
    check_context(config.limits, config.engine.max_context(model))
    if config.eval.engine is not None:
        check_context(config.limits, config.eval.engine.max_context(model, "eval.engine"))

    renderer = make_renderer(config.renderer, config.prompt, tokenizer, model)
    factory = ServerFactory(run.path, stack, say)
    engine_config, gpus = divide(config.resources, config.engine, config.learner, factory.gpus)
    config = replace(config, engine=engine_config)
    config = await start_roles(config, run.resolve, factory)
    stack.push_async_callback(close_shared)
    make_env = EnvMaker(config.env, tables_of(config), run.resolve, config.limits, config.prompt)
    questions = await load_questions(config, make_env, renderer, run.resolve, say)
    tasks = questions.train
    num_steps = count_steps(config, len(tasks))
    messages, info = await try_env(make_env, tasks[0])
    prompts = [renderer.prompt(messages, info.get("tools", ()))]
    for task in tasks[1:NUM_PROBE_PROMPTS]:
        messages, info = await try_env(make_env, task)
        prompts.append(renderer.prompt(messages, info.get("tools", ())))

    learner, engine = await start_both(
        config, run, model, checkpoint, tokenizer, gpus, factory, stack
    )
    weights = make_weights_directory()
    stack.callback(shutil.rmtree, weights, ignore_errors=True)
    probe = ParityProbe(engine, learner, prompts)
    stack.push_async_callback(probe.close)
    colocation = None
    if config.resources.colocated:
        colocation = Colocation(sleeping_engine(engine), learner, probe)
    sampling = config.sampling
    seeds = [
        config.run.seed if one.seed is None else one.seed for one in (sampling.train, sampling.eval)
    ]
    evaluating = Actor(
        engine, renderer, make_env, config.limits, sampling.eval.params(), f"{seeds[1]}/eval"
    )
    return Parts(
        tokenizer=tokenizer,
        renderer=renderer,
        tools=list(info.get("tools", ())),
        tasks=tasks,
        eval_tasks=questions.eval_sets,
        num_steps=num_steps,
        plan=config.algorithm.plan(vocab_size(model)),
        engine=engine,
        learner=learner,
        actor=Actor(
            engine, renderer, make_env, config.limits, sampling.train.params(), f"{seeds[0]}/train"
        ),
        eval_actor=evaluating,
        probe=probe,
        publisher=make_publisher(config, engine, learner, weights, colocation),
        colocation=colocation,
        overlapping=await start_overlapping(
            config, evaluating, model, tokenizer, learner, factory, stack
        ),
    )


async def start_overlapping(
    config: TrainConfig,
    actor: Actor,
    model: Path,
    tokenizer: Any,
    learner: DeepSpeedLearner,
    factory: ServerFactory,
    stack: AsyncExitStack,
) -> Actor | None:
    """The actor of evaluations that overlap the training, if they have an engine: like `actor`,
    with equal seeds."""
    if config.eval.engine is None:
        return None
    engine = await config.eval.engine.start(
        EngineStart(
            model=model,
            tokenizer=tokenizer,
            policy_version=learner.policy_version,
            limits=config.limits,
            stack=stack,
            servers=factory,
            seed=config.run.seed,
            use="evaluation",
        )
    )
    other = copy.copy(actor)
    other.engine = engine
    return other


def make_publisher(
    config: TrainConfig,
    engine: Engine,
    learner: DeepSpeedLearner,
    folder: Path,
    colocation: Colocation | None,
) -> Publisher:
    """How new weights reach the engine, by its configuration."""
    if config.engine.new_weights == "adapter":
        return AdapterPublisher(engine, learner, folder, colocation)
    if config.engine.new_weights == "directory":
        return DirectoryPublisher(engine, learner, folder, colocation)
    assert isinstance(config.engine, PooledEngineConfig)
    assert isinstance(engine, EnginePool)
    sender = LearnerSender(learner, folder, config.engine.pool.broadcast_timeout_s)
    return BroadcastPublisher(engine, sender)


def make_weights_directory() -> Path:
    """Where weights pass from learner to engine: shared memory where there is any."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="agentenv-", dir=memory if memory.is_dir() else None))
