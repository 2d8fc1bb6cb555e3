"""The parts of a training run, built from its configuration in the order that finds mistakes
first: data and environment before engine and learner."""

from __future__ import annotations

import asyncio
import copy
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentenv.actor import Actor
from agentenv.engine import Engine
from agentenv.engines.pool import EnginePool
from agentenv.engines.remote_config import SGLangConfig, VLLMConfig
from agentenv.plan import RolloutPlan
from agentenv.renderer import Renderer
from agentenv.shared import close_shared
from agentenv.types import Task
from launchers.assembly import (
    EngineConfig,
    check_context,
    context_length,
    load_function,
    load_tokenizer,
    make_renderer,
    vocab_size,
)
from launchers.checkpoints import find_checkpoint
from launchers.config import TrainConfig
from launchers.data import check_files, load_questions
from launchers.environments import EnvMaker, tables_of, try_env
from launchers.rl.colocation import Colocation, sleeping_engine
from launchers.rl.parity import ParityProbe
from launchers.rl.start import adapter_rank, start_both
from launchers.rl.units import check_units, count_steps
from launchers.rundir import RunDirectory
from launchers.serving.engines import start_engine
from launchers.serving.resources import divide
from launchers.serving.roles import check_roles, start_roles
from launchers.serving.servers import ServerFactory
from learners.deepspeed_learner import DeepSpeedLearner
from learners.sender import LearnerSender

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
    weights: Path
    sender: LearnerSender | None  # weights go by broadcast
    as_adapter: bool  # weights go as a LoRA adapter
    colocation: Colocation | None  # engine and learner share their GPUs
    overlapping: Actor | None = None  # on an engine of its own

    def learner_turn(self) -> AbstractAsyncContextManager[None]:
        """To be entered around several commands to the learner that follow one another: where it
        shares its GPUs, the engine sleeps until the end, or until the publish before it."""
        return nullcontext() if self.colocation is None else self.colocation.turn()

    async def publish(self) -> None:
        """New weights into the engine while rollouts are running; a sleeping one wakes up."""
        if self.sender is not None:
            assert isinstance(self.engine, EnginePool)
            version = await self.sender.publish()
            await self.engine.receive_weights(self.sender, version)
        else:
            version = self.learner.policy_version + 1
            write = self.learner.publish_adapter if self.as_adapter else self.learner.publish
            async with self.learner_turn():
                path = await write(self.weights / f"v{version}")
                if self.colocation is not None:
                    await self.colocation.release()
            await self.engine.load_weights(path, version)
        shutil.rmtree(self.weights / f"v{version - 1}", ignore_errors=True)
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
    check_context(config.limits, context_length(config.engine, model))
    if config.eval.engine is not None:
        check_context(config.limits, context_length(config.eval.engine, model, "eval.engine"))

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
        colocation = Colocation(sleeping_engine(engine), learner, probe.settle)
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
        weights=weights,
        sender=make_sender(config.engine, learner, weights),
        as_adapter=adapter_rank(config) > 0,
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
    engine = await start_engine(
        config.eval.engine,
        model,
        tokenizer,
        learner.policy_version,
        config.limits,
        factory,
        stack,
        config.run.seed,
        use="evaluation",
    )
    other = copy.copy(actor)
    other.engine = engine
    return other


def make_sender(
    config: EngineConfig, learner: DeepSpeedLearner, folder: Path
) -> LearnerSender | None:
    """The learner's side of weights by broadcast, if they go that way."""
    if isinstance(config, VLLMConfig | SGLangConfig) and config.weights == "broadcast":
        return LearnerSender(learner, folder, config.pool.broadcast_timeout_s)
    return None


def make_weights_directory() -> Path:
    """Where weights pass from learner to engine: shared memory where there is any."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="agentenv-", dir=memory if memory.is_dir() else None))
