"""A rollout worker: an event loop with its own actor, connected to a controller. It sends trees
turn by turn, as the frames of the controller's journal.

The supervisor, Ray, or a cluster's job starts
`python -m agentenv.training.workers.rollout_worker`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from agentenv.adapters.trial import watch
from agentenv.assembly.keys.cluster import Setup, SpreadCluster, read_setup
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.assembly import TRAINED, RolloutAssembly, actor_of, training_set
from agentenv.assembly.run.waits import WaitWatch
from agentenv.assembly.run.watchdog import ended_when_held
from agentenv.base.config import Reporter, build_config
from agentenv.base.model_files import read_eos_ids
from agentenv.cluster import messages
from agentenv.cluster.engines import LeasedEngine, LinkedEngine
from agentenv.cluster.messages import Grow, WorkerFigures, pack
from agentenv.contract.env import close_shared, shared_stats
from agentenv.contract.plan import RolloutPlan
from agentenv.contract.server_config import KEY_ENV
from agentenv.engines.pool.pooled_engine import PooledEngineConfig
from agentenv.processes.link import Link
from agentenv.processes.worker_group import named, serve
from agentenv.rollout.actor import Actor
from agentenv.rollout.failure_log import MAX_TEXTS, Failure
from agentenv.rollout.failures import Failures
from agentenv.rollout.frames import RECORDED, Frame, framed
from agentenv.rollout.journal import TreeRecord
from agentenv.rollout.metrics import LoopLag
from agentenv.text.encoder import encode_in_process
from agentenv.training.workers.worker_process import main

logger = logging.getLogger(__name__)

SOON_S = 0.1  # between two checks whether a tree has started


class Frames:
    """The journal of a tree, over the link. `settings` and `incarnation`: those of the controller's
    journal."""

    def __init__(self, link: Link, number: int, settings: str, incarnation: int) -> None:
        self.settings, self.incarnation = settings, incarnation
        self._link, self._number = link, number

    def append(self, frame: Frame) -> None:
        """Send a frame."""
        tag = frame.__struct_config__.tag
        assert isinstance(tag, int)
        self._link.send(pack(messages.TreeFrame(self._number, tag, framed(frame))))

    async def commit(self) -> None:
        """Return at once: the controller waits until a tree is on the disk."""


class ReportedFailures(Failures):
    """Reports failures to the controller, which counts those of all workers. The worker's log has
    the traceback of the first failure of each cause."""

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
        """Report the end of a rollout, with or without a failure."""
        traced = self._traced
        if failure is not None and failure.same not in traced and len(traced) < MAX_TEXTS:
            traced.add(failure.same)
            logger.info("%s", failure, exc_info=error)
        self._link.send(pack(messages.RolloutEnded(failure)))


@dataclass(eq=False)
class RolloutWorker:
    """Grows trees on `actor` with `plan` for the controller at the other end of the link.

    `engine`: that of the actor; it sends its requests over the link. `look` may add figures to a
    heartbeat.
    """

    actor: Actor
    plan: RolloutPlan
    link: Link
    engine: LinkedEngine | LeasedEngine
    settings: str = ""
    incarnation: int = 0
    look: Callable[[WorkerFigures], None] = lambda figures: None

    def __post_init__(self) -> None:
        self._is_over = False
        self.actor.failures = ReportedFailures(self.link)
        self._rollouts: dict[int, tuple[asyncio.Task[None], int]] = {}  # with the tree's index

    async def serve(self) -> bool:
        """Work until the connection ends, then cancel the remaining rollouts. Returns whether the
        run was over."""
        async with asyncio.TaskGroup() as group:
            await serve(self.link, partial(self._take, group), self._beat)
            self.link.close()  # at once: the controller waits for pending messages
            for task, _ in self._rollouts.values():
                task.cancel()
        return self._is_over

    def _take(self, group: asyncio.TaskGroup, frame: bytes) -> None:
        request = messages.read_request(frame)
        match request:
            case Grow():
                self.engine.policy_version = request.policy_version
                task = group.create_task(self._grow(request))
                self._rollouts[request.number] = task, request.index
                task.add_done_callback(lambda _: self._rollouts.pop(request.number))
            case messages.Quit():
                if request.number in self._rollouts:
                    self._rollouts[request.number][0].cancel()
            case messages.Steer():
                (self.actor.pause if request.holds else self.actor.resume)()
            case messages.CancelTree() | messages.GetWaits():
                self._of_tree(request)
            case messages.Over():
                self._is_over = True
            case _:
                self.engine.handle(request)

    def leave(self, within_s: float) -> None:
        """Request no more trees: this process ends in `within_s` seconds."""
        self.link.send(pack(messages.Leaving(within_s)))

    def _of_tree(self, request: messages.CancelTree | messages.GetWaits) -> None:
        """Handle the request as soon as the tree grows; a new tree starts at once."""
        if request.number not in self._rollouts:
            return
        rollout = self.actor.growing(self._rollouts[request.number][1])
        if rollout is None:
            asyncio.get_running_loop().call_later(SOON_S, self._of_tree, request)
        elif isinstance(request, messages.GetWaits):
            self.link.send(pack(messages.CurrentWaits(request.number, rollout.now())))
        else:
            rollout.cancel(request.reason)

    async def _grow(self, request: Grow) -> None:
        recorded = None if request.recorded is None else RECORDED.decode(request.recorded)
        frames = Frames(self.link, request.number, self.settings, self.incarnation)
        try:
            await self.actor.rollout(
                request.task,
                self.plan,
                index=request.index,
                session=request.session,
                known=request.known,
                record=TreeRecord(frames, request.index, request.number),
                recorded=recorded,
            )
        except Exception as error:
            self.link.send(pack(messages.Refused(request.number, *named(error))))

    def _beat(self) -> bytes:
        actor = self.actor
        found = WorkerFigures(
            num_open_envs=actor.envs.count,
            hits=actor.prefixes.drain(),
            probe_waits_s=actor.probes.drain(),
        )
        self.look(found)
        return pack(found)


class WorkerAssembly(RolloutAssembly[TrainConfig]):
    """The parts of a rollout worker: set-up, model and servers of roles already exist."""

    def __init__(
        self, config: TrainConfig, setup: Setup, stack: AsyncExitStack, report: Reporter, peer: str
    ) -> None:
        super().__init__(
            config, Path(setup.folder), stack, report, sets={TRAINED: training_set(config)}
        )
        self._model = Path(setup.model)
        urls = {name: seen_from_here(url, peer) for name, url in setup.urls.items()}
        self.built |= {"urls": urls, "set_up": None}

    async def model(self) -> Path:
        return self._model


LOOPBACK = re.compile(r"(?<=//)(127\.0\.0\.1|localhost)(?=[:/]|$)")


def seen_from_here(url: str, controller: str) -> str:
    """A URL of the controller, with its loopback address replaced by its network address."""
    return LOOPBACK.sub(controller, url)


async def make_engine(
    assembly: WorkerAssembly, setup: Setup, link: Link
) -> LinkedEngine | LeasedEngine:
    """The engine: over the servers of the controller's pool, or in the controller's process."""
    config = assembly.config.engine
    if not setup.is_leased:
        return LinkedEngine(link)
    assert isinstance(config, PooledEngineConfig)
    model = await assembly.model()
    os.environ[KEY_ENV] = setup.key
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
    frame: bytes, link: Link, stack: AsyncExitStack, report: Reporter, number: int
) -> RolloutWorker:
    """The worker with this number; `stack` closes its parts."""
    setup = read_setup(frame)
    config = build_config(TrainConfig, setup.config, "the controller")
    assembly = WorkerAssembly(config, setup, stack, report, link.peer)
    stack.push_async_callback(close_shared)
    renderer = (await assembly.renderers())[TRAINED]
    encode_in_process(renderer, stack)
    engine = await make_engine(assembly, setup, link)
    stack.push_async_callback(engine.close)
    actor = actor_of(config, engine, renderer, (await assembly.makers())[TRAINED])
    watch(actor, config)
    lag = LoopLag()
    waits = WaitWatch(lambda: [actor], lambda text: link.send(pack(messages.Notice(text))))

    def look(figures: WorkerFigures) -> None:
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
    for monitor in (lag.run(), waits.run()):
        stack.callback(asyncio.create_task(monitor).cancel)
    return worker


if __name__ == "__main__":
    sys.exit(main(build))
