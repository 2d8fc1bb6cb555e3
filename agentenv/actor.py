"""The actor: grows the trajectory tree of a task, one coroutine a branch.

    branch   generate a turn -> add a node -> env.step -> render the observation -> again
    fork     the first k tokens after a tool result have streamed in -> the plan is asked ->
             siblings start from the node that holds the result; the branch itself goes on,
             and steps its env only after every sibling holds its own copy
    end      terminated (by the env), truncated (by which limit), or failed (infrastructure);
             then the plan may start fresh roots, and a failed branch is replaced by one
    failure  a turn that the engine failed is sampled again; a step that the env failed is taken
             again, in a fresh env that has been led to the same place; only then the branch fails;
             what is down is waited for, be it for a step or for the grade
    time     a branch is out of time once it was worked for `max_seconds`, its tree after
             `max_tree_seconds`: what is live then ends, and nothing is tried again

An `Actor` serves any number of rollouts, a `Rollout` grows one tree, and a `Guide` may take part in
its growing. `agentenv/branch.py` holds what a branch is. Each env and each fork is closed exactly
once, by the coroutine that opened it.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from itertools import count
from math import inf
from random import Random
from typing import NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from agentenv.backoff import backoff_s
from agentenv.branch import Branch, OpenEnvs
from agentenv.deadline import Alarm, Deadline, Work, WorkClock, waiting, working
from agentenv.engine import Engine
from agentenv.env import Env, StepResult
from agentenv.errors import (
    AgentEnvError,
    ConfigError,
    CrashError,
    DataError,
    EngineDeadError,
    EngineError,
    EnvError,
    GivenUpError,
    GraderError,
    InfraError,
    OutageError,
    WorkerError,
)
from agentenv.failures import Failures, failure_of, kind_of
from agentenv.journal import Recorded, TreeRecord
from agentenv.plan import RolloutPlan
from agentenv.renderer import Renderer
from agentenv.tree import Node, Prefix, TrajectoryTree, packed_ids
from agentenv.types import (
    Chunk,
    Completion,
    Info,
    Limit,
    Limits,
    Message,
    SamplingParams,
    Task,
)

logger = logging.getLogger(__name__)

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 20.0  # before a turn or a step is taken again

TURN, STEP = "a turn of the engine", "the environment's step"
PAUSED = "the run, which is paused, to go on"

T = TypeVar("T")
Opening = Callable[[], Awaitable[None]]  # gives a branch its env and its tokens


class Guide:
    """Takes part in a rollout beside its plan and its envs; this one changes nothing.

    One object a rollout. A subclass overrides what it changes, in the order of a trajectory:

        prefix     the prompt was rendered
        sampling   a turn will be sampled
        step       the policy has acted and the env is to answer
        redirect   the env has answered, and the episode goes on
        finish     a limit ends the episode: the env is to grade
        end        the branch is over in any way, cancelled too

    Its constructor may refuse the rollout with a ConfigError.
    """

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout

    def prefix(self, branch: Branch, prompt_ids: list[int]) -> list[int]:
        """Token ids that the first turn of every root begins with; asked once a tree.

        They are context and not sampled, so that no loss mask covers them, and they count as
        response, not as prompt.
        """
        return []

    def sampling(self, branch: Branch) -> SamplingParams:
        """How the next turn of the branch is sampled."""
        return self.rollout.actor.sampling

    async def step(self, branch: Branch, action: Message) -> StepResult:
        """What the env answers to the action."""
        assert branch.env is not None
        return await self.rollout.actor.envs.step(branch.env, action)

    async def redirect(self, branch: Branch, observation_ids: Sequence[int]) -> bool:
        """Whether the branch goes on from elsewhere than behind this observation.

        If so, the branch stands there already: `Branch.take_back` and `Branch.restart` move it.
        """
        return False

    async def finish(
        self, branch: Branch, limit: Limit, action: Message | None
    ) -> tuple[float, Info]:
        """The reward of an episode that a limit ends, and facts; `action` was not stepped."""
        assert branch.env is not None
        return await self.rollout.actor.envs.finish(branch.env, limit, action)

    async def end(self, branch: Branch) -> None:
        """Free what belongs to the branch."""


class PrefixHits:
    """Prompt tokens of turns whose keys and values the engine still had, since the last `take`:
    of turns that go on with their own trajectory, and of the first turns of forks."""

    def __init__(self) -> None:
        self._sums: dict[str, list[int]] = {}  # tokens cached, and in all

    def add(self, branch: Branch, completion: Completion) -> None:
        if branch.num_turns:
            kind = "turn_hits" if branch.cursor.branch == branch.name else "fork_hits"
            sums = self._sums.setdefault(kind, [0, 0])
            sums[0] += completion.num_cached_tokens
            sums[1] += len(branch.prefix_ids)

    def take(self) -> dict[str, float]:
        """The shares by kind; none of a kind without turns."""
        return {f"prefix/{kind}": hit / num for kind, (hit, num) in self.drain().items()}

    def drain(self) -> dict[str, list[int]]:
        """The sums themselves, which `merge` adds to those of another actor."""
        sums, self._sums = self._sums, {}
        return sums

    def merge(self, others: dict[str, list[int]]) -> None:
        """Those of an actor of another process."""
        for kind, sums in others.items():
            mine = self._sums.setdefault(kind, [0, 0])
            mine[:] = [a + b for a, b in zip(mine, sums, strict=True)]


class ProbeWaits:
    """How long roots waited for a probe, the one root that some plans begin with (AEPO), since the
    last `take`: from the start of a tree until its first leaf let others begin."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def take(self) -> dict[str, float]:
        """Mean and longest wait; nothing where none waited."""
        seconds = self.drain()
        if not seconds:
            return {}
        return {
            "rollout/probe_wait_s": sum(seconds) / len(seconds),
            "rollout/probe_wait_s_max": max(seconds),
        }

    def drain(self) -> list[float]:
        """The seconds themselves, which `merge` adds to those of another actor."""
        seconds, self._seconds = self._seconds, []
        return seconds

    def merge(self, others: list[float]) -> None:
        """Those of an actor of another process."""
        self._seconds += others


