"""A branch: one growing trajectory of a tree, and the envs that the branches of an actor hold."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from agentenv.deadline import Deadline, WorkClock, uncancelled
from agentenv.env import Env, StepResult, check_finish, check_reset, check_step
from agentenv.errors import AgentEnvError, EnvError, InfraError, guarded
from agentenv.renderer import ToolSchemas
from agentenv.tree import End, Node, Prefix, TrajectoryTree, packed_ids
from agentenv.types import Completion, Info, Limit, Limits, Message

logger = logging.getLogger(__name__)


class Branch:
    """Where a trajectory stands: the tokens so far, what was counted, its env.

    `cursor` is the last node with an observation; `pending` an action below it whose observation
    is not there yet, in the end the leaf. `clock` counts the seconds of work that the trajectory
    has cost. `actions` are those that the env has seen, in order; None: its env was led elsewhere,
    so that they do not tell its state.
    """

    def __init__(self, name: str, cursor: Node, clock: WorkClock) -> None:
        self.name = name
        self.cursor = cursor
        self.pending: Node | None = None
        self.clock = clock
        self.env: Env | None = None
        self.is_open = False  # it has its env and its prompt
        self.actions: list[Message] | None = []
        self.action: Message | None = None  # that the policy took last
        self.tools: ToolSchemas = ()
        self.prefix_ids = Prefix()
        self.num_prompt_tokens = 0
        self.num_turns = 0
        self.num_tool_calls = 0
        self.may_fork = False  # the next turn follows a tool result and no fork begins with it
        self.was_asked = False  # the plan, whether to fork in this turn
        self.holding: list[asyncio.Event] = []  # by the siblings of this turn: set with their env

    def sibling(self, name: str, outer: WorkClock) -> Branch:
        """A branch at the same place: same prefix, counts and seconds, no env yet. Its clock is
        inside `outer`."""
        other = Branch(name, self.cursor, WorkClock(self.clock(), outer))
        other.actions = None if self.actions is None else list(self.actions)
        other.action = self.action
        other.tools = self.tools
        other.prefix_ids = self.prefix_ids
        other.num_prompt_tokens = self.num_prompt_tokens
        other.num_turns = self.num_turns
        other.num_tool_calls = self.num_tool_calls
        return other

    async def held(self) -> None:
        """Wait until each sibling that starts in this turn holds its env, or has failed."""
        for event in self.holding:
            await event.wait()

    @property
    def is_root(self) -> bool:
        """Whether the branch began from scratch, which forks did not."""
        return "+" not in self.name

    @property
    def num_response_tokens(self) -> int:
        """Tokens behind the prompt, sampled and observed: what max_response_tokens bounds."""
        return len(self.prefix_ids) - self.num_prompt_tokens

    def add_action(self, tree: TrajectoryTree, completion: Completion) -> Node:
        """Go on to a new node, which holds the action and no observation yet."""
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
        return self.pending

    def add_observation(self, observation_ids: Sequence[int]) -> None:
        """The pending action is answered; the next turn starts behind the observation."""
        assert self.pending is not None
        self.pending.observation_ids = packed_ids(observation_ids)
        self.prefix_ids = self.prefix_ids.plus(self.pending.observation_ids)
        self.cursor, self.pending = self.pending, None

    def leaf(self, tree: TrajectoryTree, end: End) -> Node:
        """The node that the branch ends with: the pending action, or one without any."""
        if self.pending is None:
            self.pending = tree.add(self.cursor, branch=self.name)
        self.pending.end = end
        return self.pending

    def take_back(self, name: str, num_tool_calls: int) -> None:
        """Undo the pending action, which made these calls, but for its node on the tree.

        The turn is taken again under `name`, so that another seed samples it.
        """
        assert self.pending is not None
        self.prefix_ids = Prefix(self.prefix_ids.parts[:-1])
        self.num_turns -= 1
        self.num_tool_calls -= num_tool_calls
        self.pending, self.name, self.actions = None, name, None

    def restart(
        self, tree: TrajectoryTree, prompt_ids: list[int], num_response_tokens: int
    ) -> None:
        """Go on behind another prompt instead of the context so far, which stays on the tree.

        `num_response_tokens` of max_response_tokens count as used from there on.
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
        if completion.finish_reason == "length":
            full = self.num_response_tokens >= limits.max_response_tokens
            return Limit.RESPONSE_TOKENS if full else Limit.TURN_TOKENS
        self.num_tool_calls += len(action.tool_calls)
        if limits.on_limit == "result":  # the env answers that there are no more
            return None
        return Limit.TOOL_CALLS if self.num_tool_calls > limits.max_tool_calls else None

    def limit_of_observation(self, observation_ids: Sequence[int], limits: Limits) -> Limit | None:
        """The limit that leaves no room for a turn behind this observation, or None."""
        if self.num_response_tokens + len(observation_ids) >= limits.max_response_tokens:
            return Limit.RESPONSE_TOKENS
        return Limit.TURNS if self.num_turns >= limits.max_turns else None


class OpenEnvs:
    """The open envs of an actor: each is closed once, and every call of one has a deadline.

    All methods but `close` raise CrashError for a bug of the env. After `timeout_s` seconds, less
    those that the rollout waits, `reset` and `fork` raise EnvError, and `finish` InfraError: it
    changes nothing and may be called again.
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
        """A copy of the env, which is open."""
        with self._deadline("fork"):
            copy = await guarded(env.fork(), "the environment's fork")
        self.count += 1
        return copy

    async def finish(self, env: Env, limit: Limit, action: Message | None) -> tuple[float, Info]:
        """The reward and the facts of an episode that a limit ends."""
        with self._deadline("finish", InfraError):
            found = await guarded(env.finish(limit, action), "the environment's finish")
            return check_finish(found)

    async def step(self, env: Env, action: Message) -> StepResult:
        """What the env answers. The tools have deadlines of their own."""
        result = await guarded(env.step(action), "the environment's step")
        return check_step(result)

    async def close(self, env: Env, task_id: str) -> None:
        """Close the env, even while being cancelled. One that does not close is only logged."""
        close_now = getattr(env, "close_now", None)  # of an env that often has nothing to wait for
        if close_now is not None and close_now():
            self.count -= 1
            return
        await uncancelled(self._close(env, task_id))

    async def _close(self, env: Env, task_id: str) -> None:
        try:
            with self._deadline("close"):
                await guarded(env.close(), "the environment's close")
        except (AgentEnvError, TimeoutError) as error:
            logger.warning("task %s: an env did not close: %r", task_id, error)
        finally:
            self.count -= 1

    def _deadline(self, call: str, error: type[AgentEnvError] = EnvError) -> Deadline:
        return Deadline.after(self.timeout_s, f"env.{call}", error)
