"""The parts of a training run: questions, environments, learner, engine, and their wiring."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentenv.assembly.keys.cluster import RayCluster
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.assembly import (
    TRAINED,
    RolloutAssembly,
    actor_of,
    once,
    start_engine,
    training_set,
)
from agentenv.assembly.parts.environments import try_env
from agentenv.assembly.run.kept import find_checkpoint, link_model
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.serving.gpus import gpus_of_ranks, learner_gpus
from agentenv.base.config import Reporter
from agentenv.base.deadline import cancel_all, retrieve_exception, uncancelled
from agentenv.base.disk import own_folder
from agentenv.base.disk_errors import WEIGHTS_KEY, WEIGHTS_PREFIX, explain
from agentenv.base.errors import ConfigError
from agentenv.base.model_files import vocab_size
from agentenv.base.offload import in_thread
from agentenv.base.types import Task
from agentenv.contract.engine import Engine, ServerStarter
from agentenv.contract.plan import RolloutPlan
from agentenv.learners.keys import frozen_model, read_saved
from agentenv.learners.lora import ADAPTER_FOLDER
from agentenv.learners.ranks.learner import DeepSpeedLearner, start_ranks
from agentenv.learners.ranks.rank_group import RankGroup, RemoteRanks
from agentenv.processes.supervisor import Placement
from agentenv.rollout.actor import Actor
from agentenv.text.encoder import encode_in_process
from agentenv.training.loop.parity import ParityProbe
from agentenv.training.loop.publishers import Publisher, make_publisher

logger = logging.getLogger(__name__)

NUM_PROBE_PROMPTS = 8
LEARNER_LOG = "learner.log"
LEARNER_READY = "learner-ready"


@dataclass
class Parts:
    """The parts of the loop. `demonstrations`: of a pending cold start, for training and for its
    gate."""

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
    demonstrations: Any
    vocab_size: int = 0  # for the plan
    model: Path = Path()  # with weights, and the tokenizer of rollout workers
    teacher: Path | None = None  # on the learner's ranks
    urls: dict[str, str] = field(default_factory=dict)  # of roles
    ray: Placement | None = None

    async def publish(self) -> None:
        """Publish new weights to the engine while rollouts run, and start a parity probe."""
        await self.publisher.publish()
        self.probe.start()


Build = Callable[
    [TrainConfig, RunDirectory, Path | None, AsyncExitStack, Reporter], Coroutine[Any, Any, Parts]
]


class LoopAssembly(RolloutAssembly[TrainConfig]):
    """Builds the parts of one training run; `training/start.py` adds what depends on provinces."""

    is_whole = True

    def __post_init__(self) -> None:
        super().__post_init__()
        trained, sampling = training_set(self.config), self.config.sampling.eval
        self.sets = {TRAINED: trained}
        for name, one in self.config.eval.sets.items():
            self.sets[eval_key(name)] = replace(
                trained,
                key=eval_key(name),
                rows=one,
                sampling=sampling,
                num_samples=one.num_samples,
            )
        self._starting: asyncio.Task[object] | None = None
        self.ray: Placement | None = None
        self.engine_servers: ServerStarter = self.servers
        self.remote_ranks: RemoteRanks | None = None

    @once
    async def model(self) -> Path:
        """The directory of the initial weights. A checkpoint is linked into the run's folder, since
        restarted servers and each publish read it after the checkpoint may have been removed."""
        if self.checkpoint is None:
            return await self.own_model(self.config.model.path)
        folder = self.folder / "resumed"
        self.stack.callback(shutil.rmtree, folder, ignore_errors=True)
        return await in_thread(link_model, self.checkpoint, folder)

    async def contexts(self) -> Sequence[int]:
        return [self.config.engine.max_context(await self.model())]

    @once
    async def gpus(self) -> list[str]:
        """The GPUs of the learner's ranks; the engine's servers get others."""
        config = self.config
        if isinstance(config.cluster, RayCluster) and config.cluster.learner:
            return []  # Ray assigns the GPUs of its nodes
        gpus = learner_gpus(config.resources, config.engine, config.learner, self.servers.gpus)
        return gpus or (gpus_of_ranks() if config.learner.launch == "local" else [])

    @once
    async def urls(self) -> dict[str, str]:
        """The URLs of roles. Engine and learner reserve their GPUs before the servers of roles."""
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

    async def demonstrations(self) -> Any:
        """Demonstrations of a pending cold start, for training and for its gate; None if none is
        pending."""
        raise NotImplementedError

    async def passage(self) -> Any:
        """Its `folder`, seen by all machines with an engine or the learner, is for new weights.
        Raises ConfigError without enough space."""
        raise NotImplementedError

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        """Start slow parts while the body runs: learner and engine of a resumed run, whose checks
        have passed before; else the learner's ranks, whose imports take seconds."""
        work: Coroutine[Any, Any, object]
        if self.checkpoint is not None and not self.config.roles:  # servers of roles come first
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
            starting.add_done_callback(retrieve_exception)  # `parts` raises it, if no other
            starting.cancel()
            await asyncio.wait([starting])

    @once
    async def ranks(self) -> RankGroup:
        """The learner's ranks, still empty. Their logs are removed unless the learner is built."""
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
        except asyncio.CancelledError:  # a check failed
            forget_logs()
            raise
        self.stack.push_async_callback(close)
        return group

    @property
    def teacher_on_ranks(self) -> Path | None:
        """The directory of a teacher on the learner's ranks."""
        role = self.config.roles.get("teacher")
        if role is None or role.engine != "learner":
            return None
        return find_checkpoint(self.resolve(role.model))

    @once
    async def learner(self) -> DeepSpeedLearner:
        """The learner, started, at the policy version of the checkpoint; asleep if it shares its
        GPUs with the engine."""
        config = self.config
        learner = await DeepSpeedLearner.start(
            config.learner,
            config.algorithm,
            frozen_model(self.checkpoint) or await self.model(),
            self.folder / LEARNER_LOG,
            seed=config.run.seed,
            ranks=await self.ranks(),
            teacher=self.teacher_on_ranks,
        )
        self.stack.push_async_callback(learner.close)
        if self.checkpoint is not None:
            await learner.load(self.checkpoint / "trainer")
        if config.resources.in_turn:
            await learner.sleep()
        return learner

    @once
    async def engine(self) -> Engine:
        """The engine, started, at the policy version of the checkpoint."""
        config, checkpoint, model = self.config, self.checkpoint, await self.model()
        rank, version = config.adapter_rank, 0
        if checkpoint is not None:
            version = read_saved(checkpoint / "trainer").policy_version
        await self.gpus()
        return await start_engine(
            self,
            config.limits,
            self.engine_servers,
            config.run.seed,
            model=(frozen_model(checkpoint) or model) if rank else model,
            policy_version=version,
            colocated=config.resources.colocated,
            lora_rank=rank,
            adapter=model / ADAPTER_FOLDER if rank and checkpoint else None,
            gate=await self.gate(),
        )

    @once
    async def gate(self) -> Path | None:
        """A file whose creation lets servers on the learner's GPUs allocate memory; None if they
        share no GPUs, or the servers cannot wait."""
        config = self.config
        waits = config.engine.launched is not None and config.engine.capabilities.can_map
        if config.resources.colocated and waits and self.engine_servers is self.servers:
            return await self.weights() / LEARNER_READY
        return None

    async def _ready_learner(self) -> DeepSpeedLearner:
        """The learner, after it has allocated its permanent GPU memory."""
        learner, gate = await self.learner(), await self.gate()
        if gate is not None:
            await in_thread(gate.touch)
        return learner

    async def learner_and_engine(self) -> tuple[DeepSpeedLearner, Engine]:
        """Start learner and engine concurrently, or in sequence if they share GPUs and the engine
        cannot wait for the learner."""
        if self.config.resources.colocated and await self.gate() is None:
            return await self.learner(), await self.engine()
        first = asyncio.create_task(self._ready_learner())
        second = asyncio.create_task(self.engine())
        try:
            return await asyncio.gather(first, second)
        finally:  # if one fails, the other ends too
            await cancel_all((first, second))

    async def parts(self) -> Parts:
        """All parts, started."""
        config = self.config
        questions, prompts = await self.questions(), await self.probe_prompts()
        if self._starting is not None:
            await self._starting
        learner, engine = await self.learner_and_engine()
        probe = ParityProbe(engine, learner, prompts, sampling_at=config.sampling.at)
        self.stack.push_async_callback(probe.close)
        trained = questions[TRAINED]
        encode_in_process(trained.renderer, self.stack)
        given = config, engine, trained.renderer, trained.make_env
        num_words = vocab_size(await self.model())
        return Parts(
            tokenizer=await self.tokenizer(),
            tasks=trained.tasks,
            eval_tasks={name: questions[eval_key(name)].tasks for name in config.eval.sets},
            num_steps=await self.num_steps(),
            plan=config.algorithm.plan(num_words),
            engine=engine,
            learner=learner,
            actor=actor_of(*given),
            eval_actor=actor_of(*given, "eval"),
            probe=probe,
            publisher=make_publisher(config, engine, learner, probe, await self.weights()),
            demonstrations=await self.demonstrations(),
            vocab_size=num_words,
            model=await self.model(),
            teacher=self.teacher_on_ranks,
            urls=await self.urls(),
            ray=self.ray,
        )

    @once
    async def weights(self) -> Path:
        """A folder through which weights pass from learner to engine."""
        place = (await self.passage()).folder
        return await uncancelled(in_thread(_weights_folder, self.stack, place))

    @property
    def is_wide(self) -> bool:
        """Whether an engine or the learner may be on another machine."""
        cluster = self.config.cluster
        return isinstance(cluster, RayCluster) and bool(cluster.engines or cluster.learner)


def _weights_folder(stack: AsyncExitStack, place: Path) -> Path:
    """A folder for new weights in `place`, which is created if missing; `stack` removes it."""
    try:
        place.mkdir(parents=True, exist_ok=True)
        return stack.enter_context(own_folder(place, WEIGHTS_PREFIX))
    except OSError as error:
        reason = explain(error, WEIGHTS_KEY)
        raise ConfigError(f"cannot transfer new weights through {place}: {reason}") from error


def eval_key(name: str) -> str:
    """The configuration key of an evaluation set, its name among all sets of a run."""
    return f"eval.sets.{name}"
