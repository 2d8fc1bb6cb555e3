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
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random
from typing import Protocol

from msgspec.structs import replace

from agentenv.branch import Branch, OpenEnvs, Patience, sample_turn
from agentenv.engine import Engine
from agentenv.env import Env
from agentenv.errors import AgentEnvError, DataError, EngineDeadError, EnvError
from agentenv.plan import RolloutPlan
from agentenv.renderer import Renderer
from agentenv.tree import TrajectoryTree
from agentenv.types import Completion, Info, Limit, Limits, Message, SamplingParams, Task

# Growing one tree: its branches from opening to end. The actor is the door to it.

Opening = Callable[[], Awaitable[None]]
Outcome = tuple[list[Message], float, bool, bool, Info]


class Means(Protocol):
    """What trees are grown with: an Actor."""

    engine: Engine
    renderer: Renderer
    make_env: Callable[[Task], Env]
    limits: Limits
    sampling: SamplingParams
    seed: int | str
    envs: OpenEnvs


class Growth:
    """Grows one tree; lives as long as its task group."""

    def __init__(
        self,
        actor: Means,
        tree: TrajectoryTree,
        plan: RolloutPlan,
        group: asyncio.TaskGroup,
        session: str,
    ) -> None:
        self.actor = actor
        self.limits = actor.limits
        self.tree = tree
        self.plan = plan
        self.group = group
        self.session = session
        self.num_root_names = 0
        self.prompt_messages: list[Message] | None = None

    # starting branches

    def start_roots(self, count: int) -> None:
        for _ in range(count):
            deadline = asyncio.get_running_loop().time() + self.limits.max_seconds
            branch = Branch(str(self.num_root_names), self.tree.root, deadline)
            self.num_root_names += 1
            self.tree.num_roots += 1
            self._start(branch, partial(self._open_root, branch))

    def _start(self, branch: Branch, opening: Opening) -> asyncio.Task[None]:
        self.tree.num_started += 1
        self.tree.num_live += 1
        return self.group.create_task(self._grow(branch, opening))

    async def _decide_forks(self, branch: Branch, origin: Branch, entropies: list[float]) -> None:
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

    async def _grow(self, branch: Branch, opening: Opening) -> None:
        timeout = asyncio.timeout_at(branch.deadline)
        patience = Patience(self.actor.engine, timeout, branch.extend)
        cut: tuple[Limit, Message | None] | None
        try:
            try:
                async with timeout, patience:
                    await opening()
                    cut = await self._turns(branch)
            except TimeoutError:
                if not timeout.expired():
                    raise
                cut = Limit.SECONDS, None
            if cut is not None:
                await self._truncate(branch, *cut)
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

    async def _open_root(self, branch: Branch) -> None:
        branch.env = self.actor.make_env(self.tree.task)
        seed = Random(f"{self.actor.seed}/{self.tree.task.id}").getrandbits(31)
        messages, info = await self.actor.envs.reset(branch.env, seed)
        branch.tools = info.get("tools", ())
        if messages != self.prompt_messages:  # rendered once for all roots
            self._render_prompt(messages, branch)
        branch.prefix_ids = self.tree.root.observation_ids
        branch.num_prompt_tokens = len(branch.prefix_ids)

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
        self.tree.root.observation_ids = prompt_ids

    async def _open_fork(self, branch: Branch, parent: Branch, held: asyncio.Future[None]) -> None:
        assert parent.env is not None
        branch.env = await self.actor.envs.fork(parent.env)
        _settle(held)

    async def _turns(self, branch: Branch) -> tuple[Limit, Message | None] | None:
        """Take turns until the env ends the episode, or return the limit that does, with an
        action that the env has not seen."""
        while True:
            completion = await self._generate(branch)
            action = self.actor.renderer.parse(completion, branch.tools, branch.prefix_ids)
            node = branch.add_action(self.tree, completion)
            if branch.forking is not None:
                await branch.forking
            limit = branch.limit_of_action(completion, action, self.limits)
            if limit is not None:
                return limit, action
            messages, node.reward, terminated, truncated, info = await self._step(branch, action)
            node.info.update(info)
            if terminated or truncated:
                node.end = "terminated" if terminated else "truncated"
                node.limit = None if terminated else Limit.ENV
                return None
            observation_ids = self.actor.renderer.observation(
                messages, branch.tools, self.limits.max_tool_result_tokens
            )
            if await self._moved(branch, observation_ids):
                continue
            limit = branch.limit_of_observation(observation_ids, self.limits)
            if limit is not None:
                return limit, None
            branch.add_observation(observation_ids)
            assert branch.env is not None
            forkable = branch.env.fork_mode != "none"
            branch.may_fork = forkable and self.tree.num_started < self.plan.group_size

    # what agentenv/assist changes

    async def _step(self, branch: Branch, action: Message) -> Outcome:
        assert branch.env is not None
        return await branch.env.step(action)

    async def _moved(self, branch: Branch, observation_ids: list[int]) -> bool:
        """Whether the branch goes on from elsewhere than behind this observation."""
        return False

    def _sampling(self, branch: Branch) -> SamplingParams:
        return self.actor.sampling

    async def _generate(self, branch: Branch) -> Completion:
        actor, window, origin = self.actor, self.plan.fork_window, branch.sibling(branch.name)
        room = self.limits.max_response_tokens - branch.num_response_tokens
        sampling = self._sampling(branch)
        sampling = replace(
            sampling,
            max_tokens=min(self.limits.max_turn_tokens, room),
            stop=(*actor.renderer.stop(branch.tools), *sampling.stop),
            seed=Random(self._key(branch, "turn")).getrandbits(63),
        )

        def decide(entropies: list[float]) -> None:
            decision = self._decide_forks(branch, origin, entropies)
            branch.forking = self.group.create_task(decision)

        branch.forking = None
        return await sample_turn(
            actor.engine,
            branch.prefix_ids,
            sampling,
            session=self.session,
            timeout_s=self.limits.engine_timeout_s,
            window=window,
            on_window=decide if branch.may_fork and window > 0 else None,
        )

    # ends

    async def _truncate(self, branch: Branch, limit: Limit, action: Message | None) -> None:
        leaf = branch.leaf(self.tree, "truncated")
        leaf.limit = limit
        if branch.env is not None:
            reward, info = await self.actor.envs.finish(branch.env, limit, action)
            leaf.reward += reward
            leaf.info.update(info)

    def _fail(self, branch: Branch, error: AgentEnvError) -> None:
        """Record the failure; its place in the group goes to a fresh root while retries last."""
        leaf = branch.leaf(self.tree, "failed")
        leaf.error = f"{type(error).__name__}: {error}"
        self.tree.num_live -= 1
        if self.tree.num_retries < self.limits.max_failures:
            self.tree.num_retries += 1
            self.tree.num_started -= 1
            self.tree.num_roots -= branch.is_root
            self.start_roots(1)

    async def _close(self, branch: Branch) -> None:
        """Close the env after the last sibling took its copy, even while being cancelled."""
        try:
            if branch.forking is not None and not branch.forking.done():
                await asyncio.wait({branch.forking})
        finally:
            if branch.env is not None:
                await self.actor.envs.close(branch.env, self.tree.task.id)

    def _key(self, branch: Branch, use: str) -> str:
        place = (self.tree.index, self.tree.task.id, branch.name, branch.num_turns)
        return "/".join(map(str, (self.actor.seed, *place, use)))


