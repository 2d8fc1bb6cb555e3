"""The parts of a training run, built from its configuration in the order that finds mistakes
first: data and environment before engine and learner.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from agentenv.actor import Actor
from agentenv.engine import Engine, EngineConfig, EngineStart, SleepingEngine, check_context
from agentenv.engines.pool.engine import PooledEngineConfig
from agentenv.engines.pool.pool import EnginePool
from agentenv.env import close_shared
from agentenv.errors import ConfigError, LearnerError
from agentenv.model_files import vocab_size
from agentenv.plan import RolloutPlan
from agentenv.renderer import Renderer
from agentenv.types import Task
from launchers.assembly import load_function, load_tokenizer, make_renderer
from launchers.config import TrainConfig, divide
from launchers.data import EnvMaker, check_files, load_questions, tables_of, try_env
from launchers.rl.state import ParityProbe
from launchers.rl.units import check_units, count_steps
from launchers.rundir import RunDirectory, find_checkpoint
from launchers.serving.roles import check_roles, start_roles
from launchers.serving.servers import ServerFactory
from learners.checkpoint import saved_version
from learners.deepspeed_learner import DeepSpeedLearner, LearnerSender
from learners.lora import ADAPTER_FOLDER, frozen_model

# GPUs that engine and learner have in turn.
#
#     all serve --> sleep --> all train --> wake --> all serve
#                             publish -----^  with the new weights
#
# Rollouts that are under way wait with their tokens while the learner trains, and their deadlines
# with them; so do those that start meanwhile.


class Colocation:
    """Who has the GPUs. Every command to the learner takes them for itself; `turn` keeps them for
    several. `settle` is awaited before the engine sleeps: what only it can still do."""

    def __init__(
        self,
        engine: SleepingEngine,
        learner: DeepSpeedLearner,
        settle: Callable[[], Awaitable[None]],
    ) -> None:
        self.owner: Literal["engine", "learner"] = "engine"
        self._engine, self._learner, self._settle = engine, learner, settle
        self._depth = 0
        self._moving = asyncio.Lock()
        learner.turn = self.turn

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """The learner has the GPUs inside, whether or not it had them already."""
        self._depth += 1
        gone = False
        try:
            await self._to_learner()
            yield
        except LearnerError:
            gone = True  # there may be nobody left to sleep, and the reason must not be hidden
            raise
        finally:
            self._depth -= 1
            if not (self._depth or gone):
                await self._to_engine()

    async def release(self) -> None:
        """Within a turn: the learner sleeps from now on, the engine is about to be woken up by
        `load_weights`."""
        async with self._moving:
            await self._learner.sleep()
            self.owner = "engine"

    async def _to_learner(self) -> None:
        async with self._moving:
            if self.owner == "engine":
                await self._settle()
                await self._engine.sleep()
                await self._learner.wake()
                self.owner = "learner"

    async def _to_engine(self) -> None:
        async with self._moving:
            if self.owner == "learner":
                await self._learner.sleep()
                await self._engine.wake()
                self.owner = "engine"


def sleeping_engine(engine: Engine) -> SleepingEngine:
    """The engine as one that can sleep. Raises ConfigError if it, or one of its servers, cannot."""
    if not isinstance(engine, SleepingEngine):
        raise ConfigError(
            "resources.colocated: this engine cannot sleep; choose engine.name = 'embedded', "
            "'vllm' or 'sglang'"
        )
    if isinstance(engine, EnginePool):
        engine.check_sleep()
    return engine


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


def make_sender(
    config: EngineConfig, learner: DeepSpeedLearner, folder: Path
) -> LearnerSender | None:
    """The learner's side of weights by broadcast, if they go that way."""
    if isinstance(config, PooledEngineConfig) and config.new_weights == "broadcast":
        return LearnerSender(learner, folder, config.pool.broadcast_timeout_s)
    return None


def make_weights_directory() -> Path:
    """Where weights pass from learner to engine: shared memory where there is any."""
    memory = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="agentenv-", dir=memory if memory.is_dir() else None))
