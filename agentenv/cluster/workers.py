"""The controller's view of its rollout workers: assignment of trees to workers, and reassignment
after the loss of a worker.

    rollout(task, index) --Grow--> the worker with the fewest trees
            ^                          | TreeFrame by TreeFrame: to the journal, and kept here
            +---- the whole tree <-----+
            after the loss of a worker: its trees resume on others, from the last received frame

Feeder, queue, journal and the bound on staleness are in the controller. A worker whose machine is
about to shut down is drained: it gets no more trees, and finishes its trees as far as time permits.

A tree that is cancelled while it has no worker, on a user's request or as a poison task, ends here,
in the state of its last frame.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any

from agentenv.base.deadline import at_most, end
from agentenv.base.errors import TooManyFailuresError, WorkerError
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task
from agentenv.base.untrusted import packed
from agentenv.cluster import messages
from agentenv.cluster.engines import Leases, Turns
from agentenv.cluster.messages import WorkerFigures, pack
from agentenv.contract.engine import Engine
from agentenv.contract.plan import Independent, RolloutPlan
from agentenv.engines.pool.pool import EnginePool
from agentenv.processes import worker_group
from agentenv.processes.link import Link
from agentenv.rollout.actor import Actor
from agentenv.rollout.branch import BranchNow
from agentenv.rollout.frames import NUM_FIRST, Packed, Recorded, TreeFrames, WorkerLost
from agentenv.rollout.journal import Journal, TreeRecord

LOOK_S = 5.0  # for a worker to report the waits of a tree's branches
MAX_POISON = 3  # poison tasks without progress of any tree; more of them mean a broken worker
NUM_SHOWN = 8  # trees of a lost worker in a message; one of them may be a poison task


@dataclass(eq=False)
class _Growing:
    """A requested tree. `number` identifies it on the link of `worker`; None: it has no worker."""

    task: Task
    index: int
    session: str
    recorded: Recorded | None  # to resume from
    known: Any = None

    def __post_init__(self) -> None:
        self.frames = TreeFrames()  # since it has the worker
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.reply: asyncio.Future[list[BranchNow]] | None = None  # of a pending Look
        self.cancelled = ""  # the reason; empty: not cancelled
        self.number = -1
        self.worker: _Worker | None = None

    @property
    def has_come_further(self) -> bool:
        """Whether it made progress on its present worker."""
        return len(self.frames) > NUM_FIRST

    def state(self) -> Recorded | None:
        """Its current state."""
        return self.frames.recorded(self.task) or self.recorded


class _Worker(worker_group.Worker):
    """A connected rollout worker."""

    def __init__(self, name: str, link: Link, engine: Engine) -> None:
        super().__init__(name, link)
        self.turns = Turns(engine, link)
        self.leases = Leases(engine, link) if isinstance(engine, EnginePool) else None
        self.trees: dict[int, _Growing] = {}
        self.figures = WorkerFigures()
        self.num_ended = 0
        self.has_come_further = False  # one of its trees made progress
        self.idle = asyncio.Event()  # it has no trees
        self.draining: asyncio.Task[None] | None = None


def _destination(worker: _Worker) -> str:
    """The destination of the trees of a lost worker, for messages."""
    moved = sorted(growing.index for growing in worker.trees.values())
    shown = ", ".join(map(str, moved[:NUM_SHOWN]))
    more = f" and {len(moved) - NUM_SHOWN} more" if len(moved) > NUM_SHOWN else ""
    return f"trees {shown}{more} resume on other workers" if shown else "it had no trees"


class RolloutWorkers(worker_group.WorkerGroup[_Worker]):
    """`rollout` replaces `Actor.rollout`.

    `actor` is the controller's: workers use its engine, and its counters include theirs. `plan` is
    that of the trees; it determines the failed roots of a tree that is cancelled before its start.
    """

    read = staticmethod(messages.read_answer)

    def __init__(
        self,
        actor: Actor,
        *,
        silence_s: float,
        report: Callable[[str], None],
        journal: Journal | None = None,
        plan: RolloutPlan | None = None,
    ) -> None:
        super().__init__(report)
        self.silence_s = silence_s
        self.journal = journal
        self._plan: RolloutPlan = Independent(1) if plan is None else plan
        self.num_moved = 0  # trees resumed on other workers
        self._actor = actor
        self._waiting: list[_Growing] = []  # for a worker, or for the trial of a poison task
        self._poison = worker_group.PoisonTasks()
        self._num_poison = 0  # poison tasks found since a tree last made progress
        self._numbers = count()
        self._problem: Exception | None = None  # the next requested tree raises it
        self._is_steered = False  # new workers are paused too
        self.is_over = False  # the run has ended: workers need not reconnect

    # Trees

    async def rollout(
        self,
        task: Task,
        *,
        index: int,
        session: str = "",
        recorded: Recorded | None = None,
        known: Any = None,
    ) -> TrajectoryTree:
        """As `Actor.rollout`, on successive workers if some are lost; returns when the tree is in
        the journal, if there is one. Raises WorkerError when no worker is left."""
        if self._problem is not None:
            raise self._problem
        growing = _Growing(task, index, session, recorded, known)
        if self.journal is not None:
            self._poison.recall(index, self.journal.earlier.losses.pop(index, 0))
        try:
            while True:
                self._place(growing)
                await growing.ended
                if growing.worker is None:
                    return await self._end_here(growing)
                found = growing.frames.recorded(task)
                if found is not None and found.is_finished:
                    break
                self.report(f"tree {index} arrived incomplete from its worker and restarts")
                growing = _Growing(task, index, session, None, known)
        finally:
            self._release(growing)
        if self.journal is not None:
            await self.journal.commit()
        return found.tree

    async def _end_here(self, growing: _Growing) -> TrajectoryTree:
        """End a cancelled tree without a worker in its current state, also in the journal."""
        record = None
        if self.journal is not None:
            record = TreeRecord(self.journal, growing.index, next(self._numbers))
        num_lost = self._poison.num_lost(growing.index)
        tree = await self._actor.rollout(
            growing.task,
            self._plan,
            index=growing.index,
            session=growing.session,
            record=record,
            recorded=growing.recorded,
            cancelled=growing.cancelled,
        )
        self._remember(growing.index, num_lost)  # also if it is requested again, for other weights
        return tree

    def _place(self, growing: _Growing) -> None:
        """Give the tree to the worker with the fewest, unless it is cancelled."""
        most = worker_group.NUM_LOSSES + worker_group.NUM_TRIALS
        if self._poison.num_lost(growing.index) >= most and not growing.cancelled:
            self._num_poison += 1
            growing.cancelled = f"{most} workers died while growing it"
            self.report(
                f"tree {growing.index} (task {growing.task.id}) is abandoned: "
                f"{most} workers in a row died while it made no progress; check their logs and the "
                "tool calls that its task allows"
            )
        if growing.cancelled:
            growing.ended.set_result(None)
            return
        if self.reason:
            raise WorkerError(self.reason)
        staying = [one for one in self.workers.values() if one.draining is None]
        if not staying or not self._poison.admits(growing.index):
            self._waiting.append(growing)
            return
        worker = min(staying, key=lambda one: len(one.trees))
        recorded = growing.recorded
        growing.number, growing.worker = next(self._numbers), worker
        worker.trees[growing.number] = growing
        grow = messages.Grow(
            growing.number,
            growing.task,
            growing.index,
            self._actor.engine.policy_version,
            growing.session,
            None if recorded is None else packed(recorded),
            growing.known,
        )
        worker.link.send(pack(grow))

    def _release(self, growing: _Growing) -> None:
        """The tree has ended, or its request was cancelled."""
        self._forget(growing)
        self._clear(growing)
        worker = growing.worker
        if worker is not None and worker.trees.pop(growing.number, None) is not None:
            worker.link.send(pack(messages.Quit(growing.number)))
            self._has_less(worker)

    def _forget(self, growing: _Growing) -> None:
        """Stop waiting for a worker."""
        if growing in self._waiting:
            self._waiting.remove(growing)

    def _clear(self, growing: _Growing) -> None:
        """The tree does not kill workers; try the next poison task."""
        if self._poison.clears(growing.index):
            self._place_waiting()

    def _place_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for growing in waiting:
            self._move_tree(growing)

    def _move_tree(self, growing: _Growing) -> None:
        """Resume the tree on another worker, if one can join."""
        if growing.ended.done():  # cancelled, and about to be released
            return
        try:
            self._place(growing)
        except WorkerError as error:
            growing.ended.set_exception(error)

    # Workers

    def make_worker(self, name: str, link: Link) -> _Worker:
        return _Worker(name, link, self._actor.engine)

    def joined(self, worker: _Worker) -> None:
        if self._is_steered and not self._is_closed:
            self._steer(worker)
        self._place_waiting()

    def left(self, worker: _Worker, why: str) -> worker_group.Left:
        is_drained = worker.draining is not None and not worker.is_hanging
        if is_drained:
            why = "its machine is about to shut down"
        rest = _destination(worker)
        has_come_further = worker.has_come_further or self._finds_poison(worker)
        return worker_group.Left(why, worker.num_ended, rest, is_drained, has_come_further)

    def _finds_poison(self, worker: _Worker) -> bool:
        """Whether the loss of the worker is a tree's fault, as the last of a poison task's trials;
        after several in a row without progress of any tree, it is the worker's."""
        return self._num_poison < MAX_POISON and any(
            self._poison.num_lost(one.index) + 1
            >= worker_group.NUM_LOSSES + worker_group.NUM_TRIALS
            for one in worker.trees.values()
            if not one.has_come_further
        )

    async def lost(self, worker: _Worker, why: str) -> None:
        """Move the trees of a worker that is gone."""
        if worker.draining is not None:
            worker.draining.cancel()
        if worker.leases is not None:
            worker.leases.close()
        self._move(worker)
        await worker.turns.close()

    def dismiss(self, worker: _Worker) -> None:
        if self.is_over:
            worker.link.send(pack(messages.Over()))
        worker.link.close()

    def take(self, worker: _Worker, message: Any) -> None:
        match message:
            case messages.TreeFrame():
                self._frame(worker, message)
            case messages.SampleTurn():
                worker.turns.sample(message)
            case messages.Acquire() | messages.SlotRelease():
                assert worker.leases is not None, "slots are those of a pool"
                worker.leases.handle(message)
            case messages.Quit():
                worker.turns.quit(message.number)
                if worker.leases is not None:
                    worker.leases.quit(message.number)
            case messages.Refused():
                growing = worker.trees.pop(message.number, None)
                self._has_less(worker)
                if growing is not None and not growing.ended.done():
                    growing.ended.set_exception(worker_group.raised(message.kind, message.text))
            case WorkerFigures():
                worker.figures = message
                self._actor.prefixes.merge(message.hits)
                self._actor.probes.extend(message.probe_waits_s)
            case messages.Leaving():
                self.leave(worker.name, message.within_s)
            case messages.Notice():
                self.report(f"{worker.name}: {message.text}")
            case messages.RolloutEnded():
                self._count(worker, message)
            case messages.CurrentWaits():
                growing = worker.trees.get(message.number)
                reply = None if growing is None else growing.reply
                if reply is not None and not reply.done():
                    reply.set_result(message.branches)

    def _count(self, worker: _Worker, message: messages.RolloutEnded) -> None:
        """Count a failure. If there are too many over all workers, a requested tree raises."""
        try:
            self._actor.failures.add(message.failure, who=worker.name)
        except TooManyFailuresError as problem:
            wanted = [*worker.trees.values(), *self._wanted()]
            left = (one for one in wanted if not one.ended.done())
            if growing := next(left, None):
                growing.ended.set_exception(problem)
            else:
                self._problem = problem

    def _frame(self, worker: _Worker, message: messages.TreeFrame) -> None:
        growing = worker.trees.get(message.number)
        if growing is None:  # dropped
            return
        growing.frames.add(message.tag, message.frame)
        if growing.has_come_further:
            worker.has_come_further = True
            self._num_poison = 0
            self._clear(growing)
        if self.journal is not None:
            self.journal.append(Packed(growing.index, message.frame))
        if growing.frames.is_finished:
            del worker.trees[message.number]
            worker.num_ended += 1
            self._has_less(worker)
            end(growing.ended)

    def _move(self, worker: _Worker) -> None:
        """Resume the trees of a lost worker on other workers."""
        for growing in worker.trees.values():
            if growing.ended.done():
                continue
            if worker.draining is None or worker.is_hanging:
                num = self._poison.lost(growing.index, has_come_further=growing.has_come_further)
                self._remember(growing.index, num)
            growing.recorded, growing.frames = growing.state(), TreeFrames()
            growing.worker = None
            self.num_moved += 1
            self._move_tree(growing)
        worker.trees.clear()

    def _remember(self, index: int, num_lost: int) -> None:
        """Record the number of workers lost with a tree, for the next process."""
        if self.journal is not None and num_lost:
            self.journal.append(WorkerLost(index, num_lost, self.journal.settings))

    def leave(self, name: str, within_s: float) -> None:
        """Drain a worker: it gets no more trees, and its link is closed when it has none, or at the
        end of the time; the remaining trees resume on other workers."""
        worker = self.workers.get(name)
        if worker is not None and worker.draining is None:
            worker.draining = asyncio.create_task(self._drain(worker, within_s))

    async def _drain(self, worker: _Worker, within_s: float) -> None:
        num = len(worker.trees)
        self.report(f"{worker.name} leaves within {within_s:.0f} s; trees that finish there: {num}")
        self._has_less(worker)
        await at_most(max(0.0, within_s), worker.idle.wait())
        worker.link.close(receives=True)  # turns in transit still count

    def _has_less(self, worker: _Worker) -> None:
        if not worker.trees and worker.draining is not None:
            worker.idle.set()

    def end(self, reason: str) -> None:
        """Accept no more workers: trees without a worker raise WorkerError."""
        super().end(reason)
        self._place_waiting()  # raises in them

    # Control

    def steer(self) -> None:
        """Pause or resume the rollouts of workers together with those of the controller's actor."""
        self._is_steered = True
        for worker in self.workers.values():
            self._steer(worker)

    def _steer(self, worker: _Worker) -> None:
        worker.link.send(pack(messages.Steer(self._actor.is_paused)))

    def cancel(self, index: int, reason: str) -> bool:
        """Cancel a tree on a user's request: its worker receives a message; without a worker it
        ends here. Returns False if it is not growing."""
        growing = self._growing(index)
        if growing is None:
            return False
        growing.cancelled = reason
        if growing.worker is not None:
            growing.worker.link.send(pack(messages.CancelTree(growing.number, reason)))
        elif not growing.ended.done():
            self._forget(growing)
            growing.ended.set_result(None)
        return True

    async def wait_info(self, index: int) -> list[BranchNow] | None:
        """The current waits of a tree's branches; None if it is not growing, or if its worker does
        not answer within LOOK_S seconds."""
        growing = self._growing(index)
        if growing is None or growing.worker is None:
            return None
        if growing.reply is None or growing.reply.done():
            growing.reply = asyncio.get_running_loop().create_future()
            growing.worker.link.send(pack(messages.GetWaits(growing.number)))
        done, _ = await asyncio.wait({growing.reply}, timeout=LOOK_S)
        return growing.reply.result() if done else None

    def _wanted(self) -> list[_Growing]:
        """All requested trees; those without a worker come last."""
        placed = (one for worker in self.workers.values() for one in worker.trees.values())
        return [*placed, *self._waiting]

    def _growing(self, index: int) -> _Growing | None:
        return next((one for one in self._wanted() if one.index == index), None)

    def places(self) -> dict[int, str]:
        """The worker of each tree, by index; empty: it waits for one."""
        return {one.index: one.worker.name if one.worker else "" for one in self._wanted()}

    # Figures

    @property
    def num_open_envs(self) -> int:
        """The total over all workers, from their last statistics."""
        return sum(one.figures.num_open_envs for one in self.workers.values())

    def figures(self) -> list[WorkerFigures]:
        """The last statistics of each connected worker."""
        return [one.figures for one in self.workers.values()]

    def stats(self) -> dict[str, float]:
        """Totals over the workers, and the statistics of each by name."""
        found: dict[str, float] = {
            "up": len(self.workers),
            "lost": self.num_lost,
            "trees_moved": self.num_moved,
        }
        for one in self.workers.values():
            of_it = {"trees": len(one.trees), "ended": one.num_ended, **one.figures.loop}
            found |= {f"{one.name}/{key}": value for key, value in of_it.items()}
        return found

    def behind(self) -> str:
        """The longest wait of each worker's rollouts."""
        waits = [(one.name, one.figures.behind) for one in self.workers.values()]
        return "; ".join(f"{name}: {text}" for name, text in waits if text)
