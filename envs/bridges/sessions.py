"""Environments whose episodes are sessions of a server, which gives the rewards and ends them.

A session records requests and answers, so that a fork can be a replay, whose answers are compared
with the first ones. `openenv.py` has sessions over the network, `gymnasium_env.py` in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self, cast

from msgspec import Struct, field

from agentenv.base.deadline import uncancelled
from agentenv.base.errors import ConfigError, EnvError, ForeignError, ToolError
from agentenv.base.types import Info, Limit, Message, Task, ToolResult
from agentenv.base.untrusted import convert
from agentenv.contract.env import ForkMode, StepResult
from agentenv.contract.tool_env import ToolEnv
from agentenv.contract.tools import StatelessTool
from agentenv.envs.bridges.mcp_tools import text_of_json
from agentenv.text.call_syntax import without_thoughts

HELD_OUT_SEED, SIZE = 1_000_000_000, 10_000  # of generated rows
STEP = "step"  # the tool of a typed action; OpenEnv reserves the name
NUM_MEASURED = 4  # episodes with equal copies before forks
SESSION = "session of the episode"  # a hidden tool whose state the others share

Json = dict[str, Any]
Begun = tuple[list[Message], Info]


class SessionAnswer(Struct):
    """An answer to a request; `cut`: a limit of the server ended the episode."""

    observation: Json = field(default_factory=dict)
    reward: float | bool | None = None
    done: bool = False
    message: str = ""
    code: str | int = ""
    errors: list[Json] = field(default_factory=list)
    max_sessions: int = 1
    cut: bool = False


Record = list[tuple[str, Json, SessionAnswer]]  # requests and their answers


class SessionServer:
    """The server of sessions, and the source of their tools. `text_key`: the field of an action
    that consists of a single text; `takes_turns`: actions are turns of the policy. Copies are made
    as `mode` says, by replay while none differed."""

    text_key, takes_turns = "", False
    mode: ForkMode = "none"

    def __init__(self, url: str) -> None:
        self.url = url
        self.tools: list[StatelessTool] = []
        self._lock, self.num_replays, self.num_refused = asyncio.Lock(), 0, 0

    @property
    def fork_mode(self) -> ForkMode:
        """The mode, and "none" after a replay that differed."""
        return "none" if self.mode == "replay" and self.num_refused else self.mode

    async def load(self) -> list[StatelessTool]:
        """The tools. Requests them once. Raises ConfigError."""
        async with self._lock:
            if not self.tools:
                await self.describe()
        return self.tools

    async def describe(self) -> None:
        """Set `tools` and what the class names. Raises ConfigError."""

    def session(self) -> Any:
        """A session that has not begun."""

    async def measure(self, session: Session) -> None:
        """Called at the end of an episode."""


class SessionEnv(ToolEnv):
    """One session of `server`. Unless the server reports success, an episode with a sum of rewards
    of at least `success` succeeded. `task.metadata[key]` has the arguments of the reset.
    """

    key: ClassVar[str]

    def __init__(self, task: Task, server: SessionServer, success: float, timeout_s: float) -> None:
        self.server, self.success = server, success
        super().__init__(task, [server], cast(Any, None), tool_timeout_s=timeout_s)

    @property
    def fork_mode(self) -> ForkMode:
        """The server's mode."""
        return self.server.fork_mode

    async def reset(self, *, seed: int | None = None, options: Json | None = None) -> Begun:
        messages, info = await super().reset(seed=seed, options=options)
        chosen = {} if seed is None else {"seed": seed}
        session = self._session("reset")
        observation = await session.begin(chosen | self.task.metadata.get(self.key, {}))
        info["tools"] = [tool for tool in info["tools"] if tool["name"] != SESSION]
        if own := messages_of(observation):
            return own, info
        last, text = messages[-1], shown(observation)
        messages[-1] = Message(last.role, f"{last.content}\n\n{text}" if text else last.content)
        return messages, info

    async def step(self, action: Message) -> StepResult:
        """See ToolEnv.step; the server determines rewards and end."""
        session, text_key = self._session("step"), self.server.text_key
        if ended := session.has_ended:
            raise EnvError(f"task {self.task.id}: step after the end of the episode")
        if self.server.takes_turns:
            return session.turned(await session.take(_turn(action)))
        taken: StepResult = ([], 0.0, False, False, {})
        if text_key and not action.tool_calls:
            try:
                text = shown(
                    await session.take({text_key: without_thoughts(action.content).strip()})
                )
            except ToolError as error:
                text = str(error)
            taken[0].append(Message("user", text))
        else:
            taken = await super().step(action)
        messages, _, ended, cut, info = taken
        if session.has_ended or ended or cut:
            cut = cut or session.was_cut
            await self.server.measure(session)
            return [], session.new_reward(), not cut, cut, info | self._judged(session)
        return messages, session.new_reward(), False, False, info

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        session, turn = self._session("finish"), _turn(action) if action else {}
        if self.server.takes_turns:
            _, reward, _, _, info = session.turned(await session.take({**turn, "limit": reason}))
            return reward, info
        await self.server.measure(session)
        return session.new_reward(), self._judged(session)

    async def _grade(self, written: Sequence[Message]) -> tuple[float, Info]:
        """The sum of the server's rewards."""
        return 0.0, {}

    def _session(self, what: str) -> Session:
        session = self._open_states(what).get(SESSION)
        if not isinstance(session, Session):
            raise ConfigError(f"env.tools: {type(self).__name__} has its own tools; remove the key")
        return session

    def _judged(self, session: Session) -> Info:
        return {"success": reward_of(session.record) >= self.success, "parts": {}, "reason": ""}


