"""The parts of a training run: questions, environments, learner, engine, and their wiring."""

from __future__ import annotations

import asyncio
import copy
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentenv.actor import Actor
from agentenv.config import Say
from agentenv.deadline import retrieve_exception, uncancelled
from agentenv.disk import (
    SHARED_MEMORY,
    WEIGHTS_KEY,
    WEIGHTS_PREFIX,
    explain,
    own_folder,
    remove_left,
)
from agentenv.encoder import encode_in_process
from agentenv.engine import Engine, EngineStart, ServerStarter
from agentenv.env import Env
from agentenv.errors import ConfigError
from agentenv.learners.deepspeed_learner import DeepSpeedLearner, start_ranks
from agentenv.learners.learner import frozen_model, read_saved
from agentenv.learners.lora import ADAPTER_FOLDER
from agentenv.learners.ranks import RankGroup, RemoteRanks
from agentenv.model_files import vocab_size
from agentenv.offload import in_thread
from agentenv.pipelines.config.cluster import RayCluster
from agentenv.pipelines.config.rl import DataConfig, EvalSet, Sampling, TrainConfig
from agentenv.pipelines.rl.placement import far_servers, open_ray, ray_ranks
from agentenv.pipelines.rl.publishing import (
    Colocation,
    Handover,
    ParityProbe,
    Publisher,
    make_publisher,
    sleeping_engine,
)
from agentenv.pipelines.run.checkpoints import COLD_START, link_model
from agentenv.pipelines.run.rundir import (
    RunDirectory,
)
from agentenv.pipelines.serving import gpus_of_ranks, learner_gpus, trains_on_gpu, vllm_hint
from agentenv.pipelines.setup.assembly import (
    EVALUATING,
    TRAINED,
    TRAINING,
    AskingAssembly,
    Questions,
    SetConfig,
    actor_seed,
    load_set,
    load_training,
    once,
    training_set,
)
from agentenv.pipelines.setup.checks import refuse
from agentenv.pipelines.setup.environments import try_env
from agentenv.pipelines.setup.memory import Passage, find_passage, stored_bytes
from agentenv.pipelines.supervised.data import Demonstrations, check_stages, load_demonstrations
from agentenv.pipelines.workers.ray_placement import RayPlacement
from agentenv.plan import RolloutPlan
from agentenv.types import Task

logger = logging.getLogger(__name__)

NUM_PROBE_PROMPTS = 8
MEMORY = SHARED_MEMORY
LEARNER_LOG = "learner.log"
LEARNER_READY = "learner-ready"


@dataclass
class Parts:
    """The parts that the loop works with. `overlapping` is the actor of evaluations beside the
    training, on an engine of its own; `demonstrations` are those of a cold start that is still to
    come, and those that measure it."""

    tokenizer: Any
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
    overlapping: Actor | None
    demonstrations: tuple[Demonstrations, Demonstrations] | None
    vocab_size: int = 0  # of the plan
    model: Path = Path()  # where weights, or the tokenizer of a rollout worker, are read from
    urls: dict[str, str] = field(default_factory=dict)  # of roles
    ray: RayPlacement | None = None
    handover: Handover = field(default_factory=Handover)

    async def publish(self) -> None:
        """New weights into the engine while rollouts are running, and a probe of them begun."""
        await self.publisher.publish()
        self.probe.start()


Build = Callable[
    [TrainConfig, RunDirectory, Path | None, AsyncExitStack, Say], Coroutine[Any, Any, Parts]
]


async def build_parts(
    config: TrainConfig,
    run: RunDirectory,
    checkpoint: Path | None,
    stack: AsyncExitStack,
    say: Say,
) -> Parts:
    """Check and build everything; `stack` closes it. Raises ConfigError or DataError for the
    user's mistakes. With a checkpoint, engine and learner start from it and no set-up is run."""
    assembly = TrainingAssembly(config, run.path, checkpoint, stack, say)
    if not assembly.is_wide:  # memory that a model may need
        await in_thread(remove_left, MEMORY, WEIGHTS_PREFIX)
    await in_thread(remove_left, run.path, WEIGHTS_PREFIX)
    cluster = config.cluster
    if isinstance(cluster, RayCluster):
        await refuse(assembly, "configuration")
        ray = assembly.ray = await open_ray(config, cluster, run.path, stack, say)
        if cluster.engines:
            assembly.engine_servers = far_servers(cluster, ray, run.path, stack, say)
        if cluster.learner:
            assembly.remote_ranks = ray_ranks(cluster, ray)
    if checkpoint is None:  # else it has been found in order before
        await refuse(assembly, "files")
    async with assembly.starting():
        await refuse(assembly, first="model" if checkpoint is None else "configuration")
        return await assembly.parts()