def _settle(future: asyncio.Future[None], _: object = None) -> None:
    if not future.done():
        future.set_result(None)


class Actor:
    """Rolls out tasks. One actor serves any number of concurrent rollouts.

    `sampling` gives temperature, truncation, penalty and stop strings beside those of the renderer;
    max_tokens and seed are set turn by turn.
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
        self.envs = OpenEnvs(limits.env_timeout_s)

    @property
    def num_open_envs(self) -> int:
        return self.envs.count

    async def rollout(
        self,
        task: Task,
        plan: RolloutPlan,
        *,
        index: int = 0,
        session: str = "",
        first_root: int = 0,
        max_failures: int | None = None,
    ) -> TrajectoryTree:
        """Grow one tree. `index` is its place in start order.

        For trees that hold parts of one group: `session` names those whose prompts are alike (by
        default `index` does), and the first from-scratch branch gets the name `first_root`.
        `max_failures` takes the place of that of the limits.

        Raises EngineDeadError when no engine is left and DataError for a prompt that is too
        long; every other failure is a failed leaf.
        """
        tree = TrajectoryTree(task, index=index, policy_version=self.engine.policy_version)
        tree.add(None)
        async with asyncio.TaskGroup() as group:
            growth = self._growth(tree, plan, group, session or str(index))
            growth.num_root_names = first_root
            if max_failures is not None:
                growth.limits = replace(self.limits, max_failures=max_failures)
            growth.start_roots(plan.on_start(tree))
        return tree

    def _growth(
        self, tree: TrajectoryTree, plan: RolloutPlan, group: asyncio.TaskGroup, session: str
    ) -> Growth:
        return Growth(self, tree, plan, group, session)
