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

`recovery.py` retries and resumes, `RolloutHooks` is for extensions, `branch.py` has the state of a
branch. Each env and each fork is closed exactly once, by the coroutine that opened it.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Awaitable, Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec import Struct
from msgspec.structs import replace

from agentenv.branch import Branch, as_program
from agentenv.deadline import Alarm, Deadline, WorkClock, waiting, working
from agentenv.errors import (
    AgentEnvError,
    CancelledRolloutError,
    ConfigError,
    DataError,
    EngineDeadError,
    EnvError,
    WorkerError,
)
from agentenv.failures import failure_of, kind_of
from agentenv.frames import Recorded
from agentenv.journal import TreeRecord
from agentenv.plan import RolloutPlan
from agentenv.recovery import Recovery
from agentenv.renderer import context_ids
from agentenv.tree import LED, Node, Prefix, TrajectoryTree, packed_ids
from agentenv.types import Chunk, Completion, Limit, Limits, Message

if TYPE_CHECKING:
    from agentenv.actor import Actor

Opening = Callable[[], Awaitable[None]]  # sets the env and the tokens of a branch


class BranchNow(Struct, array_like=True, frozen=True):
    """State of a live branch of a tree (the tree itself: ""): its current wait and the duration in
    seconds, its counts so far, and its working seconds."""

    branch: str
    what: str
    for_s: float
    num_turns: int = 0
    num_response_tokens: int = 0
    num_tool_calls: int = 0
    worked_s: float = 0.0


class _OutOfTimeError(Exception):
    """A branch has reached its time limit."""


class _ClosedError(Exception):
    """The task group of a tree accepts no more tasks."""


def _branch_now(one: Branch, now_s: float) -> BranchNow:
    waited_s = now_s - one.clock.since if one.clock.doing else 0.0
    counts = one.num_turns, one.num_response_tokens, one.num_tool_calls
    return BranchNow(one.name, one.clock.doing, waited_s, *counts, one.clock())


def _set(event: asyncio.Event, task: object) -> None:
    event.set()


async def _raise(error: Exception) -> None:
    raise error


