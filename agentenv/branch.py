"""The mutable state of one growing trajectory."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType

from agentenv.engine import Engine
from agentenv.env import Env
from agentenv.errors import EngineError, EnvError
from agentenv.renderer import ToolSchemas
from agentenv.tree import End, Node, TrajectoryTree
from agentenv.types import Chunk, Completion, Info, Limit, Limits, Message, SamplingParams


class Branch:
    """Where a trajectory stands: the tokens so far, what was counted, its env.

    `cursor` is the last node with an observation; `pending` an action below it whose observation
    is not there yet, in the end the leaf.
    """

    def __init__(self, name: str, cursor: Node, deadline: float) -> None:
        self.name = name
        self.cursor = cursor
        self.pending: Node | None = None
        self.deadline = deadline
        self.env: Env | None = None
        self.tools: ToolSchemas = ()
        self.prefix_ids: list[int] = []
        self.num_prompt_tokens = 0
        self.num_turns = 0
        self.num_tool_calls = 0
        self.may_fork = False  # the next turn follows a tool result and is no fork itself
        self.forking: asyncio.Task[None] | None = None

    def sibling(self, name: str) -> Branch:
        """A branch at the same place: same prefix, counts and deadline, no env yet."""
        other = Branch(name, self.cursor, self.deadline)
        other.tools = self.tools
        other.prefix_ids = self.prefix_ids
        other.num_prompt_tokens = self.num_prompt_tokens
        other.num_turns = self.num_turns
        other.num_tool_calls = self.num_tool_calls
        return other

    def extend(self, deadline: float) -> None:
        self.deadline = deadline

    @property
    def is_root(self) -> bool:
        """Whether it began from scratch."""
        return "+" not in self.name

    @property
    def num_response_tokens(self) -> int:
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
        self.prefix_ids = self.prefix_ids + completion.token_ids
        self.num_turns += 1
        return self.pending

    def add_observation(self, observation_ids: list[int]) -> None:
        """The pending action is answered; the next turn starts behind the observation."""
        assert self.pending is not None
        self.pending.observation_ids = observation_ids
        self.prefix_ids = self.prefix_ids + observation_ids
        self.cursor, self.pending = self.pending, None

    def leaf(self, tree: TrajectoryTree, end: End) -> Node:
        """The node that the branch ends with: the pending action, or one without any."""
        if self.pending is None:
            self.pending = tree.add(self.cursor, branch=self.name)
        self.pending.end = end
        return self.pending

    def take_back(self, name: str, num_tool_calls: int) -> None:
        """Undo the pending action, which made these calls; the turn is taken again under `name`,
        so that another seed samples it."""
        assert self.pending is not None
        self.prefix_ids = self.prefix_ids[: len(self.prefix_ids) - len(self.pending.action_ids)]
        self.num_turns -= 1
        self.num_tool_calls -= num_tool_calls
        self.pending, self.name = None, name

    def restart(self, node: Node) -> None:
        """Go on behind `node`, which begins a context of its own."""
        self.cursor, self.pending, self.prefix_ids = node, None, node.observation_ids

    def limit_of_action(
        self, completion: Completion, action: Message, limits: Limits
    ) -> Limit | None:
        """The limit that the pending action reached, if any; counts its tool calls."""
        if completion.finish_reason == "length":
            full = self.num_response_tokens >= limits.max_response_tokens
            return Limit.RESPONSE_TOKENS if full else Limit.TURN_TOKENS
        self.num_tool_calls += len(action.tool_calls)
        if limits.on_limit == "result":  # the env answers that there are no more
            return None
        return Limit.TOOL_CALLS if self.num_tool_calls > limits.max_tool_calls else None

    def limit_of_observation(self, observation_ids: list[int], limits: Limits) -> Limit | None:
        """The limit that leaves no room for a turn behind this observation, if any."""
        if self.num_response_tokens + len(observation_ids) >= limits.max_response_tokens:
            return Limit.RESPONSE_TOKENS
        return Limit.TURNS if self.num_turns >= limits.max_turns else None


# The envs of an actor that are open: each call has a deadline, each env is closed once.

logger = logging.getLogger(__name__)


class OpenEnvs:
    """All methods but `close` raise EnvError after `timeout_s` seconds."""

    def __init__(self, timeout_s: float) -> None:
        self.count = 0
        self._timeout_s = timeout_s

    async def reset(self, env: Env, seed: int) -> tuple[list[Message], Info]:
        """Begin the episode of a new env. It is open from now on, even if this fails."""
        self.count += 1
        async with self._deadline("reset"):
            return await env.reset(seed=seed)

    async def fork(self, env: Env) -> Env:
        """A copy, which is open."""
        async with self._deadline("fork"):
            copy = await env.fork()
        self.count += 1
        return copy

    async def finish(self, env: Env, limit: Limit, action: Message | None) -> tuple[float, Info]:
        """The reward of an episode that a limit ends."""
        async with self._deadline("finish"):
            return await env.finish(limit, action)

    async def close(self, env: Env, task_id: str) -> None:
        """To its end, even while being cancelled. An env that does not close is only logged."""
        closing = asyncio.ensure_future(self._close(env, task_id))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await closing
            raise

    async def _close(self, env: Env, task_id: str) -> None:
        try:
            async with self._deadline("close"):
                await env.close()
        except EnvError as error:
            logger.warning("task %s: %s", task_id, error)
        finally:
            self.count -= 1

    @asynccontextmanager
    async def _deadline(self, what: str) -> AsyncIterator[None]:
        timeout = asyncio.timeout(self._timeout_s)
        try:
            async with timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise EnvError(f"env.{what} took over {self._timeout_s} s") from error


# Deadlines that do not count the time in which no engine was there to wait for.

MARGIN_S = 1e-3  # how long before a deadline it is looked whether it moves


class Patience:
    """Moves an entered asyncio.timeout by the outages of the engine (its `outage_s`).

    A server that dies and comes back is not the policy's fault: without this, all trajectories
    that were running would end at their limit of seconds. `on_move` is told the new deadline.
    """

    def __init__(
        self,
        engine: Engine,
        timeout: asyncio.Timeout,
        on_move: Callable[[float], None] = lambda when: None,
    ) -> None:
        self._engine, self._timeout, self._on_move = engine, timeout, on_move
        self._counted_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def __aenter__(self) -> None:
        self._counted_s = self._outage_s()
        self._arm()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        when = self._timeout.when()
        if when is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(when - MARGIN_S, self._look)

    def _look(self) -> None:
        outage_s = self._outage_s()
        lost_s, self._counted_s = outage_s - self._counted_s, outage_s
        when = self._timeout.when()
        if lost_s > MARGIN_S and when is not None:
            self._timeout.reschedule(when + lost_s)
            self._on_move(when + lost_s)
            self._arm()

    def _outage_s(self) -> float:
        # Only engines that can be gone for a while have it.
        found: float = getattr(self._engine, "outage_s", 0.0)
        return found


# Sampling one turn: its deadline, and the entropies that it begins with.


async def sample_turn(
    engine: Engine,
    prefix_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    session: str,
    timeout_s: float,
    window: int,
    on_window: Callable[[list[float]], None] | None,
) -> Completion:
    """One turn behind the prefix.

    `on_window` is called once, with the entropies of the first `window` tokens as soon as they
    are there, or at the end with those of a shorter turn. Raises EngineError after `timeout_s`
    seconds with an engine, and what Engine.generate raises.
    """
    first: list[float] = []
    waiting = on_window is not None

    def on_tokens(chunk: Chunk) -> None:
        nonlocal waiting
        if waiting:
            first.extend(chunk.entropies)
            if len(first) >= window:
                waiting = False
                assert on_window is not None
                on_window(first[:window])

    timeout = asyncio.timeout(timeout_s)
    try:
        async with timeout, Patience(engine, timeout):
            completion = await engine.generate(
                prefix_ids,
                sampling,
                session=session,
                on_tokens=on_tokens if waiting else None,
                stream_interval=max(1, window),
            )
    except TimeoutError as error:
        raise EngineError(f"no turn within {timeout_s} s") from error
    if waiting:
        assert on_window is not None
        on_window(completion.entropies[:window])
    return completion
