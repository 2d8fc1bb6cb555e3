"""The rollout workers of a run as the controller sees them: who grows which tree, and where it goes
on when one is lost.

    rollout(task, index) --Grow--> the worker with the fewest trees
            ^                          | Told, frame by frame: to the journal, and kept here
            +---- the whole tree <-----+
            a worker is lost: its trees go on elsewhere, from the last frame that came

Feeder, queue, journal and the bound on staleness stay with the controller. A worker is lost when
its link is, or when it says nothing for `silence_s`. One whose machine is going to end is drained:
it gets no more trees, and ends those that it has as far as there is time.

A tree that is given up while it has no worker, because a person wants no more of it or because it
kills workers, ends here, from its last frame: no worker gets it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import NamedTuple

import msgspec

from agentenv.actor import Actor
from agentenv.cluster.engine import Turns
from agentenv.cluster.link import Link
from agentenv.cluster.messages import (
    BEAT_S,
    Alive,
    Answer,
    Drop,
    Ended,
    Figures,
    GiveUp,
    Grow,
    Heard,
    Leave,
    Leaving,
    Look,
    Looked,
    Lost,
    Over,
    Quit,
    Sample,
    Say,
    Seek,
    Steer,
    Told,
    pack,
    raised,
    read_answer,
)
from agentenv.cluster.poison_pill import NUM_LOSSES, NUM_TRIALS, Suspects
from agentenv.cluster.slots import Leases
from agentenv.engine import Engine
from agentenv.engines.pool.pool import EnginePool
from agentenv.errors import TooManyFailuresError, WorkerError
from agentenv.journal import (
    NUM_FIRST,
    Journal,
    Packed,
    Recorded,
    TreeFrames,
    TreeRecord,
    WorkerLost,
    pack_recorded,
)
from agentenv.plan import Independent, RolloutPlan
from agentenv.rollout import BranchNow
from agentenv.tree import TrajectoryTree
from agentenv.types import Task

LAST_S = 20.0  # in which workers end after a close: envs are being closed
LOOK_S = 5.0  # in which a worker says what the branches of a tree await
NUM_SHOWN = 8  # trees of a worker that was lost, one of which may be what kills workers


class _Growing:
    """A tree that is wanted. `number` names its place on the link of `worker`; None: it has
    none."""

    def __init__(self, task: Task, index: int, session: str, recorded: Recorded | None) -> None:
        self.task, self.index, self.session = task, index, session
        self.recorded = recorded  # from where it goes on
        self.frames = TreeFrames()  # since it has the worker
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.looked: asyncio.Future[list[BranchNow]] | None = None  # while it is looked at
        self.given_up = ""  # why; empty: it is not
        self.since = loop.time()
        self.number = -1
        self.worker: _Worker | None = None

    @property
    def has_come_further(self) -> bool:
        """Since it has the worker."""
        return len(self.frames) > NUM_FIRST

    def state(self) -> Recorded | None:
        """As it is now."""
        return self.frames.recorded(self.task) or self.recorded


class _Worker:
    """One that is there."""

    def __init__(self, name: str, link: Link, engine: Engine) -> None:
        self.name, self.link = name, link
        self.turns = Turns(engine, link)
        self.leases = Leases(engine, link) if isinstance(engine, EnginePool) else None
        self.trees: dict[int, _Growing] = {}
        self.figures = Figures()
        self.heard = asyncio.get_running_loop().time()
        self.is_hanging = False
        self.num_ended = 0
        self.has_come_further = False  # a tree has, on it
        self.idle = asyncio.Event()  # it has no trees
        self.draining: asyncio.Task[None] | None = None


class Left(NamedTuple):
    """A worker is gone: why, how much it has ended, and what becomes of the rest; whether that was
    known before, and whether anything that it had has come further, though it did not end."""

    why: str
    num_ended: int
    rest: str
    is_drained: bool = False
    has_come_further: bool = False


class Placed(NamedTuple):
    """A tree grows on this worker (empty: it waits for one), and is wanted since this time of the
    loop."""

    worker: str
    since: float


def _rest(worker: _Worker) -> str:
    """What becomes of the trees of one that is gone."""
    moved = sorted(growing.index for growing in worker.trees.values())
    shown = ", ".join(map(str, moved[:NUM_SHOWN]))
    more = f" and {len(moved) - NUM_SHOWN} more" if len(moved) > NUM_SHOWN else ""
    return f"trees {shown}{more} go on elsewhere" if shown else "it had no trees"


class RolloutWorkers:
    """`rollout` takes the place of `Actor.rollout`; each worker is served by a `join` of its own.

    `actor` is the controller's, whose engine they ask, and whose counters take in theirs.
    `silence_s`: a worker that says nothing for so long hangs. `tell` says something to people.
    `plan`: that of the trees; a tree that is given up before it has begun has its first roots.
    """

    def __init__(
        self,
        actor: Actor,
        *,
        silence_s: float,
        tell: Callable[[str], None],
        journal: Journal | None = None,
        plan: RolloutPlan | None = None,
    ) -> None:
        self.journal = journal
        self._plan: RolloutPlan = Independent(1) if plan is None else plan
        self.num_moved = 0  # trees that went on elsewhere
        self.num_lost = 0  # workers
        self._actor = actor
        self._silence_s, self._tell = silence_s, tell
        self._workers: dict[str, _Worker] = {}
        self._left = asyncio.Event()  # a worker has
        self._homeless: list[_Growing] = []  # until a worker comes
        self._suspects = Suspects()
        self._held_back: list[_Growing] = []  # until no other suspect is tried
        self._numbers = count()
        self._reason = ""  # why no worker will come any more
        self._problem: Exception | None = None  # ends the run, by the next tree that is wanted
        self._is_steered = False  # those that come are told of it
        self.is_over = False  # the run: workers are not to come again
        self._is_closed = False  # a worker that joins later is let go at once

    # trees

    async def rollout(
        self, task: Task, *, index: int, session: str = "", recorded: Recorded | None = None
    ) -> TrajectoryTree:
        """As `Actor.rollout`, on one worker after the other; returns when the tree is in the
        journal, if there is one. Raises WorkerError when no worker is left."""
        if self._problem is not None:
            raise self._problem
        growing = _Growing(task, index, session, recorded)
        if self.journal is not None:
            self._suspects.recall(index, self.journal.losses.pop(index, 0))
        try:
            while True:
                self._place(growing)
                await growing.ended
                if growing.worker is None:
                    return await self._end_here(growing)
                found = growing.frames.recorded(task)
                if found is not None and found.is_finished:
                    break
                self._tell(f"tree {index} came from its worker incomplete, and begins again")
                growing = _Growing(task, index, session, None)
        finally:
            self._let_go(growing)
        if self.journal is not None:
            await self.journal.commit()
        return found.tree

    async def _end_here(self, growing: _Growing) -> TrajectoryTree:
        """A tree that is given up and has no worker ends as it is, in the journal too."""
        record = None
        if self.journal is not None:
            record = TreeRecord(self.journal, growing.index, next(self._numbers))
        num_lost = self._suspects.num_lost(growing.index)
        tree = await self._actor.rollout(
            growing.task,
            self._plan,
            index=growing.index,
            session=growing.session,
            record=record,
            recorded=growing.recorded,
            cancelled=growing.given_up,
        )
        self._remember(growing.index, num_lost)  # also if it is wanted again, of other weights
        return tree

    def _place(self, growing: _Growing) -> None:
        """Give the tree to the worker with the fewest. One that is given up gets none."""
        if self._suspects.is_found(growing.index) and not growing.given_up:
            growing.given_up = f"{NUM_LOSSES + NUM_TRIALS} workers were lost with it"
            self._tell(
                f"tree {growing.index} (task {growing.task.id}) is given up: "
                f"{NUM_LOSSES + NUM_TRIALS} workers in a row were lost while it came no further; "
                "look at their logs, and at what its task lets the tools do"
            )
        if growing.given_up:
            growing.ended.set_result(None)
            return
        if self._reason:
            raise WorkerError(self._reason)
        if not self._suspects.admits(growing.index):
            self._held_back.append(growing)
            return
        staying = [one for one in self._workers.values() if one.draining is None]
        if not staying:
            self._homeless.append(growing)
            return
        worker = min(staying, key=lambda one: len(one.trees))
        recorded = growing.recorded
        growing.number, growing.worker = next(self._numbers), worker
        worker.trees[growing.number] = growing
        grow = Grow(
            growing.number,
            growing.task,
            growing.index,
            self._actor.engine.policy_version,
            growing.session,
            None if recorded is None else pack_recorded(recorded),
        )
        worker.link.send(pack(grow))

    def _let_go(self, growing: _Growing) -> None:
        """It is not wanted any more, or it has ended."""
        self._forget(growing)
        self._clear(growing)
        worker = growing.worker
        if worker is not None and worker.trees.pop(growing.number, None) is not None:
            worker.link.send(pack(Drop(growing.number)))
            self._has_less(worker)

    def _forget(self, growing: _Growing) -> None:
        """It waits for no worker any more."""
        for places in (self._homeless, self._held_back):
            if growing in places:
                places.remove(growing)

    def _clear(self, growing: _Growing) -> None:
        """It kills no worker. The next one that may is tried."""
        if self._suspects.clears(growing.index):
            waiting = [one for one in self._held_back if not one.ended.done()]
            if waiting:
                self._held_back.remove(waiting[0])
                self._place_again(waiting[0])

    def _place_again(self, growing: _Growing) -> None:
        """The tree goes on elsewhere, if there is a place to come."""
        if growing.ended.done():  # cancelled, and about to be let go
            return
        try:
            self._place(growing)
        except WorkerError as error:
            growing.ended.set_exception(error)

    # workers

    async def join(self, name: str, link: Link) -> Left:
        """Let a worker take part until it is gone; its trees go on elsewhere."""
        worker = self._workers[name] = _Worker(name, link, self._actor.engine)
        if self._is_closed:
            self._end(worker)
        elif self._is_steered:
            self._tell_steered(worker)
        listening = asyncio.create_task(self._listen(worker))
        waiting, self._homeless = self._homeless, []
        for growing in waiting:
            self._place_again(growing)
        loop = asyncio.get_running_loop()
        try:
            while True:
                told = read_answer(await link.receive())
                worker.heard = loop.time()
                self._take(worker, told)
        except (EOFError, msgspec.DecodeError) as error:
            why = str(error)
            if isinstance(error, msgspec.DecodeError):
                why = f"it said what cannot be read ({error})"
            elif worker.is_hanging:
                why = f"it has said nothing for {self._silence_s:g} s (cluster.silence_s)"
            if is_drained := worker.draining is not None and not worker.is_hanging:
                why = "its machine is going to end"
            further = worker.has_come_further
            return Left(why, worker.num_ended, _rest(worker), is_drained, further)
        finally:
            listening.cancel()
            if worker.draining is not None:
                worker.draining.cancel()
            link.abort()
            del self._workers[name]
            if worker.leases is not None:
                worker.leases.close()
            self._move(worker)
            self._left.set()
            await worker.turns.close()

    def _take(self, worker: _Worker, told: Answer) -> None:
        """Deal with what a rollout worker has said."""
        match told:
            case Told():
                self._frame(worker, told)
            case Sample():
                worker.turns.sample(told)
            case Seek() | Heard() | Leave():
                assert worker.leases is not None, "places are those of a pool"
                worker.leases.hear(told)
            case Quit():
                worker.turns.quit(told.number)
                if worker.leases is not None:
                    worker.leases.quit(told.number)
            case Lost():
                growing = worker.trees.pop(told.number, None)
                self._has_less(worker)
                if growing is not None and not growing.ended.done():
                    growing.ended.set_exception(raised(told.kind, told.text))
            case Alive():
                worker.figures = told.figures
                self._actor.prefixes.merge(told.figures.hits)
                self._actor.probes.merge(told.figures.probe_waits_s)
            case Leaving():
                self.leave(worker.name, told.within_s)
            case Say():
                self._tell(f"{worker.name}: {told.text}")
            case Ended():
                self._count(worker, told)
            case Looked():
                looked = worker.trees.get(told.number)
                if looked is not None and looked.looked is not None and not looked.looked.done():
                    looked.looked.set_result(told.branches)

    def _count(self, worker: _Worker, told: Ended) -> None:
        """Failures of all workers together: too many end the run, by a tree that is wanted."""
        try:
            self._actor.failures.add(told.failure, who=worker.name)
        except TooManyFailuresError as problem:
            own, others = [*worker.trees.values()], self._wanted()
            left = (one for one in [*own, *others] if not one.ended.done())
            if growing := next(left, None):
                growing.ended.set_exception(problem)
            else:
                self._problem = problem

    def _frame(self, worker: _Worker, told: Told) -> None:
        growing = worker.trees.get(told.number)
        if growing is None:  # dropped
            return
        growing.frames.add(told.tag, told.frame)
        if growing.has_come_further:
            worker.has_come_further = True
            self._clear(growing)
        if self.journal is not None:
            self.journal.append(Packed(growing.index, told.frame))
        if growing.frames.is_finished:
            del worker.trees[told.number]
            worker.num_ended += 1
            self._has_less(worker)
            if not growing.ended.done():
                growing.ended.set_result(None)

    def _move(self, worker: _Worker) -> None:
        """The trees of one that is gone go on elsewhere."""
        for growing in worker.trees.values():
            if growing.ended.done():
                continue
            if worker.draining is None or worker.is_hanging:
                self._suspect(growing)
            growing.recorded, growing.frames = growing.state(), TreeFrames()
            growing.worker = None
            self.num_moved += 1
            self._place_again(growing)
        worker.trees.clear()

    def _suspect(self, growing: _Growing) -> None:
        """Its worker was lost."""
        num = self._suspects.lost(growing.index, has_come_further=growing.has_come_further)
        self._remember(growing.index, num)

    def _remember(self, index: int, num_lost: int) -> None:
        """For the next process, how many workers were lost with a tree."""
        if self.journal is not None and num_lost:
            self.journal.append(WorkerLost(index, num_lost, self.journal.settings))

    async def _listen(self, worker: _Worker) -> None:
        """Break the link of one that hangs. A loop of ours that was held up hears late: it looks
        twice."""
        loop, is_late = asyncio.get_running_loop(), False
        while True:
            await asyncio.sleep(BEAT_S)
            was_late, is_late = is_late, loop.time() - worker.heard > self._silence_s
            if was_late and is_late:
                worker.is_hanging = True
                worker.link.abort()

    def leave(self, name: str, within_s: float) -> None:
        """Drain this worker: no more trees, and its link is closed when it has none, or at the end
        of the time; then what is left goes on elsewhere."""
        worker = self._workers.get(name)
        if worker is not None and worker.draining is None:
            worker.draining = asyncio.create_task(self._drain(worker, within_s))

    async def _drain(self, worker: _Worker, within_s: float) -> None:
        num = len(worker.trees)
        self._tell(f"{worker.name} leaves within {within_s:.0f} s; trees that end there: {num}")
        self._has_less(worker)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, within_s)):
                await worker.idle.wait()
        worker.link.finish()  # turns that are on their way still count

    def _has_less(self, worker: _Worker) -> None:
        if not worker.trees and worker.draining is not None:
            worker.idle.set()

    def end(self, reason: str) -> None:
        """No worker will come any more: trees that have none raise WorkerError."""
        self._reason = reason
        waiting = self._homeless + self._held_back
        self._homeless, self._held_back = [], []
        for growing in waiting:
            if not growing.ended.done():
                growing.ended.set_exception(WorkerError(reason))

    async def close(self) -> None:
        """Let the workers end, which close their envs. Idempotent."""
        self._reason = self._reason or "the run ends"
        self._is_closed = True
        for worker in self._workers.values():
            self._end(worker)
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_S):
                while self._workers:
                    self._left.clear()
                    await self._left.wait()

    def _end(self, worker: _Worker) -> None:
        if self.is_over:
            worker.link.send(pack(Over()))
        worker.link.close()

    # what a person wants

    def steer(self) -> None:
        """Rollouts of workers are held back, or let go, as those of the controller's actor are, and
        have its limits of time."""
        self._is_steered = True
        for worker in self._workers.values():
            self._tell_steered(worker)

    def _tell_steered(self, worker: _Worker) -> None:
        actor = self._actor
        worker.link.send(pack(Steer(actor.is_paused, actor.limits)))

    def give_up(self, index: int, reason: str) -> bool:
        """Cancel a tree on a person's request, wherever it grows: its worker receives the order;
        without a worker it ends here. False: it does not grow."""
        growing = self._growing(index)
        if growing is None:
            return False
        growing.given_up = reason
        if growing.worker is not None:
            growing.worker.link.send(pack(GiveUp(growing.number, reason)))
        elif not growing.ended.done():
            self._forget(growing)
            growing.ended.set_result(None)
        return True

    async def look(self, index: int) -> list[BranchNow] | None:
        """What the branches of that tree await; None: it does not grow, or its worker says nothing
        for LOOK_S."""
        growing = self._growing(index)
        if growing is None or growing.worker is None:
            return None
        if growing.looked is None or growing.looked.done():
            growing.looked = asyncio.get_running_loop().create_future()
            growing.worker.link.send(pack(Look(growing.number)))
        done, _ = await asyncio.wait({growing.looked}, timeout=LOOK_S)
        return growing.looked.result() if done else None

    def _wanted(self) -> list[_Growing]:
        """All trees, those that wait for a worker last."""
        placed = (one for worker in self._workers.values() for one in worker.trees.values())
        return [*placed, *self._homeless, *self._held_back]

    def _growing(self, index: int) -> _Growing | None:
        return next((one for one in self._wanted() if one.index == index), None)

    def places(self) -> dict[int, Placed]:
        """Where each tree grows, by its index."""
        waiting = [*self._homeless, *self._held_back]
        found = {one.index: Placed("", one.since) for one in waiting}
        for worker in self._workers.values():
            for one in worker.trees.values():
                found[one.index] = Placed(worker.name, one.since)
        return found

    # figures

    @property
    def num_open_envs(self) -> int:
        """Of all workers, by their last figures."""
        return sum(one.figures.num_open_envs for one in self._workers.values())

    def figures(self) -> list[Figures]:
        """The last ones of each worker that is there."""
        return [one.figures for one in self._workers.values()]

    def stats(self) -> dict[str, float]:
        """Of the workers together, and of each by its name."""
        found: dict[str, float] = {
            "up": len(self._workers),
            "lost": self.num_lost,
            "trees_moved": self.num_moved,
        }
        for one in self._workers.values():
            of_it = {"trees": len(one.trees), "ended": one.num_ended, **one.figures.loop}
            found |= {f"{one.name}/{key}": value for key, value in of_it.items()}
        return found

    def behind(self) -> str:
        """What the rollouts of each worker have waited for longest."""
        told = [(one.name, one.figures.behind) for one in self._workers.values()]
        return "; ".join(f"{name}: {text}" for name, text in told if text)