class Rollout:
    """Grows one tree: one coroutine per branch, all in one task group."""

    def __init__(
        self,
        actor: Actor,
        tree: TrajectoryTree,
        plan: RolloutPlan,
        limits: Limits,
        session: str,
        record: TreeRecord | None = None,
        again: bool = False,
    ) -> None:
        self.actor = actor
        self.tree = tree
        self.plan = plan
        self.limits = limits
        self.prompt_messages: list[Message] | None = None  # of the first root
        self._session = session
        self._record = record
        self._again = again
        self.clock = WorkClock()  # runs while any branch's clock runs
        self.branches: set[Branch] = set()  # live ones
        self._is_over = False  # the tree is out of time: no branch begins anymore
        self._cancelled = ""  # the reason; empty: not cancelled
        self._growing: dict[Deadline, None] = {}  # of live branches, in order
        self.hooks = actor.make_hooks(self)
        self._group = asyncio.TaskGroup()
        self._context = copy_context()
        self._next_root = 0
        self._probes_since: float | None = None  # loop time, while a single root grows
        self.num_prompt_tokens = 0
        self._stops: dict[int, str] = {}  # by node, the stop string that ended its turn
        self._recovery = Recovery(self)

    async def run(
        self, first_root: int, recorded: Recorded | None = None, cancelled: str = ""
    ) -> None:
        """Grow the tree to its last leaf, from its start or from its recorded state; returns when
        its record is written. The next root is named `first_root`. `cancelled`: see
        `Actor.rollout`."""
        self._next_root = first_root
        alarm = Alarm(self.limits.seconds_of_tree, self.clock, self._run_out)
        alarm.set()
        self.actor.rollouts.add(self)
        try:
            async with self._group:
                if recorded is None:
                    number = self.plan.on_start(self.tree)
                    if number == 1 < self.plan.group_size:
                        self._probes_since = asyncio.get_running_loop().time()
                    self._start_roots(number)
                else:
                    self._resume(recorded)
                if cancelled:  # no branch has run yet
                    self.cancel(cancelled)
            if self._record is not None:
                self.clock.now("the journal")
                await self._record.finished()
        finally:
            alarm.cancel()
            self.actor.rollouts.discard(self)
            # Both refer to the rollout, whose tree would stay until a garbage collection.
            del self.hooks, self._recovery

    def clocks(self) -> list[WorkClock]:
        """The clocks of the live branches, or of the tree when all have ended."""
        return [branch.clock for branch in self.branches] or [self.clock]

    def now(self) -> list[BranchNow]:
        """The state of each live branch, or of the tree when all have ended."""
        now_s = asyncio.get_running_loop().time()
        found = [_branch_now(one, now_s) for one in self.branches]
        if not found and self.clock.doing:
            waited_s, worked_s = now_s - self.clock.since, self.clock()
            found = [BranchNow("", self.clock.doing, waited_s, worked_s=worked_s)]
        return found

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
        self._stops |= recorded.stops
        for one in recorded.branches:
            cursor = self.tree.nodes[one.cursor]
            branch = Branch(one.name, cursor, WorkClock(one.seconds, self.clock))
            opening = partial(self._recovery.reopen, branch, recorded.stops)
            self._group.create_task(self._grow(branch, opening), context=self._context.copy())

    def _start_roots(self, number: int) -> None:
        """Start branches from scratch, unless the tree is out of time."""
        for _ in range(0 if self._is_over else number):
            branch = Branch(str(self._next_root), self.tree.root, WorkClock(outer=self.clock))
            self._next_root += 1
            with suppress(_ClosedError):
                self._start(branch, partial(self._open_root, branch))
                self.tree.num_roots += 1

    def _start(self, branch: Branch, opening: Opening) -> asyncio.Task[None]:
        context = self._context.copy()  # without the clock of the parent branch
        growing = self._grow(branch, opening)
        try:
            task = self._group.create_task(growing, context=context)
        except RuntimeError as error:
            growing.close()
            raise _ClosedError from error
        self.tree.num_started += 1
        self.tree.num_live += 1
        if self._record is not None:
            self._record.opened(branch.name, branch.cursor, branch.clock())
        return task

    async def _open_root(self, branch: Branch) -> None:
        messages = await self._recovery.reset(branch)
        if branch.next_turn is not None and self.prompt_messages not in (None, messages):
            self._open_context(messages, branch)
            return
        if messages != self.prompt_messages:  # rendered once for all roots
            self.render_prompt(messages, branch)
        branch.prefix_ids = Prefix((self.tree.root.observation_ids,))
        branch.num_prompt_tokens = self.num_prompt_tokens

    def render_prompt(self, messages: list[Message], branch: Branch) -> None:
        """Create the root from a prompt."""
        if self.prompt_messages is not None:
            raise EnvError(f"task {self.tree.task.id}: two resets with one seed gave two prompts")
        prompt_ids = self.prompt_ids(messages, branch)
        self._check_size(prompt_ids, DataError if branch.next_turn is None else EnvError)
        self.prompt_messages = messages
        self.num_prompt_tokens = len(prompt_ids)
        opening = self.hooks.prefix(branch, prompt_ids)
        self.tree.root.observation_ids = packed_ids(prompt_ids + opening)
        self._complete(self.tree.root, branch)

    def _check_size(self, prompt_ids: list[int], error: type[AgentEnvError]) -> None:
        if len(prompt_ids) > self.limits.max_prompt_tokens:
            raise error(
                f"task {self.tree.task.id}: its prompt has {len(prompt_ids)} tokens, "
                f"limits.max_prompt_tokens is {self.limits.max_prompt_tokens}"
            )

    def prompt_ids(self, messages: list[Message], branch: Branch) -> list[int]:
        """The token ids of a prompt; a program's prompt may contain turns of the policy."""
        renderer: Any = self.actor.renderer
        if branch.next_turn is None:
            return list(renderer.prompt(messages, branch.tools))
        most = self.limits.max_tool_result_tokens
        with as_program():
            return list(context_ids(renderer, messages, branch.tools, most))

    def _open_context(self, messages: list[Message], branch: Branch) -> None:
        """Open a context with this prompt, since an agent program may begin differently each
        time."""
        prompt_ids = self.prompt_ids(messages, branch)
        self._check_size(prompt_ids, EnvError)
        node = self.tree.add(
            None,
            branch=branch.name,
            observation_ids=prompt_ids,
            continues=0,
            info={"context": "edited", "cause": "prompt"},
        )
        branch.cursor, branch.prefix_ids = node, Prefix((node.observation_ids,))
        branch.num_prompt_tokens = len(branch.prefix_ids)
        self._complete(node, branch)

    def _complete(self, node: Node, branch: Branch, stop: str | None = None) -> None:
        """The node is final, except for its number of forks."""
        if stop is not None:
            self._stops[node.index] = stop
        if self._record is not None:
            self._record.turned(node, branch.clock(), stop)

    def has_room_to_fork(self, branch: Branch) -> bool:
        assert branch.env is not None
        has_room = self.tree.num_started < self.plan.group_size
        return has_room and branch.env.fork_mode != "none"

    # forking

    def _fork(self, branch: Branch, origin: Branch, entropies: list[float]) -> None:
        """Let the plan decide on forks, and start the siblings; `branch.holding` has an event for
        each, set when it has its env.

        `origin` is the state of the branch before the turn; the branch itself may have advanced.
        """
        branch.was_planned = True
        try:
            rng = Random(self.key(origin, "fork"))
            first = array("f", entropies)  # in the precision of nodes, so that equal values match
            wanted = self.plan.on_fork_point(self.tree, origin.cursor, first, rng)
            origin.cursor.num_forks = num_forks = 0 if self._is_over else wanted
            if self._record is not None:
                self._record.decided(origin.cursor)
            for number in range(1, num_forks + 1):
                name = f"{origin.name}.{origin.num_turns}+{number}"
                sibling = origin.sibling(name, self.clock)
                held = asyncio.Event()  # also set if the sibling failed to get its env
                opening = partial(self._recovery.open_fork, sibling, branch, held)
                task = self._start(sibling, opening)
                task.add_done_callback(partial(_set, held))  # or never began
                branch.holding.append(held)
        except _ClosedError:  # a last chunk while the tree ends
            pass
        except Exception as error:  # the rollout raises it, not the stream
            self._group.create_task(_raise(error))

    # one branch from opening to end

    async def _grow(self, branch: Branch, opening: Opening) -> None:
        """Grow one branch from its opening to its end, and close its env in any case."""
        self.branches.add(branch)
        try:
            cut = await self._in_time(branch, opening)
            if cut is not None and not branch.is_open:
                raise EnvError(f"no env within {branch.clock():g} s")
            if cut is not None:
                await self._truncate(branch, *cut)
        except (EngineDeadError, WorkerError, DataError, ConfigError):  # a retry would not help
            raise
        except AgentEnvError as error:
            self._fail(branch, error)
        else:
            assert branch.pending is not None
            assert branch.pending.end is not None
            self._complete(branch.pending, branch)
            self.actor.failures.add(None)
            self._end(branch.pending, branch)
        finally:
            branch.clock.now("its environment to close")
            try:
                await self._close(branch)
            finally:
                self.branches.discard(branch)

    async def _in_time(
        self, branch: Branch, opening: Opening
    ) -> tuple[Limit, Message | None] | None:
        """Open the branch and take its turns within its time limit; returns the result of
        `_turns`."""
        deadline = Deadline(self.limits.max_seconds, branch.clock, _OutOfTimeError)
        try:
            with working(branch.clock), deadline:
                branch.clock.now("its environment")
                self._growing[deadline] = None
                if self._is_over:  # before making an environment, which may kill its process
                    raise _OutOfTimeError
                await opening()
                branch.is_open = True
                return await self._turns(branch)
        except _OutOfTimeError:
            if self._cancelled:
                raise CancelledRolloutError(self._cancelled) from None
            return Limit.SECONDS, None
        finally:
            self._growing.pop(deadline, None)

    async def _turns(self, branch: Branch) -> tuple[Limit, Message | None] | None:
        """Take turns until the env ends the episode, or return the limit that ends it, with an
        action that the env has not seen."""
        renderer: Any = self.actor.renderer
        limits = self.limits
        while True:
            completion = await self._recovery.sample(branch, self._generate)
            action = renderer.parse(completion, branch.tools, branch.prefix_ids)
            if branch.next_turn is not None:
                size = len(branch.prefix_ids)
                action = branch.as_program_reads(action, completion, renderer, size)
            branch.action = action
            node = branch.add_action(self.tree, completion)
            if branch.num_replayed:
                node.info[LED], branch.num_replayed = branch.num_replayed, 0
            if branch.holding:
                with waiting("the copies of its environment for its forks"):
                    await branch.held()
            limit = branch.limit_of_action(completion, action, limits)
            if limit is not None:
                return limit, action
            result = await self._recovery.step(branch, action)
            branch.clock.now("its observation to be tokenized")
            messages, node.reward, terminated, truncated, info = result
            if branch.next_turn is not None:
                branch.expect(info)
            node.info.update(info)
            if terminated or truncated:
                node.end = "terminated" if terminated else "truncated"
                node.limit = None if terminated else Limit.ENV
                return None
            if num_users := sum(message.role == "user" for message in messages):
                node.info["user_messages"] = num_users
            room = limits.max_tool_result_tokens
            if branch.next_turn is not None and branch.next_turn.prompt:
                left = branch.proceed(self.tree, renderer, room)
                if left is not None:
                    self._complete(left, branch, completion.stop)
                self._complete(branch.cursor, branch, completion.stop if left is None else None)
                branch.may_fork = branch.continues_episode and self.has_room_to_fork(branch)
                if len(branch.prefix_ids) >= limits.max_prompt_tokens + limits.max_response_tokens:
                    return Limit.RESPONSE_TOKENS, None
                limit = branch.limit_of_observation((), limits)
                if limit is not None:
                    return limit, None
                continue
            with as_program(is_one=branch.next_turn is not None):
                await renderer.prepare(messages, branch.tools, room)
                turn_ids = branch.ended_ids(node, renderer)
                observation_ids = renderer.observation(messages, branch.tools, room, turn_ids)
            if node.index in branch.cut:  # the end token comes first
                observation_ids = [renderer.end_id, *observation_ids]
            if await self.hooks.redirect(branch, observation_ids):
                continue
            limit = branch.limit_of_observation(observation_ids, limits)
            if limit is not None:
                return limit, None
            branch.add_observation(observation_ids)
            self._complete(branch.cursor, branch, completion.stop)
            if branch.actions is not None:
                branch.actions.append(action)
            branch.may_fork = self.has_room_to_fork(branch)

    async def _generate(self, branch: Branch) -> Completion:
        """Sample the next turn. If the branch may fork, call `_fork` as soon as the entropies of
        the first `fork_window` tokens are known, or at the end of a shorter turn."""
        actor, limits, window = self.actor, self.limits, self.plan.fork_window
        plans_fork = branch.may_fork and window > 0 and not branch.was_planned
        origin = branch.sibling(branch.name, self.clock) if plans_fork else branch
        # The first entropies of the first turn, and of a probe, are the baseline of comparisons.
        full = self.tree.num_started >= self.plan.group_size
        is_first = not branch.num_turns
        reads = window > 0 and (plans_fork or is_first or not full)
        sampling = self.hooks.sampling(branch)
        sampling = replace(
            sampling,
            max_tokens=min(
                limits.max_turn_tokens, limits.max_response_tokens - branch.num_response_tokens
            ),
            stop=(*actor.renderer.stop(branch.tools), *sampling.stop),
            seed=self.actor.seed_of(self.key(branch, "turn")),
        )
        if (next_turn := branch.next_turn) is not None:
            room = limits.max_prompt_tokens + limits.max_response_tokens - len(branch.prefix_ids)
            most = min(sampling.max_tokens, next_turn.max_tokens or sampling.max_tokens, room)
            sampling = replace(sampling, max_tokens=most, stop=(*sampling.stop, *next_turn.stop))
        first: list[float] = []

        def on_tokens(chunk: Chunk) -> None:
            first.extend(chunk.entropies)
            if plans_fork and not branch.was_planned and len(first) >= window:
                self._fork(branch, origin, first[:window])

        completion = await actor.engine.generate(
            branch.prefix_ids,
            sampling,
            session=self._session,
            on_tokens=on_tokens if reads else None,
            stream_interval=max(1, window),
            order=(int(is_first), self.tree.index),
        )
        if plans_fork and not branch.was_planned:
            self._fork(branch, origin, completion.entropies[:window])
        return completion

    # ends

    async def _truncate(self, branch: Branch, limit: Limit, action: Message | None) -> None:
        """End the branch by a limit; its env, if any, grades the present state."""
        leaf = branch.leaf(self.tree, "truncated")
        leaf.limit = limit
        if branch.env is not None:
            finish = partial(self.hooks.finish, branch, limit, action)
            with working(branch.clock):
                branch.clock.now("its environment to finish")
                reward, info = await self._recovery.through_outage(branch, "finish", finish)
            leaf.reward += reward
            leaf.info.update(info)

    def _fail(self, branch: Branch, error: AgentEnvError) -> None:
        """Record the failure, and replace the branch by a fresh root while retries remain."""
        leaf = branch.leaf(self.tree, "failed")
        leaf.error = f"{kind_of(error)}: {error}"
        self._complete(leaf, branch)
        failure = failure_of(error, self.tree.task, branch.action)
        self.actor.failures.add(failure, error, again=self._again)
        if self._is_over or self.tree.num_retries >= self.limits.max_failures:
            self._end(leaf, branch)
            return
        self.tree.num_live -= 1
        self.tree.num_retries += 1
        self.tree.num_started -= 1
        self.tree.num_roots -= branch.is_root
        self._start_roots(1)

    def _end(self, leaf: Node, branch: Branch) -> None:
        """A trajectory of the group has ended; the plan decides on new branches."""
        self.tree.num_live -= 1
        wanted = self.plan.on_leaf_end(self.tree, leaf)
        places = [(self.tree.root, wanted)] if isinstance(wanted, int) else wanted
        if any(number for _, number in places) and self._probes_since is not None:
            self.actor.probes.add(asyncio.get_running_loop().time() - self._probes_since)
            self._probes_since = None
        has_copies = branch.env is not None and branch.env.fork_mode != "none"
        for node, number in places:
            is_one_context = self.tree.history(node) == self.tree.path(node)
            if node is self.tree.root or not (has_copies and is_one_context):
                self._start_roots(number)
            else:
                self._fork_at(node, number)

    def _fork_at(self, node: Node, number: int) -> None:
        """Start siblings after an earlier tool result, unless the tree is out of time."""
        for _ in range(0 if self._is_over else number):
            node.num_forks = (node.num_forks or 0) + 1
            if self._record is not None:
                self._record.decided(node)
            num_turns = len(self.tree.path(node)) - 1
            name = f"{node.branch}.{num_turns}+{node.num_forks}"
            branch = Branch(name, node, WorkClock(outer=self.clock))
            with suppress(_ClosedError):
                self._start(branch, partial(self._open_by_replay, branch))

    async def _open_by_replay(self, branch: Branch) -> None:
        await self._recovery.reopen(branch, self._stops)
        branch.num_replayed = branch.num_tool_calls

    async def _close(self, branch: Branch) -> None:
        """Close the env after the last sibling has its copy, even while being cancelled."""
        try:
            try:
                await self.hooks.end(branch)
            finally:
                await branch.held()
        finally:
            if branch.env is not None:
                await self.actor.envs.close(branch.env, self.tree.task.id)

    def key(self, branch: Branch, use: str) -> str:
        tree = self.tree
        place = f"{tree.index}/{tree.task.id}/{branch.name}/{branch.num_turns}"
        return f"{self.actor.seed}/{place}/{use}"