class Awaited(NamedTuple):
    """What a branch awaits, and since when (time of the loop, seconds); `branch` is "" where the
    tree itself awaits that."""

    task_id: str
    tree: int
    branch: str
    what: str
    since: float


class BranchNow(Struct, array_like=True, frozen=True):
    """Of a live branch of a tree (of the tree itself: ""): what it awaits and for how many seconds,
    what it has taken so far, and the seconds that it was worked for."""

    branch: str
    what: str
    for_s: float
    num_turns: int = 0
    num_response_tokens: int = 0
    num_tool_calls: int = 0
    worked_s: float = 0.0


class _OutOfTimeError(Exception):
    """A branch has reached its limit of seconds."""


class _ClosedError(Exception):
    """Nothing can be started any more in the task group of a tree."""


def _set(event: asyncio.Event, task: object) -> None:
    event.set()


async def _raise(error: Exception) -> None:
    raise error


class _OtherPromptError(Exception):
    """The prompt of a tree that goes on is not what it was."""


class Rollout:
    """Grows one tree: a coroutine a branch, all of them in one task group."""

    def __init__(
        self,
        actor: Actor,
        tree: TrajectoryTree,
        plan: RolloutPlan,
        limits: Limits,
        session: str,
        record: TreeRecord | None = None,
    ) -> None:
        self.actor = actor
        self.tree = tree
        self.plan = plan
        self.limits = limits
        self.prompt_messages: list[Message] | None = None  # of the first root
        self._session = session
        self._record = record
        self.clock = WorkClock()  # runs while that of any branch does
        self.branches: set[Branch] = set()  # that are not over
        self._is_over = False  # the tree has no time left: nothing begins any more
        self._cancelled = ""  # why; empty: it is not
        self._growing: dict[Deadline, None] = {}  # of branches that are not at their end, in order
        self._guide = actor.make_guide(self)
        self._group = asyncio.TaskGroup()
        self._context = copy_context()
        self._next_root = 0
        self._probes_since: float | None = None  # time of the loop, while a single root grows
        self._num_prompt_tokens = 0
        self._env_seed = Random(f"{actor.seed}/{tree.task.id}").getrandbits(31)

    async def run(
        self, first_root: int, recorded: Recorded | None = None, cancelled: str = ""
    ) -> None:
        """Grow the tree to its last leaf, from its start or from where it was recorded, and until
        that is written. The next root is named `first_root`. `cancelled`: see `Actor.rollout`."""
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
                    self._go_on(recorded)
                if cancelled:  # no branch has run yet
                    self.cancel(cancelled)
            if self._record is not None:
                self.clock.now("the journal")
                await self._record.finished()
        finally:
            alarm.cancel()
            self.actor.rollouts.discard(self)
            del self._guide  # which holds the rollout: its tree would stay until a collection

    def clocks(self) -> list[WorkClock]:
        """Of the live branches; of the tree when all have ended."""
        return [branch.clock for branch in self.branches] or [self.clock]

    def awaited(self) -> Iterator[Awaited]:
        """What each live branch awaits, or the tree when all have ended; nothing of one that has
        only begun."""
        task, index = self.tree.task.id, self.tree.index
        clocks = [(branch.name, branch.clock) for branch in self.branches] or [("", self.clock)]
        for name, clock in clocks:
            if clock.doing:
                yield Awaited(task, index, name, clock.doing, clock.since)

    def now(self) -> list[BranchNow]:
        """What becomes of each live branch, or of the tree when all have ended."""
        now = asyncio.get_running_loop().time()
        found = []
        for one in self.branches:
            waited_s = now - one.clock.since if one.clock.doing else 0.0
            counts = one.num_turns, one.num_response_tokens, one.num_tool_calls
            found.append(BranchNow(one.name, one.clock.doing, waited_s, *counts, one.clock()))
        if not found and self.clock.doing:
            worked_s = self.clock()
            found = [BranchNow("", self.clock.doing, now - self.clock.since, worked_s=worked_s)]
        return found

    def cancel(self, reason: str) -> int:
        """Cancel the tree on a person's request: its live branches fail, with the kind `cancelled`,
        and none is replaced. Returns their number; a branch that is ending already ends as it would
        have."""
        self._cancelled = reason
        number = len(self._growing)
        self._run_out()
        return number

    def _run_out(self) -> None:
        """The time of the tree is over: its live branches end by their limit of seconds."""
        self._is_over = True
        for deadline in list(self._growing):
            deadline.expire()

    # starting branches

    def _go_on(self, recorded: Recorded) -> None:
        """Start the branches that were live when the tree was recorded."""
        for one in recorded.branches:
            cursor = self.tree.nodes[one.cursor]
            branch = Branch(one.name, cursor, WorkClock(one.seconds, self.clock))
            opening = partial(self._open_again, branch, recorded.stops)
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
        context = self._context.copy()  # without the clock of the branch that it forks from
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
        messages = await self._reset(branch)
        if messages != self.prompt_messages:  # rendered once for all roots
            self._render_prompt(messages, branch)
        branch.prefix_ids = Prefix((self.tree.root.observation_ids,))
        branch.num_prompt_tokens = self._num_prompt_tokens

    async def _reset(self, branch: Branch) -> list[Message]:
        """Give the branch a fresh env; the messages of its prompt."""

        async def reset() -> tuple[list[Message], Info]:
            await self._drop_env(branch)
            try:
                branch.env = self.actor.make_env(self.tree.task)
            except AgentEnvError:
                raise
            except Exception as error:
                raise CrashError(f"making the environment raised {error!r}") from error
            return await self.actor.envs.reset(branch.env, self._env_seed)

        messages, info = await self._through_outage(branch, "reset", reset)
        branch.tools = info.get("tools", ())
        return messages

    async def _drop_env(self, branch: Branch) -> None:
        env, branch.env = branch.env, None
        if env is not None:
            await self.actor.envs.close(env, self.tree.task.id)

    def _render_prompt(self, messages: list[Message], branch: Branch) -> None:
        if self.prompt_messages is not None:
            raise EnvError(f"task {self.tree.task.id}: two resets with one seed gave two prompts")
        prompt_ids = self.actor.renderer.prompt(messages, branch.tools)
        if len(prompt_ids) > self.limits.max_prompt_tokens:
            raise DataError(
                f"task {self.tree.task.id}: its prompt has {len(prompt_ids)} tokens, "
                f"limits.max_prompt_tokens is {self.limits.max_prompt_tokens}"
            )
        self.prompt_messages = messages
        self._num_prompt_tokens = len(prompt_ids)
        opening = self._guide.prefix(branch, prompt_ids)
        self.tree.root.observation_ids = packed_ids(prompt_ids + opening)
        self._complete(self.tree.root, branch)

    def _complete(self, node: Node, branch: Branch, stop: str | None = None) -> None:
        """The node will not change any more, but for the forks taken there."""
        self.tree.events.append(node.index)
        if self._record is not None:
            self._record.turned(node, branch.clock(), stop)

    async def _open_again(self, branch: Branch, stops: dict[int, str]) -> None:
        """Give a branch of an earlier process its tokens, and an env that was led to its place."""
        tree, renderer = self.tree, self.actor.renderer
        messages = await self._reset(branch)
        if self.prompt_messages is None:
            prompt_ids = renderer.prompt(messages, branch.tools)
            if list(tree.root.observation_ids) != prompt_ids:
                raise _OtherPromptError
            self.prompt_messages, self._num_prompt_tokens = messages, len(prompt_ids)
        branch.prefix_ids = Prefix((tree.root.observation_ids,))
        branch.num_prompt_tokens = self._num_prompt_tokens
        assert branch.actions is not None
        path = tree.path(branch.cursor)[1:]
        for node in path:
            stop = stops.get(node.index)
            done = Completion(list(node.action_ids), [], [], "stop", [], stop)
            action = renderer.parse(done, branch.tools, branch.prefix_ids)
            branch.actions.append(action)
            branch.num_tool_calls += len(action.tool_calls)
            branch.prefix_ids = branch.prefix_ids.plus(node.action_ids).plus(node.observation_ids)
        branch.num_turns = len(path)
        assert branch.env is not None
        if path and branch.env.fork_mode == "none":
            raise OutageError("its env, which has no copies, ended with an earlier process")
        await self._lead(branch, there=messages == self.prompt_messages)
        may_ask = bool(path) and branch.cursor.num_forks is None
        branch.may_fork = may_ask and self._has_room_to_fork(branch)

    def _has_room_to_fork(self, branch: Branch) -> bool:
        assert branch.env is not None
        has_room = self.tree.num_started < self.plan.group_size
        return has_room and branch.env.fork_mode != "none"

    # forking

    def _fork(self, branch: Branch, origin: Branch, entropies: list[float]) -> None:
        """Ask the plan and start the siblings; `branch.holding` tells when each holds its env.

        `origin` is the branch as it was before the turn; the branch itself may be further on.
        """
        branch.was_asked = True
        try:
            rng = Random(self._key(origin, "fork"))
            first = array("f", entropies)  # as nodes hold them, so that equal ones stay equal
            wanted = self.plan.on_fork_point(self.tree, origin.cursor, first, rng)
            origin.cursor.num_forks = num_forks = 0 if self._is_over else wanted
            self.tree.events.append(~origin.cursor.index)
            if self._record is not None:
                self._record.asked(origin.cursor)
            for number in range(1, num_forks + 1):
                name = f"{origin.name}.{origin.num_turns}+{number}"
                sibling = origin.sibling(name, self.clock)
                held = asyncio.Event()  # also set when the sibling failed to get its env
                task = self._start(sibling, partial(self._open_fork, sibling, branch, held))
                task.add_done_callback(partial(_set, held))  # and when it never began
                branch.holding.append(held)
        except _ClosedError:  # a last chunk, while the tree is being given up
            pass
        except Exception as error:  # whoever streams is not to blame: the rollout raises it
            self._group.create_task(_raise(error))

    async def _open_fork(self, sibling: Branch, branch: Branch, held: asyncio.Event) -> None:
        """Give a sibling its copy of the branch's env; `held` is set once it has that, or failed to
        get it."""
        assert branch.env is not None
        try:
            sibling.env = await self.actor.envs.fork(branch.env)
        except (OutageError, CrashError):
            raise
        except EnvError:  # its process may be lost
            if sibling.actions is None or not self.limits.max_turn_retries:
                raise
            held.set()
            await self._rest(sibling, "fork", 0)
            await self._lead_back(sibling)
        finally:
            held.set()

    # one branch from opening to end

    async def _grow(self, branch: Branch, opening: Opening) -> None:
        """Grow one branch from its opening to its end, and close its env, whatever the end is."""
        self.branches.add(branch)
        try:
            cut = await self._in_time(branch, opening)
            if cut is not None and not branch.is_open:
                raise EnvError(f"no env within {branch.clock():g} s")
            if cut is not None:
                await self._truncate(branch, *cut)
        except (EngineDeadError, WorkerError, DataError, ConfigError):  # not better a second time
            raise
        except AgentEnvError as error:
            self._fail(branch, error)
        else:
            assert branch.pending is not None
            assert branch.pending.end is not None
            self._complete(branch.pending, branch)
            self.actor.failures.add(None)
            self._end(branch.pending)
        finally:
            branch.clock.now("its environment to close")
            try:
                await self._close(branch)
            finally:
                self.branches.discard(branch)

    async def _in_time(
        self, branch: Branch, opening: Opening
    ) -> tuple[Limit, Message | None] | None:
        """Open the branch and take its turns while there is time; returns what `_turns` does."""
        deadline = Deadline(self.limits.max_seconds, branch.clock, _OutOfTimeError)
        try:
            with working(branch.clock), deadline:
                branch.clock.now("its environment")
                self._growing[deadline] = None
                if self._is_over:  # before an environment is made, which may kill its process
                    raise _OutOfTimeError
                await opening()
                branch.is_open = True
                return await self._turns(branch)
        except _OutOfTimeError:
            if self._cancelled:
                raise GivenUpError(self._cancelled) from None
            return Limit.SECONDS, None
        finally:
            self._growing.pop(deadline, None)

    async def _turns(self, branch: Branch) -> tuple[Limit, Message | None] | None:
        """Take turns until the env ends the episode, or return the limit that does, with an
        action that the env has not seen."""
        renderer, limits = self.actor.renderer, self.limits
        while True:
            completion = await self._sample(branch)
            action = renderer.parse(completion, branch.tools, branch.prefix_ids)
            branch.action = action
            node = branch.add_action(self.tree, completion)
            if branch.holding:
                with waiting("the copies of its environment that its forks take"):
                    await branch.held()
            limit = branch.limit_of_action(completion, action, limits)
            if limit is not None:
                return limit, action
            result = await self._step(branch, action)
            branch.clock.now("its observation to be tokenized")
            messages, node.reward, terminated, truncated, info = result
            node.info.update(info)
            if terminated or truncated:
                node.end = "terminated" if terminated else "truncated"
                node.limit = None if terminated else Limit.ENV
                return None
            room = limits.max_tool_result_tokens
            await renderer.prepare(messages, branch.tools, room)
            observation_ids = renderer.observation(messages, branch.tools, room)
            if await self._guide.redirect(branch, observation_ids):
                continue
            limit = branch.limit_of_observation(observation_ids, limits)
            if limit is not None:
                return limit, None
            branch.add_observation(observation_ids)
            self._complete(branch.cursor, branch, completion.stop)
            if branch.actions is not None:
                branch.actions.append(action)
            branch.may_fork = self._has_room_to_fork(branch)

    async def _sample(self, branch: Branch) -> Completion:
        """Sample the next turn, once more with the same seed where the engine failed."""
        branch.was_asked, branch.holding, attempt = False, [], 0
        while True:
            if self.actor.is_paused:
                await self.actor.until_resumed()
            branch.clock.now(TURN)
            marks = branch.clock.marks(branch.clock.since)
            try:
                completion = await self._generate(branch)
                self.actor.prefixes.add(branch, completion)
                return completion
            except EngineDeadError:
                raise
            except EngineError as error:
                if error.is_final or attempt == self.limits.max_turn_retries:
                    raise
                branch.clock.give_back(marks)
            await self._rest(branch, "turn", attempt)
            attempt += 1

    async def _generate(self, branch: Branch) -> Completion:
        """Sample the next turn. Where the branch may fork, `_fork` starts as soon as the entropies
        of the first `fork_window` tokens are there, or at the end of a shorter turn."""
        actor, limits, window = self.actor, self.limits, self.plan.fork_window
        asks = branch.may_fork and window > 0 and not branch.was_asked
        origin = branch.sibling(branch.name, self.clock) if asks else branch
        # The first entropies of the first turn, and of a probe, are what others are compared with.
        full = self.tree.num_started >= self.plan.group_size
        reads = window > 0 and (asks or branch.num_turns == 0 or not full)
        sampling = self._guide.sampling(branch)
        sampling = replace(
            sampling,
            max_tokens=min(
                limits.max_turn_tokens, limits.max_response_tokens - branch.num_response_tokens
            ),
            stop=(*actor.renderer.stop(branch.tools), *sampling.stop),
            seed=self.actor.seed_of(self._key(branch, "turn")),
        )
        first: list[float] = []

        def on_tokens(chunk: Chunk) -> None:
            first.extend(chunk.entropies)
            if asks and not branch.was_asked and len(first) >= window:
                self._fork(branch, origin, first[:window])

        completion = await actor.engine.generate(
            branch.prefix_ids,
            sampling,
            session=self._session,
            on_tokens=on_tokens if reads else None,
            stream_interval=max(1, window),
            order=(int(branch.num_turns == 0), self.tree.index),
        )
        if asks and not branch.was_asked:
            self._fork(branch, origin, completion.entropies[:window])
        return completion

    async def _step(self, branch: Branch, action: Message) -> StepResult:
        """What the env answers. A step that the env fails is taken again in a fresh env that was
        led to the same place, if that is possible."""
        assert branch.env is not None
        attempt = 0
        while True:
            try:
                if attempt:
                    await self._lead_back(branch)
                branch.clock.now(STEP)
                step = partial(self._guide.step, branch, action)
                return await self._through_outage(branch, "step", step)
            except (OutageError, CrashError):
                raise
            except (EnvError, GraderError):
                can_copy = branch.env is None or branch.env.fork_mode != "none"
                allowed = self.limits.max_turn_retries if can_copy else 0
                if attempt == allowed or branch.actions is None:
                    raise
            await self._rest(branch, "step", attempt)
            attempt += 1

    async def _lead_back(self, branch: Branch) -> None:
        """Take the actions of the branch again in a fresh env. Raises EnvError where that answers
        otherwise than the tree has it."""
        await self._lead(branch, there=await self._reset(branch) == self.prompt_messages)

    async def _lead(self, branch: Branch, *, there: bool) -> None:
        """Take the actions of the branch in its env, which was just reset; `there`: to the prompt
        of the tree."""
        assert branch.actions is not None
        assert branch.env is not None
        size = self.limits.max_tool_result_tokens
        path = self.tree.path(branch.cursor)[1:]
        for node, action in zip(path, branch.actions, strict=True):
            step = partial(self.actor.envs.step, branch.env, action)
            result = await self._through_outage(branch, "step", step)
            messages, _, terminated, truncated, _ = result
            await self.actor.renderer.prepare(messages, branch.tools, size)
            ids = self.actor.renderer.observation(messages, branch.tools, size)
            same = packed_ids(ids) == node.observation_ids
            there = there and not terminated and not truncated and same
        if not there:
            branch.actions = None  # nor would another env be
            raise EnvError("a fresh env answers otherwise than the first did")

    async def _through_outage(
        self, branch: Branch, use: str, call: Callable[[], Awaitable[T]]
    ) -> T:
        """Call until the machinery behind it works, for `outage_s` of the limits. What was worked
        for a call that failed is given back."""
        began_s: float | None = None
        for attempt in count():
            work = Work()
            try:
                return await call()
            except InfraError as error:
                work.give_back()
                now = asyncio.get_running_loop().time()
                began_s = now if began_s is None else began_s
                if now - began_s >= self.limits.outage_s:
                    raise OutageError(f"{use} failed for {now - began_s:g} s: {error}") from error
            await self._rest(branch, use, attempt)
        raise AssertionError

    async def _rest(self, branch: Branch, use: str, attempt: int) -> None:
        """Wait before a turn or a step is taken again."""
        self.tree.num_retaken += 1
        key = self._key(branch, use)
        with waiting(f"a break before the {use} is tried again"):
            await asyncio.sleep(backoff_s(attempt, key, first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S))

    # ends

    async def _truncate(self, branch: Branch, limit: Limit, action: Message | None) -> None:
        """End the branch by a limit; its env, if it has one, grades what there is."""
        leaf = branch.leaf(self.tree, "truncated")
        leaf.limit = limit
        if branch.env is not None:
            finish = partial(self._guide.finish, branch, limit, action)
            with working(branch.clock):
                branch.clock.now("its environment to finish")
                reward, info = await self._through_outage(branch, "finish", finish)
            leaf.reward += reward
            leaf.info.update(info)

    def _fail(self, branch: Branch, error: AgentEnvError) -> None:
        """Record the failure; its place in the group goes to a fresh root while retries last."""
        leaf = branch.leaf(self.tree, "failed")
        leaf.error = f"{kind_of(error)}: {error}"
        self._complete(leaf, branch)
        self.actor.failures.add(failure_of(error, self.tree.task, branch.action), error)
        if self._is_over or self.tree.num_retries >= self.limits.max_failures:
            self._end(leaf)
            return
        self.tree.num_live -= 1
        self.tree.num_retries += 1
        self.tree.num_started -= 1
        self.tree.num_roots -= branch.is_root
        self._start_roots(1)

    def _end(self, leaf: Node) -> None:
        """A place of the group is done with; the plan says what begins now."""
        self.tree.num_live -= 1
        number = self.plan.on_leaf_end(self.tree, leaf)
        if number and self._probes_since is not None:
            self.actor.probes.add(asyncio.get_running_loop().time() - self._probes_since)
            self._probes_since = None
        self._start_roots(number)

    async def _close(self, branch: Branch) -> None:
        """Close the env after the last sibling took its copy, even while being cancelled."""
        try:
            try:
                await self._guide.end(branch)
            finally:
                await branch.held()
        finally:
            if branch.env is not None:
                await self.actor.envs.close(branch.env, self.tree.task.id)

    def _key(self, branch: Branch, use: str) -> str:
        tree = self.tree
        place = f"{tree.index}/{tree.task.id}/{branch.name}/{branch.num_turns}"
        return f"{self.actor.seed}/{place}/{use}"


