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
from typing import TypeVar

from agentenv.base import errors
from agentenv.base.deadline import WaitKind, working
from agentenv.base.retries import Backoff, pause_before_retry, through_outage
from agentenv.base.tree import Prefix, TrajectoryTree
from agentenv.base.types import Completion, Info, Limits, Message
from agentenv.contract.env import StepResult
from agentenv.rollout.actor_parts import ActorParts
from agentenv.rollout.branch import Branch
from agentenv.rollout.conversation import Conversation
from agentenv.rollout.program_conversation import ProgramConversation
from agentenv.text.contexts import for_programs

BACKOFF = Backoff(0.5, 20.0)  # of a turn or a step
STEP = "the environment's step"

T = TypeVar("T")


class OtherPromptError(Exception):
    """The prompt of a task differs from that of its recorded tree."""


class Recovery:
    """Creates the envs of a tree's branches, and restores their states. `prompt` is that of the
    first root."""

    def __init__(self, actor: ActorParts, tree: TrajectoryTree, limits: Limits) -> None:
        self.prompt: list[Message] | None = None
        self._num_prompt_tokens = 0
        self._actor, self._tree, self._limits = actor, tree, limits
        self._env_seed = Random(f"{actor.seed}/{tree.task.id}").getrandbits(31)

    def key(self, branch: Branch, use: str) -> str:
        """The key of a draw of randomness in the branch's next turn."""
        tree = self._tree
        place = f"{tree.index}/{tree.task.id}/{branch.name}/{branch.num_turns}"
        return f"{self._actor.seed}/{place}/{use}"

    # retries

    async def sample(
        self, branch: Branch, generate: Callable[[Branch], Awaitable[Completion]]
    ) -> Completion:
        """The next turn; retries `generate`, with the same seed, if the engine fails."""
        for attempt in count():
            if self._actor.is_paused:
                await self._actor.until_resumed()
            branch.clock.now(WaitKind.TURN)
            marks = branch.clock.marks(branch.clock.since)
            try:
                return await generate(branch)
            except errors.EngineDeadError:
                raise
            except errors.EngineError as error:
                if error.is_final or attempt == self._limits.max_turn_retries:
                    raise
                branch.clock.discard(marks)
            await self._rest(branch, "turn", attempt)
        raise AssertionError

    async def step(self, branch: Branch, step: Callable[[], Awaitable[StepResult]]) -> StepResult:
        """The env's answer. A failed step is retried in a fresh env after a replay, if possible."""
        for attempt in count():
            try:
                if attempt:
                    await self._replay_in_fresh_env(branch)
                branch.clock.now(STEP)
                return await self._retried(branch, "step", step)
            except (errors.OutageError, errors.CrashError):
                raise
            except (errors.EnvError, errors.GraderError):
                can_copy = branch.env is None or branch.env.fork_mode != "none"
                allowed = self._limits.max_turn_retries if can_copy else 0
                if attempt == allowed or not branch.conversation.replayable:
                    raise
            await self._rest(branch, "step", attempt)
        raise AssertionError

    async def finish(
        self, branch: Branch, finish: Callable[[], Awaitable[tuple[float, Info]]]
    ) -> tuple[float, Info]:
        """Reward and info of an ended episode, from its env."""
        with working(branch.clock):
            branch.clock.now("its environment to finish")
            return await self._retried(branch, "finish", finish)

    async def _retried(self, branch: Branch, use: str, call: Callable[[], Awaitable[T]]) -> T:
        """The result of `call`, which is retried while its infrastructure is down, for `outage_s`
        of the limits at most."""
        return await through_outage(
            call,
            f"the {use}",
            self.key(branch, use),
            outage_s=self._limits.outage_s,
            failed=self._count_failure,
            backoff=BACKOFF,
        )

    def _count_failure(self, attempt: int, error: errors.InfraError) -> None:
        self._tree.num_retaken += 1

    async def _rest(self, branch: Branch, use: str, attempt: int) -> None:
        """Wait before a retry of a turn or a step."""
        self._tree.num_retaken += 1
        await pause_before_retry(f"the {use}", BACKOFF.seconds(attempt, self.key(branch, use)))

    # environments

    async def open(self, branch: Branch) -> Conversation:
        """Give the branch its env, and the conversation with it."""
        messages, info = await self._reset(branch)
        renderer, most = self._actor.renderer, self._limits.max_tool_result_tokens
        if "turn" not in info:
            branch.conversation = Conversation(renderer, most)
        else:
            writer = for_programs(renderer, f"task {self._tree.task.id}")
            branch.conversation = ProgramConversation(writer, most)
        branch.conversation.begin(messages, info)
        return branch.conversation

    def prompt_ids(self, conversation: Conversation) -> list[int]:
        """The tokens of a new prompt. Raises DataError if they are too many; EnvError if the prompt
        may be another one in another environment."""
        most, found = self._limits.max_prompt_tokens, conversation.open()
        if len(found) > most:
            error = errors.EnvError if conversation.opens_contexts else errors.DataError
            raise error(
                f"task {self._tree.task.id}: its prompt has {len(found)} tokens, "
                f"limits.max_prompt_tokens is {most}"
            )
        if self.prompt is None:
            self.prompt, self._num_prompt_tokens = conversation.prompt, len(found)
        return found

    def place_at_root(self, branch: Branch) -> None:
        """The next turn of the branch is the first one."""
        branch.prefix_ids = Prefix((self._tree.root.observation_ids,))
        branch.num_prompt_tokens = self._num_prompt_tokens

    async def reopen(self, branch: Branch, stops: dict[int, str]) -> None:
        """Restore the tokens of a branch at its cursor, and its env by a replay. `stops` are the
        stop strings that ended turns, by node."""
        tree, conversation = self._tree, await self.open(branch)
        if self.prompt is None:
            prompt_ids = conversation.open()
            if list(tree.root.observation_ids) != prompt_ids:
                raise OtherPromptError
            self.prompt, self._num_prompt_tokens = conversation.prompt, len(prompt_ids)
        self.place_at_root(branch)
        path = tree.path(branch.cursor)[1:]
        if tree.history(branch.cursor) != tree.path(branch.cursor):
            raise errors.OutageError(
                "its program had several contexts and was lost with its process"
            )
        for node in path:
            action = conversation.recall(node, stops.get(node.index), branch.prefix_ids)
            branch.num_tool_calls += len(action.tool_calls)
            branch.prefix_ids = branch.prefix_ids.plus(node.action_ids).plus(node.observation_ids)
        branch.num_turns += len(path)
        assert branch.env is not None
        if path and branch.env.fork_mode == "none":
            raise errors.OutageError("its env, which cannot be copied, was lost with its process")
        await self._replay(branch, is_equal=conversation.prompt == self.prompt)

    async def open_fork(self, sibling: Branch, branch: Branch, held: asyncio.Event) -> None:
        """Give a sibling its copy of the branch's env; sets `held` after success or failure."""
        assert branch.env is not None
        try:
            sibling.env = await self._actor.envs.fork(branch.env)
        except (errors.OutageError, errors.CrashError):
            raise
        except errors.EnvError:  # its process may be lost
            if not (sibling.conversation.replayable and self._limits.max_turn_retries):
                raise
            held.set()
            await self._rest(sibling, "fork", 0)
            await self._replay_in_fresh_env(sibling)
        finally:
            held.set()

    async def _replay_in_fresh_env(self, branch: Branch) -> None:
        """Replay the actions of the branch in a fresh env. Raises EnvError if its answers differ
        from those in the tree."""
        messages, info = await self._reset(branch)
        branch.conversation.begin(messages, info)
        await self._replay(branch, is_equal=messages == self.prompt)

    async def _replay(self, branch: Branch, *, is_equal: bool) -> None:
        """Replay the actions of the branch in its env, which was just reset; `is_equal`: to the
        prompt of the tree."""

        async def step(action: Message) -> StepResult:
            assert branch.env is not None
            taken = partial(self._actor.envs.step, branch.env, action)
            return await self._retried(branch, "step", taken)

        path = self._tree.path(branch.cursor)[1:]
        is_equal = await branch.conversation.replay(path, step) and is_equal
        if not is_equal:
            branch.conversation.replayable = False  # another env would differ too
            raise errors.EnvError("a fresh env answers differently from the first one")

    async def _reset(self, branch: Branch) -> tuple[list[Message], Info]:
        """Give the branch a fresh env; returns what its reset returned."""

        async def reset() -> tuple[list[Message], Info]:
            env, branch.env = branch.env, None
            if env is not None:
                await self._actor.envs.close(env, self._tree.task.id)
            try:
                branch.env = self._actor.make_env(self._tree.task)
            except errors.AgentEnvError:
                raise
            except Exception as error:
                raise errors.CrashError(f"making the environment raised {error!r}") from error
            return await self._actor.envs.reset(branch.env, self._env_seed)

        return await self._retried(branch, "reset", reset)
