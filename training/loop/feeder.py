"""The feeder: starts a rollout for each slot of the queue, in the order of the task stream, and
keeps the table of in-flight rollouts.

The journal supplies trees that an earlier process finished, and the recorded part of trees that it
started; all others grow in this process or in a rollout worker.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agentenv.base.crashes import called
from agentenv.base.offload import in_thread
from agentenv.base.tree import PLAN, TrajectoryTree
from agentenv.base.types import Task
from agentenv.data.curriculum import Curriculum
from agentenv.data.dataset import TaskStream, parts_of
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.rollout.branch import BranchNow
from agentenv.rollout.frames import Frame, Recorded, Started
from agentenv.rollout.journal import Journal
from agentenv.rollout.queue import ReplayQueue
from agentenv.training.loop.batching import BatchBuilder
from agentenv.training.loop.clocks import adding
from agentenv.training.loop.parts import Parts

logger = logging.getLogger(__name__)
ROOM_S = 0.2  # between two checks whether a tree may begin


class Workers(Protocol):
    """Processes in which rollouts grow; `agentenv/cluster/workers.py` explains the methods."""

    is_over: bool  # the run has ended

    @property
    def num_open_envs(self) -> int: ...
    async def rollout(
        self, task: Task, *, index: int, recorded: Recorded | None = None, known: Any = None
    ) -> TrajectoryTree: ...
    def steer(self) -> None: ...
    def cancel(self, index: int, reason: str) -> bool: ...
    def behind(self) -> str: ...
    def places(self) -> dict[int, str]: ...
    async def wait_info(self, index: int) -> list[BranchNow] | None: ...
    def stats(self) -> dict[str, float]: ...
    def figures(self) -> Sequence[Any]: ...


class InflightRollout:
    """A tree that holds a slot, from its start until weights trained on it are live."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.began_s = asyncio.get_running_loop().time()
        self.growing: asyncio.Task[TrajectoryTree] | None = None
        self.num_known = 0  # nodes that an earlier process grew

    @property
    def has_ended(self) -> bool:
        """Whether the tree is complete and waits for the learner."""
        return self.growing is not None and self.growing.done()