class Actor:
    """Rolls out tasks. One actor serves any number of concurrent rollouts.

    `sampling` gives temperature, truncation, penalty and stop strings beside those of the renderer;
    max_tokens and seed are set turn by turn. `make_guide` gives each rollout its guide.
    All randomness is keyed by (seed, index, task, branch, turn).
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        make_env: Callable[[Task], Env],
        limits: Limits,
        sampling: SamplingParams,
        seed: int | str,
        make_guide: Callable[[Rollout], Guide] = Guide,
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.make_env = make_env
        self.limits = limits
        self.sampling = sampling
        self.seed = seed
        self.make_guide = make_guide
        self.envs = OpenEnvs(limits.env_timeout_s)
        self.prefixes = PrefixHits()
        self.probes = ProbeWaits()
        self.rollouts: set[Rollout] = set()  # that go on
        self._goes_on = asyncio.Event()  # unless turns are paused
        self._goes_on.set()
        self.failures = Failures(limits.max_failed_share, strict=limits.strict)
        self._draws = Random()  # one for all turns, since making it costs as much as its draw

    async def rollout(
        self,
        task: Task,
        plan: RolloutPlan,
        *,
        index: int = 0,
        session: str = "",
        first_root: int = 0,
        max_failures: int | None = None,
        record: TreeRecord | None = None,
        recorded: Recorded | None = None,
        cancelled: str = "",
    ) -> TrajectoryTree:
        """Grow one tree. `index` is its place in start order.

        What happens to it is written to `record`, and the tree is returned once that is on the
        disk. `recorded` is the tree as an earlier process left it, which goes on from there; it
        begins again if its task has another prompt by now, or if a guide took part in it. With a
        reason in `cancelled` the tree ends at once: its live branches fail as cancelled, and no
        environment is made and no turn is sampled.

        For trees that hold parts of one group: `session` names those whose prompts are alike (by
        default `index` does), and the first from-scratch branch gets the name `first_root`.
        `max_failures` takes the place of that of the limits.

        Raises EngineDeadError when no engine is left, DataError for a prompt that is too long,
        ConfigError for what no retry mends, and TooManyFailuresError as `limits` say; every other
        failure is a failed leaf.
        """
        limits = self.limits
        if max_failures is not None:
            limits = replace(limits, max_failures=max_failures)
        make = partial(
            Rollout, self, plan=plan, limits=limits, session=session or str(index), record=record
        )
        if recorded is not None and self.make_guide is Guide:
            try:
                return await self._go_on(make, recorded, record, cancelled)
            except* _OtherPromptError:
                logger.warning("task %s has another prompt than its tree: it begins again", task.id)
        tree = TrajectoryTree(task, index=index, policy_version=self.engine.policy_version)
        tree.add(None)
        if record is not None:
            record.began(tree)
        await make(tree).run(first_root, cancelled=cancelled)
        return tree

    def seed_of(self, key: str) -> int:
        """The seed of a turn, 63 bits of its key."""
        self._draws.seed(key)  # what earlier versions sampled, they would sample again
        return self._draws.getrandbits(63)

    def awaited(self) -> list[Awaited]:
        """What every branch of every rollout awaits now."""
        return [one for rollout in self.rollouts for one in rollout.awaited()]

    def longest(self) -> dict[str, float]:
        """What is awaited, and since when by who has awaited it longest (time of the loop)."""
        found: dict[str, float] = {}
        for rollout in self.rollouts:
            for clock in rollout.clocks():
                if clock.doing and clock.since < found.get(clock.doing, inf):
                    found[clock.doing] = clock.since
        return found

    def growing(self, index: int) -> Rollout | None:
        """The rollout of the tree with this index, while it goes on."""
        return next((one for one in self.rollouts if one.tree.index == index), None)

    @property
    def is_paused(self) -> bool:
        return not self._goes_on.is_set()

    def pause(self) -> None:
        """Begin no turn until `resume`; those under way end."""
        self._goes_on.clear()

    def resume(self) -> None:
        """End a pause."""
        self._goes_on.set()

    async def until_resumed(self) -> None:
        """Wait while turns are paused; the clock of the rollout stands meanwhile."""
        with waiting(PAUSED):
            while self.is_paused:
                await self._goes_on.wait()

    async def _go_on(
        self,
        make: Callable[[TrajectoryTree], Rollout],
        recorded: Recorded,
        record: TreeRecord | None,
        cancelled: str,
    ) -> TrajectoryTree:
        tree = recorded.tree
        if record is not None:
            record.goes_on(recorded)
        names = [node.branch for node in tree.nodes] + [one.name for one in recorded.branches]
        roots = [int(name) for name in names if name.isdecimal()]
        await make(tree).run(max(roots, default=-1) + 1, recorded, cancelled)
        return tree
