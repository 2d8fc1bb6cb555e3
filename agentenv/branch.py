"""A branch: one growing trajectory of a tree, and the open envs of an actor's branches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from msgspec.structs import replace

from agentenv.call_syntax import call_marks, split_thoughts
from agentenv.deadline import Deadline, WorkClock, uncancelled
from agentenv.env import Env, StepResult, check_finish, check_reset, check_step
from agentenv.errors import (
    AgentEnvError,
    ConfigError,
    CrashError,
    DataError,
    EnvError,
    InfraError,
    guarded,
)
from agentenv.renderer import ContextRenderer, ToolSchemas, context_ids
from agentenv.tree import End, Ids, Node, Prefix, TrajectoryTree, packed_ids
from agentenv.types import Completion, Info, Limit, Limits, Message, NextTurn, Turn
from agentenv.untrusted import convert

logger = logging.getLogger(__name__)


class Branch:
    """State of a trajectory: its tokens so far, its counts, its env.

    `cursor` is the last node with an observation; `pending` is an action below it that has no
    observation yet, finally the leaf. `clock` counts the working seconds of the trajectory.
    `actions` lists the actions that the env received; None: the env's state does not follow from
    them, because the branch was moved.

    For an agent program (agentenv/endpoint): `next_turn` describes the start of the next turn,
    `turns` lists the turns so far, and `tips` maps unanswered turns to the tokens up to them.
    """

    def __init__(self, name: str, cursor: Node, clock: WorkClock) -> None:
        self.name = name
        self.cursor = cursor
        self.pending: Node | None = None
        self.clock = clock
        self.env: Env | None = None
        self.is_open = False  # has its env and its prompt
        self.actions: list[Message] | None = []
        self.action: Message | None = None  # the policy's last one
        self.tools: ToolSchemas = ()
        self.prefix_ids = Prefix()
        self.num_prompt_tokens = 0
        self.num_turns = 0
        self.num_tool_calls = 0
        self.num_replayed = 0  # replayed calls that brought its env here, until its first turn
        self.may_fork = False  # the next turn follows a tool result and no fork begins with it
        self.was_planned = False  # the plan has decided whether to fork in this turn
        self.next_turn: NextTurn | None = None
        self.turns: list[Node] = []
        self.tips: dict[int, Prefix] = {}
        self.cut: set[int] = set()  # turns without an end token
        self.holding: list[asyncio.Event] = []  # one per sibling of this turn: set with its env

    def sibling(self, name: str, outer: WorkClock) -> Branch:
        """A branch at the same place: same prefix, counts and seconds, no env yet. `outer` is the
        parent of its clock."""
        other = Branch(name, self.cursor, WorkClock(self.clock(), outer))
        other.start_at(self)
        return other

    def start_at(self, other: Branch) -> None:
        """Copy the prefix and the counts of another branch at the same place."""
        self.actions = None if other.actions is None else list(other.actions)
        self.action = other.action
        self.tools = other.tools
        self.prefix_ids = other.prefix_ids
        self.num_prompt_tokens = other.num_prompt_tokens
        self.num_turns = other.num_turns
        self.num_tool_calls = other.num_tool_calls
        self.next_turn = other.next_turn
        self.turns, self.tips, self.cut = [*other.turns], dict(other.tips), set(other.cut)

    async def held(self) -> None:
        """Wait until each sibling that starts in this turn holds its env, or has failed."""
        for event in self.holding:
            await event.wait()

    @property
    def is_root(self) -> bool:
        """Whether the branch began from scratch; False for forks."""
        return "+" not in self.name

    @property
    def num_response_tokens(self) -> int:
        """Tokens after the prompt, sampled and observed; max_response_tokens limits them."""
        return len(self.prefix_ids) - self.num_prompt_tokens

    def add_action(self, tree: TrajectoryTree, completion: Completion) -> Node:
        """Add a node with the action, which has no observation yet."""
        self.pending = tree.add(
            self.cursor,
            branch=self.name,
            action_ids=completion.token_ids,
            logprobs=completion.logprobs,
            entropies=completion.entropies,
            version_spans=completion.version_spans,
        )
        self.prefix_ids = self.prefix_ids.plus(self.pending.action_ids)
        self.num_turns += 1
        if self.next_turn is not None:
            self.turns.append(self.pending)
            if completion.finish_reason == "length" or completion.stop in self.next_turn.stop:
                self.cut.add(self.pending.index)
        return self.pending

    def expect(self, info: Info) -> None:
        """Remove the description of the next turn, if any, from the info of a step or reset."""
        given = info.pop("turn", None)
        if given is not None:
            self.next_turn = convert(given, NextTurn)
            if self.next_turn.tools is not None:
                self.tools = self.next_turn.tools

    def as_program_reads(
        self, action: Message, completion: Completion, renderer: ContextRenderer, size: int
    ) -> Message:
        """The action with the facts of its sampling, after `size` tokens, for an environment that
        passes it to an agent program."""
        assert self.next_turn is not None
        stop = completion.stop if completion.stop in self.next_turn.stop else None
        text = action.content.removesuffix(stop or "")
        readable = any("problem" not in call.arguments for call in action.tool_calls)
        marks = call_marks(renderer.style, self.tools) if readable else ()
        thoughts, text = split_thoughts(text, renderer.style, marks)
        reason: Literal["stop", "length"] = "stop"
        if completion.finish_reason == "length":
            reason = "length"
        number = len(completion.token_ids)
        turn = Turn(thoughts.strip(), text.strip(), reason, size, number, stop)
        return replace(action, turn=turn)

    def ids_of(self, turn: int, end_id: int) -> Ids:
        """The tokens of one of the turns, end token included."""
        node = self.turns[turn]
        return node.action_ids + packed_ids([end_id] if node.index in self.cut else [])

    def ended_ids(self, node: Node, renderer: ContextRenderer) -> Ids:
        """The tokens by which a renderer decides whether the turn has ended."""
        return packed_ids([renderer.end_id]) if node.index in self.cut else node.action_ids

    def proceed(self, tree: TrajectoryTree, renderer: ContextRenderer, most: int) -> Node | None:
        """Continue at `next_turn`: after the turn whose tokens it extends, else in a new context.
        Tool results have at most `most` tokens. Returns the pending turn if it remains unanswered.
        Raises the errors of `context_ids`."""
        then, left = self.next_turn, self.pending
        assert then is not None
        assert left is not None
        self.tips[left.index] = self.prefix_ids
        sampled = [self.ids_of(one, renderer.end_id) if isinstance(one, int) else one
                   for one in then.prompt]  # fmt: skip
        with as_program():
            ids = context_ids(renderer, sampled, self.tools, most)
        used = self.num_response_tokens
        discards = [self.turns[turn].index for turn in then.discards]
        info: Info = {"context": then.kind or "resumed"}
        info |= {"cause": then.cause} if then.cause else {}
        info |= {"discards": discards} if discards else {}
        for index in sorted(self.tips, reverse=True):
            prefix = self.tips[index]
            if len(prefix) < len(ids) and prefix.joined() == ids[: len(prefix)]:
                del self.tips[index]
                rest = ids[len(prefix) :]
                if tree.nodes[index] is left:
                    self.add_observation(rest)
                    return None
                node = tree.add(tree.nodes[index], branch=self.name, observation_ids=rest)
                node.info |= info
                self.prefix_ids = prefix.plus(node.observation_ids)
                break
        else:
            node = tree.add(
                None, branch=self.name, observation_ids=ids, continues=left.index, info=info
            )
            self.prefix_ids = Prefix((node.observation_ids,))
        self.cursor, self.pending, self.actions = node, None, None
        self.num_prompt_tokens = len(self.prefix_ids) - used
        return left

    @property
    def continues_episode(self) -> bool:
        """Whether the next turn of an agent program continues the episode, even in a new context;
        a new prompt and a retry do not."""
        then = self.next_turn
        if then is None or self.cursor.parent is not None:
            return True
        own = [one for one in then.prompt if isinstance(one, int) or one.role == "assistant"]
        return bool(own) and then.kind != "retry"

    def add_observation(self, observation_ids: Sequence[int]) -> None:
        """Answer the pending action; the next turn starts after the observation."""
        assert self.pending is not None
        self.pending.observation_ids = packed_ids(observation_ids)
        self.prefix_ids = self.prefix_ids.plus(self.pending.observation_ids)
        self.cursor, self.pending = self.pending, None

    def leaf(self, tree: TrajectoryTree, end: End) -> Node:
        """The last node of the branch: the pending action, or an empty node."""
        if self.pending is None:
            self.pending = tree.add(self.cursor, branch=self.name)
        self.pending.end = end
        return self.pending

    def take_back(self, name: str, num_tool_calls: int) -> None:
        """Undo the pending action, which made `num_tool_calls` calls; its node stays on the tree.

        The turn is sampled again under `name`, and therefore with another seed.
        """
        assert self.pending is not None
        self.prefix_ids = Prefix(self.prefix_ids.parts[:-1])
        self.num_turns -= 1
        self.num_tool_calls -= num_tool_calls
        self.pending, self.name, self.actions = None, name, None

    def restart(
        self, tree: TrajectoryTree, prompt_ids: list[int], num_response_tokens: int
    ) -> None:
        """Continue after another prompt instead of the present context, which stays on the tree.

        `num_response_tokens` of max_response_tokens count as used.
        """
        root = tree.add(
            None, branch=self.name, observation_ids=prompt_ids, continues=self.cursor.index
        )
        self.cursor, self.pending, self.prefix_ids = root, None, Prefix((root.observation_ids,))
        self.actions = None
        self.num_prompt_tokens = len(prompt_ids) - num_response_tokens

    def limit_of_action(
        self, completion: Completion, action: Message, limits: Limits
    ) -> Limit | None:
        """The limit that the pending action reached, or None; counts the action's tool calls."""
        own = 0 if self.next_turn is None else self.next_turn.max_tokens
        is_own = own and len(completion.token_ids) >= own < limits.max_turn_tokens
        if completion.finish_reason == "length" and not is_own:
            full = self.num_response_tokens >= limits.max_response_tokens
            return Limit.RESPONSE_TOKENS if full else Limit.TURN_TOKENS
        self.num_tool_calls += len(action.tool_calls)
        if limits.on_limit == "result":  # the env reports the limit to the policy
            return None
        return Limit.TOOL_CALLS if self.num_tool_calls > limits.max_tool_calls else None

    def limit_of_observation(self, observation_ids: Sequence[int], limits: Limits) -> Limit | None:
        """The limit that leaves no room for a turn after this observation, or None."""
        if self.num_response_tokens + len(observation_ids) >= limits.max_response_tokens:
            return Limit.RESPONSE_TOKENS
        return Limit.TURNS if self.num_turns >= limits.max_turns else None


