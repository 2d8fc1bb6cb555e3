"""Publishers of weights from learner to engine: through a directory, by broadcast, through the
memory of shared GPUs; and the hand-over of these GPUs."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.deadline import uncancelled
from agentenv.base.errors import SHOWN, EngineDeadError, LearnerError
from agentenv.base.offload import in_thread
from agentenv.contract.engine import Engine
from agentenv.contract.weights import TransferError
from agentenv.engines.pool.pool import EnginePool
from agentenv.engines.pool.pooled_engine import PooledEngineConfig
from agentenv.learners.keys import Metrics
from agentenv.learners.ranks.learner import DeepSpeedLearner
from agentenv.learners.ranks.senders import LearnerSender, MemorySender
from agentenv.training.loop.clocks import Stopwatch
from agentenv.training.loop.parity import ParityProbe

logger = logging.getLogger(__name__)


class Handover(Stopwatch):
    """Seconds that engine and learner spend on the transfer of weights and GPUs, by part:

    sleep    engine or learner frees its GPU memory
    wake     the learner, or the engine with unchanged weights, allocates its GPU memory
    publish  the learner writes, shares or sends its weights
    load     the engine loads them; a sleeping engine wakes up, and the learner may fall asleep
             meanwhile
    """

    prefix = "handover/"
    METRICS = ("handover/sleep_s", "handover/wake_s", "handover/publish_s", "handover/load_s")

    def take(self) -> Metrics:
        """The seconds of all parts, and their sum, as metrics."""
        found = super().take()
        return dict.fromkeys(self.METRICS, 0.0) | found | {"handover/total_s": sum(found.values())}


@dataclass(eq=False)
class Colocation:
    """Ownership of GPUs that engine and learner share. `turn` becomes that of the learner: every
    command to it acquires the GPUs, and a turn keeps them for several commands.

        all serve --> sleep --> all train --> wake --> all serve
                                publish -----^  with the new weights

    While the learner trains, running and new rollouts wait, with their tokens, and their clocks
    stop. Before it sleeps, the engine completes the samples of the parity `probe`.
    """

    engine: Engine
    learner: DeepSpeedLearner
    probe: ParityProbe
    handover: Handover
    owner: Literal["engine", "learner"] = field(default="engine", init=False)

    def __post_init__(self) -> None:
        self._depth = 0
        self._moving = asyncio.Lock()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Inside, the learner owns the GPUs; reentrant."""
        self._depth += 1
        is_lost = False
        try:
            await self._to_learner()
            yield
        except LearnerError:
            is_lost = True  # the ranks may be gone, and a second error would hide the first
            raise
        finally:
            self._depth -= 1
            if not (self._depth or is_lost):
                await uncancelled(self._to_engine())  # a partial hand-over leaves both asleep

    async def release(self, *, is_counted: bool = True) -> None:
        """Within a turn: put the learner to sleep before `load_weights` wakes the engine up, or
        while it does (`is_counted` false: the time counts as load)."""
        async with self._moving:
            with self.handover.part("sleep") if is_counted else nullcontext():
                await self.learner.sleep()
            self.owner = "engine"

    async def _to_learner(self) -> None:
        async with self._moving:
            if self.owner == "engine":
                await self.probe.sampled()
                with suppress(EngineDeadError), self.handover.part("sleep"):
                    await self.engine.sleep()  # of a dead engine: the learner can still save
                with self.handover.part("wake"):
                    await self.learner.wake()
                self.owner = "learner"

    async def _to_engine(self) -> None:
        async with self._moving:
            if self.owner == "learner":
                with self.handover.part("sleep"):
                    await self.learner.sleep()
                with suppress(EngineDeadError), self.handover.part("wake"):
                    await self.engine.wake()  # if it is dead, the next request reports it
                self.owner = "engine"


@dataclass(eq=False)
class DirectoryPublisher:
    """The learner writes the whole model to `folder`, or only its LoRA adapter (`is_adapter`: the
    engine has the base model), and the engine loads it."""

    engine: Engine
    learner: DeepSpeedLearner
    folder: Path
    handover: Handover = field(default_factory=Handover)
    is_adapter: bool = False
    release: Callable[[], Awaitable[None]] | None = None  # of GPUs shared with the engine

    async def publish(self) -> None:
        version = self.learner.policy_version + 1
        async with self.learner.turn():
            with self.handover.part("publish"):
                folder = self.folder / f"v{version}"
                path = await self.learner.publish(folder, adapter_only=self.is_adapter)
            if self.release is not None:
                await self.release()
        with self.handover.part("load"):
            await self.engine.load_weights(path, version)
        await in_thread(shutil.rmtree, self.folder / f"v{version - 1}", ignore_errors=True)