class TrainingAssembly(AskingAssembly[TrainConfig]):
    """Builds the parts of one training run."""

    is_whole = True

    def __init__(
        self,
        config: TrainConfig,
        folder: Path,
        checkpoint: Path | None,
        stack: AsyncExitStack,
        say: Say,
    ) -> None:
        trained = training_set(config)
        self._starting: asyncio.Task[object] | None = None
        sets = {TRAINED: trained}
        for name, one in config.eval.sets.items():
            sets[eval_key(name)] = replace(
                trained,
                key=eval_key(name),
                rows=one,
                sampling=config.sampling.eval,
                num_samples=one.num_samples,
            )
        super().__init__(
            config,
            folder,
            stack,
            say,
            checkpoint,
            sets=sets,
        )
        self.ray: RayPlacement | None = None
        self.engine_servers: ServerStarter = self.servers
        self.remote_ranks: RemoteRanks | None = None

    @once
    async def model(self) -> Path:
        """Where the weights begin; of a checkpoint what stays when that is pruned, since servers
        that start again, and each publish, read from it."""
        if self.checkpoint is None:
            return await self.own_model(self.config.model.path)
        folder = self.folder / "resumed"
        self.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return await in_thread(link_model, self.checkpoint, folder)

    async def contexts(self) -> Sequence[int]:
        model, config = await self.model(), self.config
        found = [config.engine.max_context(model)]
        if config.eval.engine is not None:
            found.append(config.eval.engine.max_context(model, "eval.engine"))
        return found

    async def read_rows(self, one: SetConfig) -> Sequence[Task]:
        rows, env_id = one.rows, one.env.id
        if isinstance(rows, DataConfig):
            return await load_training(rows, env_id, self.resolve, self.say, self.ends)
        assert isinstance(rows, EvalSet)
        return await load_set(
            rows.path, env_id, rows, self.resolve, self.say, one.key, rows.max_tasks, self.ends
        )

    @once
    async def gpus(self) -> list[str]:
        """The GPUs of the learner's ranks; the engine's servers get others."""
        config = self.config
        if isinstance(config.cluster, RayCluster) and config.cluster.learner:
            return []  # theirs are their nodes'
        gpus = learner_gpus(config.resources, config.engine, config.learner, self.servers.gpus)
        return gpus or (gpus_of_ranks() if config.learner.launch == "local" else [])

    @once
    async def urls(self) -> dict[str, str]:
        """Engine and learner have their GPUs before the servers of roles take theirs."""
        await self.gpus()
        return await super().urls()

    @once
    async def num_steps(self) -> int:
        """Number of updates of the run."""
        num_tasks = len((await self.questions())[TRAINED].tasks)
        return self.config.train.count_steps(num_tasks, self.config.queue.groups_per_step)

    @once
    async def probe_prompts(self) -> list[list[int]]:
        """Prompts of the first training questions, for the parity probe."""
        questions = (await self.questions())[TRAINED]
        prompts = []
        for task in questions.tasks[:NUM_PROBE_PROMPTS]:
            messages, info = await try_env(questions.make_env, task)
            prompts.append(questions.renderer.prompt(messages, info.get("tools", ())))
        return prompts

    @once
    async def demonstrations(self) -> tuple[Demonstrations, Demonstrations] | None:
        """Of the cold start: those to imitate, and those that measure; None: it is done, or there
        is none."""
        sft = self.config.sft
        resumed = self.checkpoint
        if sft is None or not (resumed is None or resumed.name.startswith(COLD_START)):
            return None
        renderer = (await self.renderers())[TRAINED]
        messages, info = (await self.episodes())[TRAINED]
        tools = list(info.get("tools", ()))
        system = next((one.content for one in messages if one.role == "system"), "")
        learned, gate = [
            await in_thread(load_demonstrations, self.resolve(path), renderer, tools, system)
            for path in (sft.data, sft.gate)
        ]
        check_stages(sft, learned)
        return learned, gate

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Slow parts start while other work goes on inside: all of a run that was found in order
        before, else the ranks of the learner, which import for seconds."""
        work: Coroutine[Any, Any, object]
        if self.checkpoint is not None and not self.config.roles:  # whose servers come first
            work = self.learner_and_engine()
        elif self.checkpoint is not None or self.config.learner.launch == "local":
            work = self.ranks()
        else:
            yield
            return
        starting = self._starting = asyncio.create_task(work)
        try:
            yield
        finally:
            starting.add_done_callback(
                retrieve_exception
            )  # `parts` has raised it, unless another came before
            starting.cancel()
            await asyncio.wait([starting])

    @once
    async def ranks(self) -> RankGroup:
        """Those of the learner, with nothing in them yet. They leave no log that nobody needs."""
        log = self.folder / LEARNER_LOG
        is_new = not log.exists()

        def forget_logs() -> None:
            for path in self.folder.glob(f"{log.stem}*{log.suffix}") if is_new else ():
                path.unlink()

        async def close() -> None:
            try:
                await group.close()
            finally:
                if "learner" not in self.built:
                    forget_logs()

        try:
            group = await start_ranks(
                self.config.learner, log, await self.gpus(), self.remote_ranks
            )
        except asyncio.CancelledError:  # the run is refused
            forget_logs()
            raise
        self.stack.push_async_callback(close)
        return group

    @once
    async def learner(self) -> DeepSpeedLearner:
        """The learner, started, at the policy version of the checkpoint; asleep where it shares its
        GPUs with the engine."""
        config, gpus = self.config, await self.gpus()
        learner = await DeepSpeedLearner.start(
            config.learner,
            config.algorithm,
            frozen_model(self.checkpoint) or await self.model(),
            self.folder / LEARNER_LOG,
            seed=config.run.seed,
            gpus=gpus,
            ranks=await self.ranks(),
        )
        self.stack.push_async_callback(learner.close)
        if self.checkpoint is not None:
            await learner.load(self.checkpoint / "trainer")
        if config.engine.starts_servers:  # which come up meanwhile
            await learner.warm_up()
        if config.resources.in_turn:
            await learner.sleep()
        return learner

    @once
    async def engine(self) -> Engine:
        """The engine, started, at the policy version of the checkpoint."""
        config, checkpoint, model = self.config, self.checkpoint, await self.model()
        rank = adapter_rank(config)
        await self.gpus()
        if hint := await in_thread(vllm_hint, config.engine, len(self.servers.gpus.visible)):
            self.say(hint)
        return await config.engine.start(
            EngineStart(
                model=(frozen_model(checkpoint) or model) if rank else model,
                tokenizer=await self.tokenizer(),
                policy_version=(
                    0 if checkpoint is None else read_saved(checkpoint / "trainer").policy_version
                ),
                limits=config.limits,
                stack=self.stack,
                servers=self.engine_servers,
                seed=config.run.seed,
                colocated=config.resources.colocated,
                lora_rank=rank,
                adapter=model / ADAPTER_FOLDER if rank and checkpoint else None,
                gate=await self.gate(),
            )
        )

    @once
    async def gate(self) -> Path | None:
        """The file by which the learner opens its GPUs to servers that start beside it; None: they
        share none, or the servers cannot wait."""
        config = self.config
        waits = config.engine.starts_servers and config.engine.can_map
        if config.resources.colocated and waits and self.engine_servers is self.servers:
            return await self.weights() / LEARNER_READY
        return None

    async def _ready_learner(self) -> DeepSpeedLearner:
        """The learner, which from now on holds the memory of its GPUs that it keeps."""
        learner, gate = await self.learner(), await self.gate()
        if gate is not None:
            await in_thread(gate.touch)
        return learner

    async def learner_and_engine(self) -> tuple[DeepSpeedLearner, Engine]:
        """Started side by side, or one after the other where an engine that cannot wait for the
        learner is on its GPUs."""
        if self.config.resources.colocated and await self.gate() is None:
            return await self.learner(), await self.engine()
        first = asyncio.create_task(self._ready_learner())
        second = asyncio.create_task(self.engine())
        try:
            return await asyncio.gather(first, second)
        finally:  # where one fails, the other ends too
            for task in (first, second):
                task.cancel()
            await asyncio.wait((first, second))

    async def parts(self) -> Parts:
        """All parts, started."""
        config = self.config
        questions, prompts = await self.questions(), await self.probe_prompts()
        if self._starting is not None:
            await self._starting
        learner, engine = await self.learner_and_engine()
        probe = ParityProbe(engine, learner, prompts)
        self.stack.push_async_callback(probe.close)
        colocation, handover = None, Handover()
        if config.resources.in_turn:
            colocation = Colocation(sleeping_engine(engine), learner, probe, handover)
        trained = questions[TRAINED]
        encode_in_process(trained.renderer, self.stack)
        make_env = await self.make_env(TRAINED)
        eval_actor = self._actor(trained, make_env, config.sampling.eval, engine, EVALUATING)
        num_words = vocab_size(await self.model())
        return Parts(
            tokenizer=await self.tokenizer(),
            tasks=trained.tasks,
            eval_tasks={name: questions[eval_key(name)].tasks for name in config.eval.sets},
            num_steps=await self.num_steps(),
            plan=config.algorithm.plan(num_words),
            engine=engine,
            learner=learner,
            actor=self._actor(trained, make_env, config.sampling.train, engine, TRAINING),
            eval_actor=eval_actor,
            probe=probe,
            publisher=make_publisher(
                config, engine, learner, await self.weights(), colocation, handover
            ),
            handover=handover,
            overlapping=await self._overlapping(eval_actor, learner),
            demonstrations=await self.demonstrations(),
            vocab_size=num_words,
            model=await self.model(),
            urls=await self.urls(),
            ray=self.ray,
        )

    @once
    async def weights(self) -> Path:
        """A folder through which weights pass from learner to engine."""
        place = (await self.passage()).folder
        return await uncancelled(in_thread(self.stack.enter_context, _made(place)))

    @once
    async def passage(self) -> Passage:
        """A folder that all machines with an engine or the learner see; else shared memory, where
        that has room. Raises ConfigError where nothing has."""
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

    @property
    def is_wide(self) -> bool:
        """Whether an engine or the learner may be on another machine."""
        cluster = self.config.cluster
        return isinstance(cluster, RayCluster) and bool(cluster.engines or cluster.learner)

    def _actor(
        self,
        questions: Questions,
        make_env: Callable[[Task], Env],
        sampling: Sampling,
        engine: Engine,
        use: str,
    ) -> Actor:
        return Actor(
            engine,
            questions.renderer,
            make_env,
            self.config.limits,
            sampling.params(),
            actor_seed(self.config, sampling, use),
        )

    async def _overlapping(self, actor: Actor, learner: DeepSpeedLearner) -> Actor | None:
        """The actor of evaluations beside the training, if they have an engine: like `actor`,
        with equal seeds."""
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


@contextmanager
def _made(place: Path) -> Iterator[Path]:
    """A folder for new weights in `place`, which is made."""
    with ExitStack() as stack:
        try:
            place.mkdir(parents=True, exist_ok=True)
            own = stack.enter_context(own_folder(place, WEIGHTS_PREFIX))
        except OSError as error:
            reason = explain(error, WEIGHTS_KEY)
            raise ConfigError(f"cannot transfer new weights through {place}: {reason}") from error
        yield own


def adapter_rank(config: TrainConfig) -> int:
    """Rank of the LoRA adapters that the engine gets as new weights; 0: it gets whole models."""
    lora = config.learner.lora if config.engine.new_weights == "adapter" else None
    return 0 if lora is None else lora.r


def eval_key(name: str) -> str:
    """The key of an evaluation set, which is the set's name among all sets of a run."""
    return f"eval.sets.{name}"
