"""The actor: grows the trajectory tree of a task, one coroutine a branch.

    branch   generate a turn -> add a node -> env.step -> render the observation -> again
    fork     the first k tokens after a tool result have streamed in -> the plan is asked ->
             siblings start from the node that holds the result; the branch itself goes on,
             and steps its env only after every sibling holds its own copy
    end      terminated (by the env), truncated (by which limit), or failed (infrastructure);
             then the plan may start fresh roots, and a failed branch is replaced by one

Each env and each fork is closed exactly once, by the coroutine that opened it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from random import Random

import msgspec

from agentenv.engine import Engine
from agentenv.env import Env
from agentenv.errors import AgentEnvError, DataError, EngineDeadError, EngineError, EnvError
from agentenv.limits import Limits
from agentenv.plan import RolloutPlan
from agentenv.renderer import Renderer, ToolSchemas
from agentenv.tree import End, Node, TrajectoryTree
from agentenv.types import Chunk, Completion, Limit, Message, SamplingParams, Task

Opening = Callable[[], Awaitable[None]]

logger = logging.getLogger(__name__)


class Actor:
    """Rolls out tasks. One actor serves any number of concurrent rollouts.

    `sampling` gives temperature and truncation; max_tokens, stop and seed are set turn by turn.
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
    ) -> None:
        self.engine = engine
        self.renderer = renderer
        self.make_env = make_env
        self.limits = limits
        self.sampling = sampling
        self.seed = seed
        self.num_open_envs = 0

    async def rollout(self, task: Task, plan: RolloutPlan, *, index: int = 0) -> TrajectoryTree:
        """Grow one tree. `index` is its place in start order.

        Raises EngineDeadError when no engine is left and DataError for a prompt that is too
        long; every other failure is a failed leaf.
        """
        tree = TrajectoryTree(task, index=index, policy_version=self.engine.policy_version)
        tree.add(None)
        async with asyncio.TaskGroup() as group:
            growth = _Growth(self, tree, plan, group)
            growth.start_roots(plan.on_start(tree))
        return tree


class _Branch:
    """The mutable state of one growing trajectory."""

    def __init__(self, name: str, cursor: Node, deadline: float) -> None:
        self.name = name
        self.cursor = cursor  # the last node with an observation
        self.pending: Node | None = None  # an action whose observation is not there yet
        self.deadline = deadline
        self.env: Env | None = None
        self.tools: ToolSchemas = ()
        self.prefix_ids: list[int] = []
        self.num_prompt_tokens = 0
        self.num_turns = 0
        self.num_tool_calls = 0
        self.may_fork = False  # the next turn follows a tool result and is no fork itself
        self.forking: asyncio.Task[None] | None = None

    def sibling(self, name: str) -> _Branch:
        """A branch at the same place: same prefix, counts and deadline, no env yet."""
        other = _Branch(name, self.cursor, self.deadline)
        other.tools = self.tools
        other.prefix_ids = self.prefix_ids
        other.num_prompt_tokens = self.num_prompt_tokens
        other.num_turns = self.num_turns
        other.num_tool_calls = self.num_tool_calls
        return other