@dataclass(eq=False)
class Feeder:
    """Feeds the queue of a run. A pause stops new trees, new turns, and updates."""

    parts: Parts
    queue: ReplayQueue
    batches: BatchBuilder
    journal: Journal | None

    def __post_init__(self) -> None:
        self.config, self.state = self.batches.config, self.batches.state
        self.workers: Workers | None = None  # None: rollouts grow in this process
        self.inflight: dict[int, InflightRollout] = {}  # by place in start order
        config, seed = self.config.data.curriculum, self.config.run.seed
        self.curriculum: Curriculum | None = None
        if config is not None:
            parts = parts_of(self.parts.tasks)
            self.curriculum = Curriculum(config, parts, seed, self.state.outcomes)
        self.held_back = {"s": 0.0}  # seconds for which new trees had to wait
        self._resumed = asyncio.Event()  # cleared during a pause
        self._resumed.set()

    async def run(self, rollouts: asyncio.TaskGroup) -> None:
        """Start rollouts as slots allow; without refill, only as many as the run will train."""
        parts, config = self.parts, self.config
        self._first = self.state.position, parts.learner.policy_version
        stream = TaskStream(parts.tasks, config.run.seed, self.state.position, self.curriculum)
        left = (parts.num_steps - self.state.step) * self.queue.groups_per_step
        end = math.inf if config.refills else self.state.position + left
        while stream.position < end:
            position, journal = stream.position, self.journal
            is_new = journal is None or not journal.earlier.started(position)
            early_s = await self.queue.reserve(at_once=not is_new)
            await self._until_allowed()
            await self._until_room()
            task = stream.next("" if journal is None else journal.earlier.drawn(position))
            if is_new:
                drawn = "" if self.curriculum is None else task.id
                self.note(Started(position, self.state.step, round(early_s, 3), drawn))
            self.state.counters.offered += 1
            one = self.inflight[position] = InflightRollout(task)
            one.growing = rollouts.create_task(self._roll_out(one, position))
            self.queue.put(one.growing, is_new=is_new)
            await asyncio.sleep(0)  # yield: many slots may be free
        self.queue.finish()

    def note(self, frame: Frame) -> None:
        """Write an event to the journal, if there is one."""
        if self.journal is not None:
            self.journal.append(frame)

    async def learned(self, trees: Sequence[TrajectoryTree]) -> dict[str, float]:
        """Update the curriculum and what the plan knows with delivered trees; returns metrics."""
        metrics: dict[str, float] = {}
        if self.curriculum is not None:
            self.curriculum.add(trees)
            metrics |= self.curriculum.stats()
        algorithm = self.config.algorithm
        if type(algorithm).learn is not Algorithm.learn:  # may take long
            metrics |= await in_thread(called, algorithm.learn, self.state.plan, trees)
        return metrics

    @property
    def is_paused(self) -> bool:
        return not self._resumed.is_set()

    def steer(self, *, pauses: bool) -> None:
        """Start no tree, turn or update from a pause on until its end; evaluations continue."""
        (self._resumed.clear if pauses else self._resumed.set)()
        (self.parts.actor.pause if pauses else self.parts.actor.resume)()
        if self.workers is not None:
            self.workers.steer()

    async def until_resumed(self) -> None:
        """Wait while the run is paused."""
        await self._resumed.wait()

    def num_open_envs(self) -> int:
        """Number of open environments, in this process and in workers."""
        in_workers = 0 if self.workers is None else self.workers.num_open_envs
        return self.parts.actor.envs.count + in_workers

    def taken(self, trees: list[TrajectoryTree]) -> dict[int, int]:
        """Remove trained trees from the table; returns the number of nodes of each that an earlier
        process grew."""
        found = {tree.index: self.inflight.pop(tree.index, None) for tree in trees}
        return {index: 0 if one is None else one.num_known for index, one in found.items()}

    async def _until_allowed(self) -> None:
        """Delay the next tree while the run is paused, or queue.max_rollouts trees grow."""
        allowed, queue = self.config.queue.max_rollouts or math.inf, self.queue
        while self.is_paused or queue.num_waiting - queue.num_ready >= allowed:  # noqa: ASYNC110
            await asyncio.sleep(ROOM_S)

    async def _until_room(self) -> None:
        """Delay the next tree while the engine or its caches are overloaded: growing trees then end
        sooner, and find their prefixes in the cache. At least one tree always grows."""
        with adding(self.held_back, "s"):
            while self.queue.num_waiting > self.queue.num_ready:
                if self.parts.engine.has_room(self.num_open_envs()):
                    return
                await asyncio.sleep(ROOM_S)

    async def _roll_out(self, one: InflightRollout, position: int) -> TrajectoryTree:
        """The tree at `position`: from the journal, continued from it, or grown anew."""
        recorded, journal = None, self.journal
        await asyncio.sleep(0)
        if journal is not None and journal.earlier.knows(position):
            recorded = await journal.recall(position, one.task)
            if recorded is not None and self._is_stale(recorded.tree):
                logger.warning("tree %d is older than queue.max_staleness; it restarts", position)
                recorded = None
            one.num_known = 0 if recorded is None else len(recorded.tree.nodes)
        if recorded is not None and recorded.is_finished:
            tree = recorded.tree
        else:
            tree = await self._grow(one, position, recorded)
        self.batches.credit(tree)  # now, while others grow, instead of for a whole step at once
        return tree

    def _is_stale(self, tree: TrajectoryTree) -> bool:
        """Whether a tree of an earlier process, which may have had more slots, could be trained too
        late: each step delivers at least `groups_per_step` trees, and publishes once at most."""
        position, version = self._first
        version += (tree.index - position) // self.queue.groups_per_step
        return version - tree.policy_version > self.queue.max_staleness

    async def _grow(
        self, one: InflightRollout, position: int, recorded: Recorded | None
    ) -> TrajectoryTree:
        """Grow the tree, in a worker or in this process."""
        parts, journal, known = self.parts, self.journal, self.state.plan.get(PLAN)
        if self.workers is not None:
            return await self.workers.rollout(
                one.task, index=position, recorded=recorded, known=known
            )
        return await parts.actor.rollout(
            one.task,
            parts.plan,
            index=position,
            known=known,
            record=None if journal is None else journal.record(position),
            recorded=recorded,
        )
