"""A rollout: grows the trajectory tree of a task, one coroutine per branch.

    branch   generate a turn -> add a node -> env.step -> render the observation -> again
    fork     the first k tokens after a tool result have arrived -> the plan decides ->
             siblings start from the node that holds the result; the branch itself continues,
             and steps its env only after every sibling has its own copy
    place    after an end the plan may request siblings at any earlier tool result; a replay of
             the path's actions brings a fresh env there
    end      terminated (by the env), truncated (by a limit), or failed (infrastructure);
             then the plan may start fresh roots, and one of them replaces a failed branch
    failure  a turn that the engine failed is sampled again; a step that the env failed is retried
             in a fresh env after a replay; the branch fails when the retries are exhausted;
             outages are waited out, in steps and in grading
    time     a branch ends after `max_seconds` of working time, its tree after
             `max_tree_seconds`: then live branches end, and nothing is retried

`growth.py` takes the turns of a branch, `recovery.py` retries and resumes, `branch.py` has its
state, and `conversation.py` speaks with its env. Each env and each fork is closed exactly once, by
the coroutine that opened it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from random import Random

from agentenv.base import errors
from agentenv.base.crashes import called
from agentenv.base.deadline import Alarm, Deadline, WorkClock, working
from agentenv.base.tree import Node, packed_ids
from agentenv.base.types import Limit, Message
from agentenv.rollout.branch import Branch, BranchNow
from agentenv.rollout.conversation import Context
from agentenv.rollout.failure_log import failure_of, kind_of
from agentenv.rollout.frames import Recorded
from agentenv.rollout.growth import Growth
from agentenv.rollout.journal import TreeRecord

Opening = Callable[[], Awaitable[None]]  # sets the env and the tokens of a branch


class _OutOfTimeError(Exception):
    """A branch has reached its time limit."""


def _set(event: asyncio.Event, task: object) -> None:
    event.set()


async def _raise(error: Exception) -> None:
    raise error


@dataclass(eq=False)
class Rollout(Growth):
    """Grows one tree: one coroutine per branch, all in one task group."""

    record: TreeRecord | None = None
    again: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        # The clock of the tree runs while any branch's clock runs.
        self.clock = WorkClock() if self.record is None else self.record.clock
        self.branches: set[Branch] = set()  # live ones
        self._is_over = False  # the tree is out of time: no branch begins anymore
        self._cancelled = ""  # the reason; empty: not cancelled
        self._growing: dict[Deadline, None] = {}  # of live branches, in order
        self._group = asyncio.TaskGroup()
        self._context = copy_context()
        self._next_root = 0
        self._probes_since: float | None = None  # loop time, while a single root grows
        self._stops: dict[int, str] = {}  # by node, the stop string that ended its turn

    async def run(
        self, first_root: int, recorded: Recorded | None = None, cancelled: str = ""
    ) -> None:
        """Grow the tree to its last leaf, from its start or from its recorded state; returns when
        its record is written. The next root is named `first_root`. `cancelled`: see
        `Actor.rollout`."""
        self._next_root = first_root
        alarm = Alarm(self.limits.seconds_of_tree, self.clock, self._run_out)
        alarm.set()
        try:
            async with self._group:
                if recorded is None:
                    number = called(self.plan.on_start, self.tree)
                    if number == 1 < self.plan.group_size:
                        self._probes_since = asyncio.get_running_loop().time()
                    self._start_roots(number)
                else:
                    self._resume(recorded)
                if cancelled:  # no branch has run yet
                    self.cancel(cancelled)
            if self.record is not None:
                self.clock.now("the journal")
                await self.record.finished()
        finally:
            alarm.cancel()

    def clocks(self) -> list[WorkClock]:
        """The clocks of the live branches, or of the tree when all have ended."""
        return [branch.clock for branch in self.branches] or [self.clock]

    def now(self) -> list[BranchNow]:
        """The state of each live branch, or of the tree when all have ended."""
        now_s = asyncio.get_running_loop().time()
        of = self.tree.task.id, self.tree.index
        found = [
            (one.name, one.clock, (one.num_turns, one.num_response_tokens, one.num_tool_calls))
            for one in self.branches
        ] or [("", self.clock, (0, 0, 0))]
        return [
            BranchNow(*of, name, clock.doing, clock.waited_s(now_s), *counts, clock())
            for name, clock, counts in found
            if name or clock.doing
        ]

    def cancel(self, reason: str) -> int:
        """Cancel the tree on a user's request: its live branches fail, with the kind `cancelled`,
        and are not replaced. Returns their number. A branch that is already ending is not
        affected."""
        self._cancelled = reason
        number = len(self._growing)
        self._run_out()
        return number

    def _run_out(self) -> None:
        """The tree is out of time: its live branches end by their time limit."""
        self._is_over = True
        for deadline in list(self._growing):
            deadline.expire()

    # starting branches

    def _resume(self, recorded: Recorded) -> None:
        """Start the branches that were live when the tree was recorded."""
        self._stops.update(recorded.stops)
        for one in recorded.branches:
            cursor = self.tree.nodes[one.cursor]
            branch = Branch(one.name, cursor, WorkClock(one.seconds, self.clock))
            growing = self._grow(branch, partial(self._reopen, branch, is_late=one.is_late))
            self._group.create_task(growing, context=self._context.copy())

    def _start_roots(self, number: int) -> None:
        """Start branches from scratch, unless the tree is out of time."""
        for _ in range(0 if self._is_over else number):
            branch = Branch(str(self._next_root), self.tree.root, WorkClock(outer=self.clock))
            self._next_root += 1
            if self._start(branch, partial(self._open_root, branch)) is not None:
                self.tree.num_roots += 1

    def _start_late(self, node: Node, number: int) -> None:
        """Start siblings after an earlier tool result, unless the tree is out of time."""
        for _ in range(0 if self._is_over else number):
            node.num_forks = (node.num_forks or 0) + 1
            if self.record is not None:
                self.record.decided(node)
            num_turns = len(self.tree.path(node)) - 1
            name = f"{node.branch}.{num_turns}+{node.num_forks}"
            branch = Branch(name, node, WorkClock(outer=self.clock))
            self._start(branch, partial(self._reopen, branch, is_late=True), is_late=True)

    def _start(
        self, branch: Branch, opening: Opening, *, is_late: bool = False
    ) -> asyncio.Task[None] | None:
        """Start a branch; None if the tree ends: its group accepts no more tasks."""
        context = self._context.copy()  # without the clock of the parent branch
        growing = self._grow(branch, opening)
        try:
            task = self._group.create_task(growing, context=context)
        except RuntimeError:
            growing.close()
            return None
        self.tree.num_started += 1
        self.tree.num_live += 1
        if self.record is not None:
            self.record.opened(branch.name, branch.cursor, branch.clock(), is_late)
        return task

    async def _open_root(self, branch: Branch) -> None:
        conversation = await self._recovery.open(branch)
        known = self._recovery.prompt
        if known is not None and conversation.prompt != known:
            if not conversation.opens_contexts:
                raise errors.EnvError(
                    f"task {self.tree.task.id}: two resets with one seed gave two prompts"
                )
            prompt_ids = self._recovery.prompt_ids(conversation)
            to = Context(prompt_ids, {"context": "edited", "cause": "prompt"})
            self._complete(branch, branch.move(self.tree, to))
            return
        if known is None:  # rendered once for all roots
            prompt_ids = self._recovery.prompt_ids(conversation)
            opening = self.hooks.prefix(branch, prompt_ids)
            self.tree.root.observation_ids = packed_ids(prompt_ids + opening)
            self._complete(branch, [self.tree.root])
        self._recovery.place_at_root(branch)

    async def _reopen(self, branch: Branch, *, is_late: bool) -> None:
        await self._recovery.reopen(branch, self._stops)
        branch.turn.num_replayed = branch.num_tool_calls if is_late else 0

    def _complete(self, branch: Branch, nodes: Sequence[Node], stop: str | None = None) -> None:
        """The nodes are final, except for their number of forks. `stop`: the stop string that ended
        the turn of the first one."""
        for node in nodes:
            if stop is not None:
                self._stops[node.index] = stop
            if self.record is not None:
                self.record.turned(node, branch.clock(), stop)
            stop = None

    # forking

    def _fork(self, branch: Branch, seconds: float, entropies: list[float]) -> None:
        """Let the plan decide on forks, and start the siblings, which the branch waits for.
        `seconds` had passed on its clock before the turn."""
        branch.turn.was_planned, place = True, branch.cursor
        try:
            rng = Random(self._recovery.key(branch, "fork"))
            first = array("f", entropies)  # in the precision of nodes, so that equal values match
            wanted = called(self.plan.on_fork_point, self.tree, place, first, rng)
            place.num_forks = 0 if self._is_over else wanted
            if self.record is not None:
                self.record.decided(place)
            for number in range(1, place.num_forks + 1):
                name = f"{branch.name}.{branch.num_turns}+{number}"
                sibling = branch.sibling(name, WorkClock(seconds, self.clock))
                held = asyncio.Event()  # also set if the sibling failed to get its env
                opening = partial(self._recovery.open_fork, sibling, branch, held)
                task = self._start(sibling, opening)
                if task is None:  # a last chunk while the tree ends
                    return
                task.add_done_callback(partial(_set, held))  # or never began
                branch.turn.holding.append(held)
        except Exception as error:  # the rollout raises it, not the stream
            self._group.create_task(_raise(error))

    # one branch from opening to end

    async def _grow(self, branch: Branch, opening: Opening) -> None:
        """Grow one branch from its opening to its end, and close its env in any case."""
        self.branches.add(branch)
        try:
            cut = await self._in_time(branch, opening)
            if cut is not None:
                await self._truncate(branch, *cut)
        except (errors.EngineDeadError, errors.WorkerError, errors.DataError, errors.ConfigError):
            raise  # a retry would not help
        except errors.AgentEnvError as error:
            self._fail(branch, error)
        else:
            assert branch.pending is not None
            assert branch.pending.end is not None
            self._complete(branch, [branch.pending])
            self.actor.failures.add(None)
            self._end(branch.pending, branch)
        finally:
            branch.clock.now("its environment to close")
            try:
                await self._close(branch)
            finally:
                self.branches.remove(branch)

    async def _in_time(
        self, branch: Branch, opening: Opening
    ) -> tuple[Limit, Message | None] | None:
        """Open the branch and take its turns within its time limit; returns the result of
        `Growth.take_turns`."""
        deadline = Deadline(self.limits.max_seconds, branch.clock, _OutOfTimeError)
        is_open = False
        try:
            with working(branch.clock), deadline:
                branch.clock.now("its environment")
                self._growing[deadline] = None
                if self._is_over:  # before making an environment, which may kill its process
                    raise _OutOfTimeError
                await opening()
                is_open = True
                return await self.take_turns(branch)
        except _OutOfTimeError:
            if self._cancelled:
                raise errors.CancelledRolloutError(self._cancelled) from None
            if not is_open:
                raise errors.EnvError(f"no env within {branch.clock():g} s") from None
            return Limit.SECONDS, None
        finally:
            self._growing.pop(deadline, None)

    # ends

    async def _truncate(self, branch: Branch, limit: Limit, action: Message | None) -> None:
        """End the branch by a limit; its env, if any, grades the present state."""
        leaf = branch.leaf(self.tree, "truncated")
        leaf.limit = limit
        if branch.env is not None:
            finish = partial(self.hooks.finish, branch, limit, action)
            reward, info = await self._recovery.finish(branch, finish)
            leaf.reward += reward
            leaf.info.update(info)
            branch.conversation.end(leaf)

    def _fail(self, branch: Branch, error: errors.AgentEnvError) -> None:
        """Record the failure, and replace the branch by a fresh root while retries remain."""
        leaf = branch.leaf(self.tree, "failed")
        leaf.error = f"{kind_of(error)}: {error}"
        leaf.info |= error.info if isinstance(error, errors.EnvError) else {}
        self._complete(branch, [leaf])
        failure = failure_of(error, self.tree.task, branch.action)
        self.actor.failures.add(failure, error, again=self.again)
        if self._is_over or self.tree.num_retries >= self.limits.max_failures:
            self._end(leaf, branch)
            return
        self.tree.num_live -= 1
        self.tree.num_retries += 1
        self.tree.num_started -= 1
        self.tree.num_roots -= "+" not in branch.name  # it is no fork
        self._start_roots(1)

    def _end(self, leaf: Node, branch: Branch) -> None:
        """A trajectory of the group has ended; the plan decides on new branches."""
        self.tree.num_live -= 1
        wanted = called(self.plan.on_leaf_end, self.tree, leaf)
        places = [(self.tree.root, wanted)] if isinstance(wanted, int) else wanted
        if any(number for _, number in places) and self._probes_since is not None:
            self.actor.probes.append(asyncio.get_running_loop().time() - self._probes_since)
            self._probes_since = None
        has_copies = branch.env is not None and branch.env.fork_mode != "none"
        for node, number in places:
            is_one_context = self.tree.history(node) == self.tree.path(node)
            if node is self.tree.root or not (has_copies and is_one_context):
                self._start_roots(number)
            else:
                self._start_late(node, number)

    async def _close(self, branch: Branch) -> None:
        """Close the env after the last sibling has its copy, even while being cancelled."""
        try:
            try:
                await self.hooks.end(branch)
            finally:
                await branch.turn.held()
        finally:
            if branch.env is not None:
                await self.actor.envs.close(branch.env, self.tree.task.id)
