"""A rollout worker: an event loop with its own actor, linked to a controller. Trees travel as the
frames that the controller's journal writes, turn by turn.

`python -m agentenv.pipelines.workers.rollout_worker`, which the supervisor, Ray, or a job of a
cluster starts.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from agentenv.actor import Actor
from agentenv.cluster import messages
from agentenv.cluster.engines import LeasedEngine, LinkedEngine
from agentenv.cluster.messages import Figures, Grow, pack
from agentenv.config import Say, build_config
from agentenv.encoder import encode_in_process
from agentenv.engines.pool import PooledEngineConfig
from agentenv.env import close_shared, shared_stats
from agentenv.failures import MAX_TEXTS, Failure, Failures
from agentenv.frames import Frame, framed, unpack_recorded
from agentenv.journal import TreeRecord
from agentenv.link import Link
from agentenv.metrics import LoopLag
from agentenv.model_files import read_eos_ids
from agentenv.pipelines.config.cluster import FOLDER, Setup, SpreadCluster, read_setup
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.run.watchdog import Waits, ended_when_held
from agentenv.pipelines.setup.assembly import (
    TRAINED,
    TRAINING,
    AskingAssembly,
    actor_seed,
    training_set,
)
from agentenv.pipelines.workers import main
from agentenv.plan import RolloutPlan
from agentenv.worker_group import named, serve

logger = logging.getLogger(__name__)

SOON_S = 0.1  # until the next look whether a tree has begun


class Frames:
    """The link as the journal of one tree. `settings` and `incarnation` are those of the
    controller's journal."""

    def __init__(self, link: Link, number: int, settings: str, incarnation: int) -> None:
        self.settings, self.incarnation = settings, incarnation
        self._link, self._number = link, number

    def append(self, frame: Frame) -> None:
        """Send a frame."""
        tag = frame.__struct_config__.tag
        assert isinstance(tag, int)
        self._link.send(pack(messages.TreeFrame(self._number, tag, framed(frame))))

    async def commit(self) -> None:
        """Returns at once: it is the controller that waits until a tree is on the disk."""


class ReportedFailures(Failures):
    """Failures of a worker, which the controller counts with those of the others. The traceback of
    the first failure of each cause is in the worker's log."""

    def __init__(self, link: Link) -> None:
        super().__init__(1.0, strict=False)
        self._link = link
        self._traced: set[str] = set()

    def add(
        self,
        failure: Failure | None,
        error: BaseException | None = None,
        who: str = "",
        *,
        again: bool = False,
    ) -> None:
        """A rollout has ended, with a failure or without."""
        if failure is not None:
            self.num += 1
            if failure.same not in self._traced and len(self._traced) < MAX_TEXTS:
                self._traced.add(failure.same)
                logger.info("%s", self.log.redactor.text(str(failure)), exc_info=error)
        self._link.send(pack(messages.Ended(failure)))


class AskingEngine(Protocol):
    """The engine of a worker: LinkedEngine or LeasedEngine."""

    policy_version: int

    def handle(self, said: Any) -> None:
        """What the controller says of its turns, or of their places."""
        ...


class RolloutWorker:
    """Grows trees on `actor` by `plan` for the other end of the link.

    `engine` is the actor's, and asks over the link. `look` may add figures to a heartbeat.
    """

    def __init__(
        self,
        actor: Actor,
        plan: RolloutPlan,
        link: Link,
        engine: AskingEngine,
        *,
        settings: str = "",
        incarnation: int = 0,
        look: Callable[[Figures], None] = lambda figures: None,
    ) -> None:
        self._actor, self._plan, self._link, self._engine = actor, plan, link, engine
        self._settings, self._incarnation = settings, incarnation
        self._look = look
        self._is_over = False
        actor.failures = ReportedFailures(link)
        self._rollouts: dict[int, asyncio.Task[None]] = {}
        self._indices: dict[int, int] = {}  # of their trees

    async def serve(self) -> bool:
        """Until the other end is gone; then the rollouts that are left are cancelled. Whether its
        run was over."""
        async with asyncio.TaskGroup() as group:
            await serve(self._link, partial(self._take, group), self._beat)
            self._link.close()  # at once: the controller waits for what was sent before
            for task in self._rollouts.values():
                task.cancel()
        return self._is_over

    def _take(self, group: asyncio.TaskGroup, frame: bytes) -> None:
        asked = messages.read_asked(frame)
        match asked:
            case Grow():
                self._engine.policy_version = asked.policy_version
                task = self._rollouts[asked.number] = group.create_task(self._grow(asked))
                self._indices[asked.number] = asked.index
                task.add_done_callback(partial(self._forget, asked.number))
            case messages.Drop():
                if asked.number in self._rollouts:
                    self._rollouts[asked.number].cancel()
            case messages.Steer():
                (self._actor.pause if asked.holds else self._actor.resume)()
            case messages.CancelTree() | messages.Look():
                self._of_tree(asked)
            case messages.Over():
                self._is_over = True
            case _:
                self._engine.handle(asked)

    def say(self, text: str) -> None:
        """Report a sentence to people, through the controller."""
        self._link.send(pack(messages.Say(text)))

    def leave(self, within_s: float) -> None:
        """Ask for no more trees: this process ends within the time."""
        self._link.send(pack(messages.Leaving(within_s)))

    def _of_tree(self, asked: messages.CancelTree | messages.Look) -> None:
        """As soon as the tree has begun to grow, which a new one does at once."""
        index = self._indices.get(asked.number)
        rollout = None if index is None else self._actor.growing(index)
        if rollout is None:
            if index is not None and asked.number in self._rollouts:
                asyncio.get_running_loop().call_later(SOON_S, self._of_tree, asked)
        elif isinstance(asked, messages.Look):
            self._link.send(pack(messages.Looked(asked.number, rollout.now())))
        else:
            rollout.cancel(asked.reason)

    async def _grow(self, asked: Grow) -> None:
        recorded = None
        if asked.recorded is not None:
            recorded = unpack_recorded(asked.recorded)
        frames = Frames(self._link, asked.number, self._settings, self._incarnation)
        try:
            await self._actor.rollout(
                asked.task,
                self._plan,
                index=asked.index,
                session=asked.session,
                record=TreeRecord(frames, asked.index, asked.number),
                recorded=recorded,
                order=asked.order,
            )
        except Exception as error:
            self._link.send(pack(messages.Raised(asked.number, *named(error))))

    def _forget(self, number: int, task: object) -> None:
        del self._rollouts[number], self._indices[number]

    def _beat(self) -> bytes:
        actor = self._actor
        found = Figures(
            num_trees=len(self._rollouts),
            num_open_envs=actor.envs.count,
            num_cut=getattr(actor.renderer, "num_cut", 0),
            hits=actor.prefixes.drain(),
            probe_waits_s=actor.probes.drain(),
        )
        self._look(found)
        return pack(messages.Alive(found))


