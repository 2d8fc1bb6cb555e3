"""Recovery of rollouts: retries of turns, steps, forks and grades after infrastructure failures,
and resumption of interrupted branches.

A fresh env reaches the state of a branch by a replay of the branch's actions; if its answers differ
from those in the tree, the branch fails.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, TypeVar

from agentenv.branch import Branch
from agentenv.deadline import WaitKind, Work, backoff_s, waiting
from agentenv.env import StepResult
from agentenv.errors import (
    AgentEnvError,
    CrashError,
    EngineDeadError,
    EngineError,
    EnvError,
    GraderError,
    InfraError,
    OutageError,
)
from agentenv.tree import Prefix, packed_ids
from agentenv.types import Completion, Info, Message

if TYPE_CHECKING:
    from agentenv.rollout import Rollout

FIRST_RETRY_S, MAX_RETRY_S = 0.5, 20.0  # before a retry of a turn or a step
STEP = "the environment's step"

T = TypeVar("T")


class OtherPromptError(Exception):
    """The prompt of a task differs from that of its recorded tree."""


class Recovery:
    """Creates the envs of a rollout's branches, and restores their states."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._actor, self._tree = rollout.actor, rollout.tree
        self._env_seed = Random(f"{self._actor.seed}/{self._tree.task.id}").getrandbits(31)

    async def sample(
        self, branch: Branch, generate: Callable[[Branch], Awaitable[Completion]]
    ) -> Completion:
        """The next turn; retries `generate`, with the same seed, if the engine fails."""
        branch.was_planned, branch.holding, attempt = False, [], 0
        while True:
            if self._actor.is_paused:
                await self._actor.until_resumed()
            branch.clock.now(WaitKind.TURN)
            marks = branch.clock.marks(branch.clock.since)
            try:
                completion = await generate(branch)
                self._actor.prefixes.add(branch, completion)
                return completion
            except EngineDeadError:
                raise
            except EngineError as error:
                if error.is_final or attempt == self._rollout.limits.max_turn_retries:
                    raise
                branch.clock.discard(marks)
            await self.rest(branch, "turn", attempt)
            attempt += 1

    async def step(self, branch: Branch, action: Message) -> StepResult:
        """The env's answer. A failed step is retried in a fresh env after a replay, if possible."""
        assert branch.env is not None
        attempt = 0
        while True:
            try:
                if attempt:
                    await self.replay_in_fresh_env(branch)
                branch.clock.now(STEP)
                step = partial(self._rollout.hooks.step, branch, action)
                return await self.through_outage(branch, "step", step)
            except (OutageError, CrashError):
                raise
            except (EnvError, GraderError):
                can_copy = branch.env is None or branch.env.fork_mode != "none"
                allowed = self._rollout.limits.max_turn_retries if can_copy else 0
                if attempt == allowed or branch.actions is None:
                    raise
            await self.rest(branch, "step", attempt)
            attempt += 1

    async def replay_in_fresh_env(self, branch: Branch) -> None:
        """Replay the actions of the branch in a fresh env. Raises EnvError if its answers differ
        from those in the tree."""
        messages = await self.reset(branch)
        await self.replay(branch, is_equal=messages == self._rollout.prompt_messages)

    async def replay(self, branch: Branch, *, is_equal: bool) -> None:
        """Replay the actions of the branch in its env, which was just reset;
        `is_equal`: to the prompt of the tree. Raises EnvError as `replay_in_fresh_env`."""
        assert branch.actions is not None
        assert branch.env is not None
        size = self._rollout.limits.max_tool_result_tokens
        path = self._tree.path(branch.cursor)[1:]
        for node, action in zip(path, branch.actions, strict=True):
            step = partial(self._actor.envs.step, branch.env, action)
            result = await self.through_outage(branch, "step", step)
            messages, _, terminated, truncated, info = result
            branch.expect(info)
            await self._actor.renderer.prepare(messages, branch.tools, size)
            ids = self._actor.renderer.observation(messages, branch.tools, size, node.action_ids)
            same = packed_ids(ids) == node.observation_ids
            is_equal = is_equal and not terminated and not truncated and same
            is_equal = is_equal and not (branch.next_turn is not None and branch.next_turn.prompt)
        if not is_equal:
            branch.actions = None  # another env would differ too
            raise EnvError("a fresh env answers differently from the first one")

    async def through_outage(self, branch: Branch, use: str, call: Callable[[], Awaitable[T]]) -> T:
        """Retry the call while its infrastructure is down, for `outage_s` of the limits at most.
        The working time of failed calls does not count."""
        began_s: float | None = None
        for attempt in count():
            work = Work()
            try:
                return await call()
            except InfraError as error:
                work.discard()
                now = asyncio.get_running_loop().time()
                began_s = now if began_s is None else began_s
                if now - began_s >= self._rollout.limits.outage_s:
                    raise OutageError(f"{use} failed for {now - began_s:g} s: {error}") from error
            await self.rest(branch, use, attempt)
        raise AssertionError

    async def rest(self, branch: Branch, use: str, attempt: int) -> None:
        """Wait before a retry of a turn or a step."""
        self._tree.num_retaken += 1
        key = self._rollout.key(branch, use)
        with waiting(f"a pause before the {use} is retried"):
            await asyncio.sleep(backoff_s(attempt, key, first_s=FIRST_RETRY_S, max_s=MAX_RETRY_S))

    async def reopen(self, branch: Branch, stops: dict[int, str]) -> None:
        """Restore the tokens of a branch of an earlier process, and its env by a replay."""
        rollout, tree = self._rollout, self._tree
        renderer: Any = self._actor.renderer
        messages = await self.reset(branch)
        if rollout.prompt_messages is None:
            prompt_ids = rollout.prompt_ids(messages, branch)
            if list(tree.root.observation_ids) != prompt_ids:
                raise OtherPromptError
            rollout.prompt_messages, rollout.num_prompt_tokens = messages, len(prompt_ids)
        branch.prefix_ids = Prefix((tree.root.observation_ids,))
        branch.num_prompt_tokens = rollout.num_prompt_tokens
        assert branch.actions is not None
        path = tree.path(branch.cursor)[1:]
        if tree.history(branch.cursor) != tree.path(branch.cursor):
            raise OutageError("its program had several contexts and was lost with its process")
        for node in path:
            stop = stops.get(node.index)
            done = Completion(list(node.action_ids), [], [], "stop", [], stop)
            action = renderer.parse(done, branch.tools, branch.prefix_ids)
            if branch.next_turn is not None:
                size = len(branch.prefix_ids)
                action = branch.as_program_reads(action, done, renderer, size)
                branch.turns.append(node)
            branch.actions.append(action)
            branch.num_tool_calls += len(action.tool_calls)
            branch.prefix_ids = branch.prefix_ids.plus(node.action_ids).plus(node.observation_ids)
        branch.num_turns += len(path)
        assert branch.env is not None
        if path and branch.env.fork_mode == "none":
            raise OutageError("its env, which cannot be copied, was lost with its process")
        await self.replay(branch, is_equal=messages == rollout.prompt_messages)
        may_plan = bool(path) and branch.cursor.num_forks is None
        branch.may_fork = may_plan and rollout.has_room_to_fork(branch)

    async def open_fork(self, sibling: Branch, branch: Branch, held: asyncio.Event) -> None:
        """Give a sibling its copy of the branch's env; sets `held` after success or failure."""
        assert branch.env is not None
        try:
            sibling.env = await self._actor.envs.fork(branch.env)
        except (OutageError, CrashError):
            raise
        except EnvError:  # its process may be lost
            if sibling.actions is None or not self._rollout.limits.max_turn_retries:
                raise
            held.set()
            await self.rest(sibling, "fork", 0)
            await self.replay_in_fresh_env(sibling)
        finally:
            held.set()

    async def reset(self, branch: Branch) -> list[Message]:
        """Give the branch a fresh env; returns the messages of its prompt."""

        async def reset() -> tuple[list[Message], Info]:
            await self._drop_env(branch)
            try:
                branch.env = self._actor.make_env(self._tree.task)
            except AgentEnvError:
                raise
            except Exception as error:
                raise CrashError(f"making the environment raised {error!r}") from error
            return await self._actor.envs.reset(branch.env, self._env_seed)

        messages, info = await self.through_outage(branch, "reset", reset)
        branch.tools = info.get("tools", ())
        branch.expect(info)
        return messages

    async def _drop_env(self, branch: Branch) -> None:
        env, branch.env = branch.env, None
        if env is not None:
            await self._actor.envs.close(env, self._tree.task.id)
