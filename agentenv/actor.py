"""The actor: grows the trajectory tree of a task, one coroutine a branch.

    branch   generate a turn -> add a node -> env.step -> render the observation -> again
    fork     the first k tokens after a tool result have streamed in -> the plan is asked ->
             siblings start from the node that holds the result; the branch itself goes on,
             and steps its env only after every sibling holds its own copy
    end      terminated (by the env), truncated (by which limit), or failed (infrastructure);
             then the plan may start fresh roots, and a failed branch is replaced by one

An `Actor` serves any number of rollouts, a `Rollout` grows one tree, and a `Guide` may take part in
its growing. `agentenv/branch.py` holds what a branch is. Each env and each fork is closed exactly
once, by the coroutine that opened it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from random import Random

from msgspec.structs import replace

from agentenv.branch import Branch, OpenEnvs
from agentenv.deadline import Deadline, rollout_clock
from agentenv.engine import Engine
from agentenv.env import Env, StepResult
from agentenv.errors import AgentEnvError, DataError, EngineDeadError, EngineError, EnvError
from agentenv.plan import RolloutPlan
from agentenv.renderer import Renderer
from agentenv.tree import TrajectoryTree
from agentenv.types import Chunk, Completion, Info, Limit, Limits, Message, SamplingParams, Task

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
        return await branch.env.step(action)

    async def redirect(self, branch: Branch, observation_ids: list[int]) -> bool:
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


class _OutOfTimeError(Exception):
    """A branch has reached its limit of seconds."""


class Rollout:
    """Grows one tree: a coroutine a branch, all of them in one task group."""

    def __init__(
        self, actor: Actor, tree: TrajectoryTree, plan: RolloutPlan, limits: Limits, session: str
    ) -> None:
        self.actor = actor
        self.tree = tree
        self.plan = plan
        self.limits = limits
        self.prompt_messages: list[Message] | None = None  # of the first root
        self._session = session
        self._clock = rollout_clock(actor.engine)
        self._guide = actor.make_guide(self)
        self._group = asyncio.TaskGroup()
        self._next_root = 0
        self._num_prompt_tokens = 0

    async def run(self, first_root: int) -> None:
        """Grow the tree from its start to its last leaf; the first root is named `first_root`."""
        self._next_root = first_root
        async with self._group:
            self._start_roots(self.plan.on_start(self.tree))

    # starting branches

    def _start_roots(self, count: int) -> None:
        for _ in range(count):
            deadline = self._clock() + self.limits.max_seconds
            branch = Branch(str(self._next_root), self.tree.root, deadline)
            self._next_root += 1
            self.tree.num_roots += 1
            self._start(branch, partial(self._open_root, branch))

    def _start(self, branch: Branch, opening: Opening) -> None:
        self.tree.num_started += 1
        self.tree.num_live += 1
        self._group.create_task(self._grow(branch, opening))

    async def _open_root(self, branch: Branch) -> None:
        branch.env = self.actor.make_env(self.tree.task)
        seed = Random(f"{self.actor.seed}/{self.tree.task.id}").getrandbits(31)
        messages, info = await self.actor.envs.reset(branch.env, seed)
        branch.tools = info.get("tools", ())
        if messages != self.prompt_messages:  # rendered once for all roots
            self._render_prompt(messages, branch)
        branch.prefix_ids = self.tree.root.observation_ids
        branch.num_prompt_tokens = self._num_prompt_tokens

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
        self.tree.root.observation_ids = prompt_ids + self._guide.prefix(branch, prompt_ids)

    # forking

    async def _fork(self, branch: Branch, origin: Branch, entropies: list[float]) -> None:
        """Ask the plan, start the siblings, and wait until each holds its env.

        `origin` is the branch as it was before the turn; the branch itself may be further on.
        """
        rng = Random(self._key(origin, "fork"))
        count = self.plan.on_fork_point(self.tree, origin.cursor, entropies, rng)
        origin.cursor.num_forks = count
        holding = []
        for number in range(1, count + 1):
            sibling = origin.sibling(f"{origin.name}.{origin.num_turns}+{number}")
            held = asyncio.Event()  # also set when the sibling failed to get its env
            self._start(sibling, partial(self._open_fork, sibling, branch, held))
            holding.append(held)
        for held in holding:
            await held.wait()

    async def _open_fork(self, sibling: Branch, branch: Branch, held: asyncio.Event) -> None:
        assert branch.env is not None
        try:
            sibling.env = await self.actor.envs.fork(branch.env)
        finally:
            held.set()

    # one branch from opening to end

    async def _grow(self, branch: Branch, opening: Opening) -> None:
        cut: tuple[Limit, Message | None] | None
        try:
            try:
                async with Deadline(branch.deadline, self._clock, _OutOfTimeError()):
                    await opening()
                    cut = await self._turns(branch)
            except _OutOfTimeError:
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
            self._start_roots(self.plan.on_leaf_end(self.tree, leaf))
        finally:
            await self._close(branch)

    async def _turns(self, branch: Branch) -> tuple[Limit, Message | None] | None:
        """Take turns until the env ends the episode, or return the limit that does, with an
        action that the env has not seen."""
        renderer, limits = self.actor.renderer, self.limits
        while True:
            completion = await self._generate(branch)
            action = renderer.parse(completion, branch.tools, branch.prefix_ids)
            node = branch.add_action(self.tree, completion)
            if branch.forking is not None:
                await branch.forking
            limit = branch.limit_of_action(completion, action, limits)
            if limit is not None:
                return limit, action
            result = await self._guide.step(branch, action)
            messages, node.reward, terminated, truncated, info = result
            node.info.update(info)
            if terminated or truncated:
                node.end = "terminated" if terminated else "truncated"
                node.limit = None if terminated else Limit.ENV
                return None
            observation_ids = renderer.observation(
                messages, branch.tools, limits.max_tool_result_tokens
            )
            if await self._guide.redirect(branch, observation_ids):
                continue
            limit = branch.limit_of_observation(observation_ids, limits)
            if limit is not None:
                return limit, None
            branch.add_observation(observation_ids)
            assert branch.env is not None
            forkable = branch.env.fork_mode != "none"
            branch.may_fork = forkable and self.tree.num_started < self.plan.group_size

    async def _generate(self, branch: Branch) -> Completion:
        """Sample the next turn. Where the branch may fork, `_fork` starts as soon as the entropies
        of the first `fork_window` tokens are there, or at the end of a shorter turn."""
        actor, limits, window = self.actor, self.limits, self.plan.fork_window
        asks, origin = branch.may_fork and window > 0, branch.sibling(branch.name)
        sampling = self._guide.sampling(branch)
        sampling = replace(
            sampling,
            max_tokens=min(
                limits.max_turn_tokens, limits.max_response_tokens - branch.num_response_tokens
            ),
            stop=(*actor.renderer.stop(branch.tools), *sampling.stop),
            seed=Random(self._key(branch, "turn")).getrandbits(63),
        )
        first: list[float] = []
        branch.forking = None

        def fork(entropies: list[float]) -> None:
            branch.forking = self._group.create_task(self._fork(branch, origin, entropies[:window]))

        def on_tokens(chunk: Chunk) -> None:
            first.extend(chunk.entropies)
            if branch.forking is None and len(first) >= window:
                fork(first)

        late = EngineError(f"no turn within {limits.engine_timeout_s} s")
        async with Deadline(self._clock() + limits.engine_timeout_s, self._clock, late):
            completion = await actor.engine.generate(
                branch.prefix_ids,
                sampling,
                session=self._session,
                on_tokens=on_tokens if asks else None,
                stream_interval=max(1, window),
            )
        if asks and branch.forking is None:
            fork(completion.entropies)
        return completion

    # ends

    async def _truncate(self, branch: Branch, limit: Limit, action: Message | None) -> None:
        leaf = branch.leaf(self.tree, "truncated")
        leaf.limit = limit
        if branch.env is not None:
            reward, info = await self._guide.finish(branch, limit, action)
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
            self._start_roots(1)

    async def _close(self, branch: Branch) -> None:
        """Close the env after the last sibling took its copy, even while being cancelled."""
        try:
            try:
                await self._guide.end(branch)
            finally:
                if branch.forking is not None and not branch.forking.done():
                    await asyncio.wait({branch.forking})
        finally:
            if branch.env is not None:
                await self.actor.envs.close(branch.env, self.tree.task.id)

    def _key(self, branch: Branch, use: str) -> str:
        place = (self.tree.index, self.tree.task.id, branch.name, branch.num_turns)
        return "/".join(map(str, (self.actor.seed, *place, use)))


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
        limits = self.limits
        if max_failures is not None:
            limits = replace(limits, max_failures=max_failures)
        await Rollout(self, tree, plan, limits, session or str(index)).run(first_root)
        return tree