@dataclass(eq=False)
class BroadcastPublisher:
    """The ranks of the learner send the weights to the servers of a pool, without the disk. The
    sender writes a folder for servers that cannot receive."""

    engine: EnginePool
    sender: LearnerSender
    handover: Handover

    async def publish(self) -> None:
        with self.handover.part("publish"):
            version = await self.sender.publish()
        with self.handover.part("load"):
            await self.engine.receive_weights(self.sender, version)
        await in_thread(shutil.rmtree, self.sender.folder / f"v{version - 1}", ignore_errors=True)


MAX_FAILURES = 2  # consecutive updates; each failure loses the running requests


@dataclass(eq=False)
class MemoryPublisher:
    """Servers read the weights from memory that the learner shares. Without memory for a copy, an
    update uses a directory; after MAX_FAILURES consecutive failures of servers, all later updates
    do."""

    engine: EnginePool
    sender: MemorySender
    colocation: Colocation | None = None
    handover: Handover = field(default_factory=Handover)

    async def publish(self) -> None:
        learner, folder = self.sender.learner, self.sender.folder
        before = learner.policy_version
        written: Path | None = None
        async with learner.turn():
            with self.handover.part("publish"):
                try:
                    if self.sender.num_failures < MAX_FAILURES:
                        await self.sender.publish(sleeps_next=self.colocation is not None)
                    else:
                        written = await learner.publish(folder / f"v{before + 1}")
                except TransferError as error:
                    logger.warning(
                        "this update sends weights through a directory: %s", error, extra=SHOWN
                    )
                    written = await learner.publish(folder / f"v{before + 1}")
            overlaps = written is None and self.sender.weights.has_room
            if self.colocation is not None and not overlaps:
                await self.colocation.release()
            with self.handover.part("load"):
                if written is not None:
                    await self.engine.load_weights(written, before + 1)
                elif self.colocation is not None and overlaps:
                    await self._take_overlapping(before + 1, self.colocation)
                else:
                    await self.engine.take_weights(self.sender, before + 1)
        if written is None and self.sender.num_failures == MAX_FAILURES:
            logger.warning(
                "servers cannot read the learner's memory: weights are sent through directories "
                "from now on",
                extra=SHOWN,
            )
        await in_thread(shutil.rmtree, folder / f"v{before}", ignore_errors=True)

    async def _take_overlapping(self, version: int, colocation: Colocation) -> None:
        """Let servers wake up and read the weights while the learner falls asleep; they allocate
        their caches afterwards."""
        asleep = asyncio.create_task(colocation.release(is_counted=False))
        self.sender.falling_asleep = asleep
        try:
            await self.engine.take_weights(self.sender, version)
        finally:
            self.sender.falling_asleep = None
            await uncancelled(asleep)


# Each publishes the weights as the next policy version; a sleeping engine wakes up with them.
Publisher = DirectoryPublisher | BroadcastPublisher | MemoryPublisher


def make_publisher(
    config: TrainConfig, engine: Engine, learner: DeepSpeedLearner, probe: ParityProbe, folder: Path
) -> Publisher:
    """The publisher for the transport that the engine's configuration names. If engine and learner
    use the GPUs in turn, the learner's turns become those of a Colocation."""
    colocation, handover = None, Handover()
    if config.resources.in_turn:
        engine.require("sleep")
        colocation = Colocation(engine, learner, probe, handover)
        learner.turn = colocation.turn
    kind = config.engine.new_weights
    if kind in ("adapter", "directory"):
        is_adapter = kind == "adapter"
        release = None if colocation is None else colocation.release
        return DirectoryPublisher(engine, learner, folder, handover, is_adapter, release)
    assert isinstance(config.engine, PooledEngineConfig)
    assert isinstance(engine, EnginePool)
    if config.engine.new_weights == "ipc":
        launched = config.engine.launched
        sender = MemorySender(learner, folder, 1 if launched is None else launched.servers_per_gpu)
        return MemoryPublisher(engine, sender, colocation, handover)
    broadcaster = LearnerSender(learner, folder, config.engine.pool.broadcast_timeout_s)
    return BroadcastPublisher(engine, broadcaster, handover)