class SessionTool(StatelessTool):
    """The session of the episode, for its tools; hidden from the policy."""

    name, description = SESSION, ""

    def __init__(self, server: SessionServer) -> None:
        self.schema, self.server = {}, server

    def start(self, seed: int | None) -> Session:
        return self.server.session()  # type: ignore[no-any-return]

    async def call(self, arguments: Json, state: Session) -> ToolResult:
        raise ToolError(f"There is no tool {SESSION!r}.")

    async def fork(self, state: Session) -> Session:
        return await state.copy()

    async def close(self, state: Session) -> None:
        await state.close()


class SessionCall(StatelessTool):
    """One tool of a server: its call, or with the name STEP a typed action."""

    state_of = SESSION

    def __init__(self, given: Json) -> None:
        self.name, self.description = given["name"], given.get("description") or ""
        self.schema = given.get("inputSchema") or given.get("input_schema") or {}

    async def call(self, arguments: Json, state: Session) -> ToolResult:
        """Raises ToolError with the server's text."""
        call = {"type": "call_tool", "tool_name": self.name, "arguments": arguments}
        return ToolResult(shown(await state.take(arguments if self.name == STEP else call)))


class Session:
    """A session of the server. `record` has the requests of the episode and their answers.

    Subclasses have four coroutines. `begin(chosen, waits=True)` opens and resets the session, and
    returns the observation; with `waits` it may wait for a place. `take(data, kind="step")` returns
    the observation; it raises ToolError for an action that the server rejects, EnvError for a lost
    session, and InfraError if there is none. `copy_to(other)` brings a session that has not begun
    into this state, and raises EnvError; `close` is idempotent.
    """

    begin: Any
    take: Any
    copy_to: Any
    close: Any

    def __init__(self, server: Any) -> None:
        self.server, self.has_ended, self.was_cut = server, False, False
        self.record: Record = []
        self._num_taken = 0  # entries of the record whose rewards were returned

    def new_reward(self) -> float:
        """The rewards since the last call."""
        new, self._num_taken = self.record[self._num_taken :], len(self.record)
        return reward_of(new)

    def turned(self, observation: Json) -> StepResult:
        """The step of a server whose actions are turns."""
        facts = observation.get("metadata") or {}
        cut, info = bool(facts.get("truncated")), dict(facts.get("info") or {})
        return messages_of(observation), self.new_reward(), self.has_ended and not cut, cut, info

    async def copy(self) -> Self:
        """An independent session in the same state. Raises EnvError."""
        other: Self = self.server.session()
        try:
            await self.copy_to(other)
        except BaseException:
            await uncancelled(other.close())
            raise
        other.record, other._num_taken = [*self.record], self._num_taken
        other.has_ended = self.has_ended
        return other

    async def replay(self, record: Record) -> None:
        """Replay another session's requests. Raises EnvError if the answers differ."""
        await self.begin(record[0][1], waits=False)
        for kind, data, _ in record[1:]:
            with suppress(ToolError):
                await self.take(data, kind)
        self.server.num_replays += 1
        if self.record != record:
            self.server.num_refused += 1
            raise EnvError(f"{self.server.url}: a replay got different answers than the first time")


def reward_of(record: Record) -> float:
    """The sum of its rewards."""
    return sum(float(found.reward or 0.0) for *_, found in record)


def _turn(action: Message) -> Json:
    return {"content": action.content, "tool_calls": action.tool_calls}


def messages_of(observation: Json) -> list[Message]:
    """The messages of an observation that consists of messages; observations of games do not."""
    with suppress(ForeignError):
        return convert(observation.get("messages") or [], list[Message])
    return []


def shown(observation: Json) -> str:
    """The result for the policy: a text verbatim, else JSON. Raises ToolError for a failed call."""
    if failure := "tool_name" in observation and observation.get("error"):
        raise ToolError(str(failure.get("message")))
    if "tool_name" in observation:
        return text_of_json(observation.get("result"))
    fields = {key: value for key, value in observation.items() if key != "metadata"}
    filled = {key: value for key, value in fields.items() if value not in (None, "", [], {})}
    return text_of_json(filled or observation.get("metadata") or "")