@contextmanager
def as_program(*, is_one: bool = True) -> Iterator[None]:
    """Within the block, convert errors of rendering into EnvError, since a program's invalid
    request may fail only its own trajectory. No conversion unless `is_one`."""
    try:
        yield
    except (ConfigError, CrashError, DataError) as error:
        if not is_one:
            raise
        raise EnvError(f"cannot render a call of the program: {error}") from error


class OpenEnvs:
    """The open envs of an actor: each is closed once, and every call has a deadline.

    All methods except `close` raise CrashError for a bug of the env. After `timeout_s` seconds,
    not counting waits of the rollout, `reset` and `fork` raise EnvError, and `finish` raises
    InfraError: it changes nothing and may be retried.
    """

    def __init__(self, timeout_s: float) -> None:
        self.count = 0
        self.timeout_s = timeout_s

    async def reset(self, env: Env, seed: int) -> tuple[list[Message], Info]:
        """Begin the episode of a new env. The env is open from now on, even if this fails."""
        self.count += 1
        with self._deadline("reset"):
            return check_reset(await guarded(env.reset(seed=seed), "the environment's reset"))

    async def fork(self, env: Env) -> Env:
        """An open copy of the env."""
        with self._deadline("fork"):
            copy = await guarded(env.fork(), "the environment's fork")
        self.count += 1
        return copy

    async def finish(self, env: Env, limit: Limit, action: Message | None) -> tuple[float, Info]:
        """Reward and info of an episode that a limit ended."""
        with self._deadline("finish", InfraError):
            found = await guarded(env.finish(limit, action), "the environment's finish")
            return check_finish(found)

    async def step(self, env: Env, action: Message) -> StepResult:
        """The env's answer. Tools have their own deadlines."""
        result = await guarded(env.step(action), "the environment's step")
        return check_step(result)

    async def close(self, env: Env, task_id: str) -> None:
        """Close the env, even while being cancelled. A failure is only logged."""
        close_now = getattr(env, "close_now", None)  # closes without waiting, where it can
        if close_now is not None and close_now():
            self.count -= 1
            return
        await uncancelled(self._close(env, task_id))

    async def _close(self, env: Env, task_id: str) -> None:
        try:
            with self._deadline("close"):
                await guarded(env.close(), "the environment's close")
        except (AgentEnvError, TimeoutError) as error:
            logger.warning("task %s: closing an env failed: %r", task_id, error)
        finally:
            self.count -= 1

    def _deadline(self, call: str, error: type[AgentEnvError] = EnvError) -> Deadline:
        return Deadline.after(self.timeout_s, f"env.{call}", error)