class WorkerAssembly(AskingAssembly[TrainConfig]):
    """The parts of a rollout worker: set-up, model and servers of roles are there."""

    def __init__(
        self, config: TrainConfig, setup: Setup, stack: AsyncExitStack, say: Say, peer: str
    ) -> None:
        super().__init__(
            config, Path(setup.folder), stack, say, sets={TRAINED: training_set(config)}
        )
        self._model = Path(setup.model)
        urls = {name: seen_from_here(url, peer) for name, url in setup.urls.items()}
        self.built |= {"urls": urls, "set_up": None}

    async def model(self) -> Path:
        return self._model


LOOPBACK = re.compile(r"(?<=//)(127\.0\.0\.1|localhost)(?=[:/]|$)")


def seen_from_here(url: str, controller: str) -> str:
    """A URL as the controller has it: its loopback is its address."""
    return LOOPBACK.sub(controller, url)


async def make_engine(
    assembly: WorkerAssembly, setup: Setup, link: Link
) -> LinkedEngine | LeasedEngine:
    """The servers of the controller's pool, or else the engine in the controller's process."""
    config = assembly.config.engine
    if not setup.is_leased:
        return LinkedEngine(link)
    assert isinstance(config, PooledEngineConfig)
    model = await assembly.model()
    make = config.server_maker(setup.vocab_size)
    return LeasedEngine(
        link,
        lambda url: make(seen_from_here(url, link.peer)),
        model,
        vocab_size=setup.vocab_size,
        eos_ids=read_eos_ids(model, await assembly.tokenizer()),
        config=config.pool,
        name=f"agentenv-{secrets.token_hex(6)}",
        seed=assembly.config.run.seed,
        entropies=config.entropies,
    )


async def build(
    frame: bytes, link: Link, stack: AsyncExitStack, say: Say, number: int
) -> RolloutWorker:
    """The worker of this number; `stack` closes its parts."""
    setup = read_setup(frame)
    config = build_config(TrainConfig, setup.config, "the controller")
    assembly = WorkerAssembly(config, setup, stack, say, link.peer)
    assembly.logs = assembly.folder / FOLDER / f"of-worker-{number}"
    stack.push_async_callback(close_shared)
    renderer = (await assembly.renderers())[TRAINED]
    encode_in_process(renderer, stack)
    sampling, engine = config.sampling.train, await make_engine(assembly, setup, link)
    stack.push_async_callback(engine.close)
    actor = Actor(
        engine,
        renderer,
        await assembly.make_env(TRAINED),
        config.limits,
        sampling.params(),
        actor_seed(config, sampling, TRAINING),
    )
    lag = LoopLag()
    waits = Waits(lambda: [actor], lambda text: worker.say(text))

    def look(figures: Figures) -> None:
        figures.env, figures.loop = shared_stats(), lag.figures()
        figures.behind = waits.longest()

    worker = RolloutWorker(
        actor,
        config.algorithm.plan(setup.vocab_size),
        link,
        engine,
        settings=setup.settings,
        incarnation=setup.incarnation,
        look=look,
    )
    if isinstance(config.cluster, SpreadCluster):
        stack.enter_context(ended_when_held(config.cluster.silence_s))
    for beside in (lag.run(), waits.run()):
        stack.callback(asyncio.create_task(beside).cancel)
    return worker


if __name__ == "__main__":
    sys.exit(main(build))