class _Growth:
    """Grows one tree; lives as long as its task group."""

    def __init__(
        self, actor: Actor, tree: TrajectoryTree, plan: RolloutPlan, group: asyncio.TaskGroup
    ) -> None:
        self.actor = actor
        self.limits = actor.limits
        self.tree = tree
        self.plan = plan
        self.group = group
        self.num_root_names = 0

    # starting branches

    def start_roots(self, count: int) -> None:
        for _ in range(count):
            deadline = asyncio.get_running_loop().time() + self.limits.max_seconds
            branch = _Branch(str(self.num_root_names), self.tree.root, deadline)
            self.num_root_names += 1
            self.tree.num_roots += 1
            self._start(branch, partial(self._open_root, branch))

    def _start(self, branch: _Branch, opening: Opening) -> asyncio.Task[None]:
        self.tree.num_started += 1
        self.tree.num_live += 1
        return self.group.create_task(self._grow(branch, opening))

    async def _decide_forks(self, branch: _Branch, origin: _Branch, entropies: list[float]) -> None:
        """Ask the plan, start the siblings, and wait until each holds its env.

        `origin` is the branch as it was before the turn; the branch itself may be further on.
        """
        rng = Random(self._key(origin, "fork"))
        count = self.plan.on_fork_point(self.tree, origin.cursor, entropies, rng)
        origin.cursor.num_forks = count
        holding = []
        for number in range(1, count + 1):
            sibling = origin.sibling(f"{origin.name}.{origin.num_turns}+{number}")
            held: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            growing = self._start(sibling, partial(self._open_fork, sibling, branch, held))
            growing.add_done_callback(partial(_settle, held))
            holding.append(held)
        if holding:
            await asyncio.wait(holding)

    # one branch from opening to end

    async def _grow(self, branch: _Branch, opening: Opening) -> None:
        timeout = asyncio.timeout_at(branch.deadline)
        try:
            try:
                async with timeout:
                    await opening()
                    await self._turns(branch)
            except TimeoutError:
                if not timeout.expired():
                    raise
                await self._truncate(branch, Limit.SECONDS)
        except (EngineDeadError, DataError):
            raise
        except AgentEnvError as error:
            self._fail(branch, error)
        else:
            self.tree.num_live -= 1
            leaf = branch.pending
            assert leaf is not None
            assert leaf.end is not None
            self.start_roots(self.plan.on_leaf_end(self.tree, leaf))
        finally:
            await self._close(branch)

    async def _open_root(self, branch: _Branch) -> None:
        env = self.actor.make_env(self.tree.task)
        branch.env = env
        self.actor.num_open_envs += 1
        seed = Random(f"{self.actor.seed}/{self.tree.task.id}").getrandbits(31)
        async with self._env_deadline("reset"):
            messages, info = await env.reset(seed=seed)
        branch.tools = info.get("tools", ())
        prompt_ids = self.actor.renderer.prompt(messages, branch.tools)
        if len(prompt_ids) > self.limits.max_prompt_tokens:
            raise DataError(
                f"task {self.tree.task.id}: its prompt has {len(prompt_ids)} tokens, "
                f"limits.max_prompt_tokens is {self.limits.max_prompt_tokens}"
            )
        known = self.tree.root.observation_ids
        if known and known != prompt_ids:
            raise EnvError(f"task {self.tree.task.id}: two resets with one seed gave two prompts")
        self.tree.root.observation_ids = prompt_ids
        branch.prefix_ids = prompt_ids
        branch.num_prompt_tokens = len(prompt_ids)

    async def _open_fork(
        self, branch: _Branch, parent: _Branch, held: asyncio.Future[None]
    ) -> None:
        assert parent.env is not None
        async with self._env_deadline("fork"):
            branch.env = await parent.env.fork()
        self.actor.num_open_envs += 1
        _settle(held)

    async def _turns(self, branch: _Branch) -> None:
        """Take turns until `branch.pending` is an ended leaf."""
        while True:
            completion = await self._generate(branch)
            action = self.actor.renderer.parse(completion, branch.tools)
            branch.num_turns += 1
            node = self._add_action(branch, completion)
            if branch.forking is not None:
                await branch.forking
            limit = self._limit_of_action(branch, completion, action)
            if limit is not None:
                return await self._truncate(branch, limit, action)
            assert branch.env is not None
            messages, node.reward, terminated, truncated, info = await branch.env.step(action)
            node.info.update(info)
            if terminated or truncated:
                node.end = "terminated" if terminated else "truncated"
                node.limit = None if terminated else Limit.ENV
                return None
            observation_ids = self.actor.renderer.observation(
                messages, branch.tools, self.limits.max_tool_result_tokens
            )
            limit = self._limit_of_observation(branch, observation_ids)
            if limit is not None:
                return await self._truncate(branch, limit)
            self._advance(branch, observation_ids)

    async def _generate(self, branch: _Branch) -> Completion:
        actor, window, origin = self.actor, self.plan.fork_window, branch.sibling(branch.name)
        num_response = len(branch.prefix_ids) - branch.num_prompt_tokens
        sampling = msgspec.structs.replace(
            actor.sampling,
            max_tokens=min(
                self.limits.max_turn_tokens, self.limits.max_response_tokens - num_response
            ),
            stop=actor.renderer.stop(branch.tools),
            seed=Random(self._key(branch, "turn")).getrandbits(63),
        )
        seen: list[float] = []

        def on_tokens(chunk: Chunk) -> None:
            seen.extend(chunk.entropies)
            if branch.forking is None and len(seen) >= window:
                decision = self._decide_forks(branch, origin, seen[:window])
                branch.forking = self.group.create_task(decision)

        branch.forking = None
        may_fork = branch.may_fork and window > 0
        try:
            async with asyncio.timeout(self.limits.engine_timeout_s):
                completion = await actor.engine.generate(
                    branch.prefix_ids,
                    sampling,
                    session=str(self.tree.index),
                    on_tokens=on_tokens if may_fork else None,
                    stream_interval=max(1, window),
                )
        except TimeoutError as error:
            raise EngineError(f"no turn within {self.limits.engine_timeout_s} s") from error
        if may_fork and branch.forking is None:
            decision = self._decide_forks(branch, origin, completion.entropies[:window])
            branch.forking = self.group.create_task(decision)
        return completion

    def _add_action(self, branch: _Branch, completion: Completion) -> Node:
        branch.pending = self.tree.add(
            branch.cursor,
            branch=branch.name,
            action_ids=completion.token_ids,
            logprobs=completion.logprobs,
            entropies=completion.entropies,
            version_spans=completion.version_spans,
        )
        branch.prefix_ids = branch.prefix_ids + completion.token_ids
        return branch.pending

    def _advance(self, branch: _Branch, observation_ids: list[int]) -> None:
        assert branch.pending is not None
        branch.pending.observation_ids = observation_ids
        branch.prefix_ids = branch.prefix_ids + observation_ids
        branch.cursor, branch.pending = branch.pending, None
        forkable = branch.env is not None and branch.env.fork_mode != "none"
        branch.may_fork = forkable and self.tree.num_started < self.plan.group_size

    # limits and ends

    def _limit_of_action(
        self, branch: _Branch, completion: Completion, action: Message
    ) -> Limit | None:
        num_response = len(branch.prefix_ids) - branch.num_prompt_tokens
        if completion.finish_reason == "length":
            full = num_response >= self.limits.max_response_tokens
            return Limit.RESPONSE_TOKENS if full else Limit.TURN_TOKENS
        branch.num_tool_calls += len(action.tool_calls)
        if branch.num_tool_calls > self.limits.max_tool_calls:
            return Limit.TOOL_CALLS
        return None

    def _limit_of_observation(self, branch: _Branch, observation_ids: list[int]) -> Limit | None:
        num_response = len(branch.prefix_ids) + len(observation_ids) - branch.num_prompt_tokens
        if num_response >= self.limits.max_response_tokens:
            return Limit.RESPONSE_TOKENS
        return Limit.TURNS if branch.num_turns >= self.limits.max_turns else None

    async def _truncate(self, branch: _Branch, limit: Limit, action: Message | None = None) -> None:
        leaf = self._leaf(branch, "truncated")
        leaf.limit = limit
        if branch.env is not None:
            async with self._env_deadline("finish"):
                reward, info = await branch.env.finish(limit, action)
            leaf.reward += reward
            leaf.info.update(info)

    def _fail(self, branch: _Branch, error: AgentEnvError) -> None:
        """Record the failure; its place in the group goes to a fresh root while retries last."""
        leaf = self._leaf(branch, "failed")
        leaf.error = f"{type(error).__name__}: {error}"
        self.tree.num_live -= 1
        if self.tree.num_retries < self.limits.max_failures:
            self.tree.num_retries += 1
            self.tree.num_started -= 1
            self.tree.num_roots -= "+" not in branch.name
            self.start_roots(1)

    def _leaf(self, branch: _Branch, end: End) -> Node:
        if branch.pending is None:
            branch.pending = self.tree.add(branch.cursor, branch=branch.name)
        branch.pending.end = end
        return branch.pending

    async def _close(self, branch: _Branch) -> None:
        """Close the env after the last sibling took its copy, even while being cancelled."""
        try:
            if branch.forking is not None and not branch.forking.done():
                await asyncio.wait({branch.forking})
        finally:
            if branch.env is not None:
                closing = asyncio.ensure_future(self._close_env(branch.env))
                try:
                    await asyncio.shield(closing)
                except asyncio.CancelledError:
                    await closing
                    raise

    async def _close_env(self, env: Env) -> None:
        try:
            async with self._env_deadline("close"):
                await env.close()
        except EnvError as error:
            logger.warning("task %s: %s", self.tree.task.id, error)
        finally:
            self.actor.num_open_envs -= 1

    @asynccontextmanager
    async def _env_deadline(self, what: str) -> AsyncIterator[None]:
        timeout = asyncio.timeout(self.limits.env_timeout_s)
        try:
            async with timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise EnvError(f"env.{what} took over {self.limits.env_timeout_s} s") from error

    def _key(self, branch: _Branch, use: str) -> str:
        place = (self.tree.index, self.tree.task.id, branch.name, branch.num_turns)
        return "/".join(map(str, (self.actor.seed, *place, use)))


def _settle(future: asyncio.Future[None], _: object = None) -> None:
    if not future.done():
        future.set_result(None)
