"""ToolEnv: the one environment that runs tool calls and grades; an env of your own is a subclass.

    class WeatherEnv(ToolEnv):
        def __init__(self, task: Task) -> None:
            super().__init__(task, tools=[weather], grader=ExactMatch())

An action with tool calls is answered with one tool message a call. An action without any ends
the episode: the grader sees what the policy wrote, never what the tools said.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, Self

from agentenv.env import ForkMode
from agentenv.errors import AgentEnvError, ConfigError, EnvError, InfraError, ToolError
from agentenv.grader import Grader
from agentenv.tool import Tool
from agentenv.types import Info, Limit, Message, Task, ToolCall

Prompt = Callable[[Task], Sequence[Message]] | str | None

FIRST_DELAY_S = 0.1  # before the first retry; doubles with each, up to MAX_DELAY_S
MAX_DELAY_S = 5.0
CLOSE_TIMEOUT_S = 10.0

_WEAKEST_FIRST: tuple[ForkMode, ...] = ("none", "snapshot", "replay", "pure")


class ToolEnv:
    """One episode of `task` with these tools and this grader.

    `prompt` is the text of a system message, or a function from the task to all prompt messages;
    without it the question alone is the prompt. A call that fails by infrastructure, or takes
    over `tool_timeout_s`, is tried `num_retries` more times and then raises EnvError; the policy
    never reads about it.

    A fork shares the attributes of a subclass; one that keeps state outside its tools' states
    overrides `fork`.
    """

    def __init__(
        self,
        task: Task,
        tools: Sequence[Tool],
        grader: Grader,
        *,
        prompt: Prompt = None,
        tool_timeout_s: float = 30.0,
        num_retries: int = 2,
    ) -> None:
        self.task = task
        self.tools = {tool.name: tool for tool in tools}
        if len(self.tools) < len(tools):
            raise ConfigError(f"two tools share a name: {[tool.name for tool in tools]}")
        self.grader = grader
        self.prompt = prompt
        self.tool_timeout_s = tool_timeout_s
        self.num_retries = num_retries
        self._seed: int | None = None
        self._written: list[Message] = []
        self._num_calls = 0
        self._num_ok: Counter[str] = Counter()
        self._states: dict[str, Any] | None = None  # None before reset and after close
        self._closing: asyncio.Task[None] | None = None

    @property
    def fork_mode(self) -> ForkMode:
        """The weakest of the tools' modes."""
        modes = [tool.fork_mode for tool in self.tools.values()]
        return min(modes, key=_WEAKEST_FIRST.index, default="pure")

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The prompt; info["tools"] holds the schemas of the tools."""
        if self._states is not None:
            await self._close_states(self._states)
        self._seed, self._written, self._num_calls = seed, [], 0
        self._num_ok, self._closing, self._states = Counter(), None, {}
        for name, tool in self.tools.items():
            own_seed = None if seed is None else Random(f"{seed}/{name}").getrandbits(31)
            self._states[name] = tool.start(own_seed)
        schemas = [
            {"name": tool.name, "description": tool.description, "parameters": tool.schema}
            for tool in self.tools.values()
        ]
        return self._prompt_messages(), {"tools": schemas}

    async def step(self, action: Message) -> tuple[list[Message], float, bool, bool, Info]:
        """Run the calls of `action` in order; without any, grade and end the episode.

        info["tool_calls"] says of each call: name, arguments, ok, error, duration_s.
        """
        states = self._open_states("step")
        self._written.append(action)
        if not action.tool_calls:
            reward, info = await self._grade()
            return [], reward, True, False, {"tool_calls": [], **info}
        messages: list[Message] = []
        records: list[Info] = []
        for call in action.tool_calls:
            text, record = await self._run(call, states)
            messages.append(Message("tool", text, name=call.name))
            records.append(record)
        return messages, 0.0, False, False, {"tool_calls": records}

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        """Grade what is there, as if the episode had ended by itself."""
        self._open_states("finish")
        if action is not None:
            self._written.append(action)
        return await self._grade()

    async def fork(self) -> Self:
        """A copy with its own transcript and a fork of each tool's state."""
        states = self._open_states("fork")
        other = copy.copy(self)
        other._written = list(self._written)
        other._num_ok = self._num_ok.copy()
        other._states, other._closing = {}, None
        complete = False
        try:
            for name, tool in self.tools.items():
                other._states[name] = await tool.fork(states[name])
            complete = True
        except InfraError as error:
            raise EnvError(f"task {self.task.id}: fork failed: {error}") from error
        finally:
            if not complete:
                await other.close()
        return other

    async def close(self) -> None:
        """Close each tool's state once, also when cancelled meanwhile; idempotent."""
        if self._closing is None:
            if self._states is None:
                return
            self._closing = asyncio.ensure_future(self._close_states(self._states))
            self._states = None
        cancelled: asyncio.CancelledError | None = None
        while not self._closing.done():  # bounded, since each tool has CLOSE_TIMEOUT_S
            try:
                await asyncio.wait({self._closing})
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            raise cancelled
        self._closing.result()

    # inner workings

    def _prompt_messages(self) -> list[Message]:
        if callable(self.prompt):
            return list(self.prompt(self.task))
        system = [Message("system", self.prompt)] if self.prompt else []
        return [*system, Message("user", self.task.question)]

    def _open_states(self, what: str) -> dict[str, Any]:
        if self._states is None:
            raise EnvError(f"task {self.task.id}: {what} before reset or after close")
        return self._states

    async def _grade(self) -> tuple[float, Info]:
        grade = await self.grader.grade(self.task, self._written, self._num_ok)
        info = {"success": grade.success, "parts": dict(grade.parts), "reason": grade.reason}
        return grade.reward, info

    async def _run(self, call: ToolCall, states: dict[str, Any]) -> tuple[str, Info]:
        """The text that the policy reads, and the record of the call."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        record: Info = {"name": call.name, "arguments": call.arguments, "ok": False, "error": None}
        self._num_calls += 1
        try:
            if call.name not in self.tools:
                known = ", ".join(self.tools) or "none"
                raise ToolError(f"There is no tool {call.name!r}. Known tools: {known}.")
            text = await self._call(call, states[call.name], record)
            record["ok"] = True
            self._num_ok[call.name] += 1
        except ToolError as error:
            text = record["error"] = str(error)
        record["duration_s"] = loop.time() - start
        return text, record

    async def _call(self, call: ToolCall, state: Any, record: Info) -> str:
        """One call with its retries; facts that the tool reports go to record["info"]."""
        rng = Random(f"{self._seed}/{self.task.id}/{self._num_calls}")
        problem = ""
        for attempt in range(self.num_retries + 1):
            if attempt:
                delay = min(MAX_DELAY_S, FIRST_DELAY_S * 2 ** (attempt - 1))
                await asyncio.sleep(delay * rng.uniform(0.5, 1.5))
            try:
                async with asyncio.timeout(self.tool_timeout_s):
                    result = await self.tools[call.name].call(call.arguments, state)
            except InfraError as error:
                problem = str(error)
            except TimeoutError:
                problem = f"no result within {self.tool_timeout_s:g} s"
            else:
                if result.info:
                    record["info"] = result.info
                return result.text
        raise EnvError(
            f"task {self.task.id}: tool {call.name} failed {self.num_retries + 1} times, "
            f"the last time: {problem}"
        )

    async def _close_states(self, states: dict[str, Any]) -> None:
        async def close(name: str, state: Any) -> str:
            try:
                async with asyncio.timeout(CLOSE_TIMEOUT_S):
                    await self.tools[name].close(state)
            except AgentEnvError as error:
                return f"{name}: {error}"
            except TimeoutError:
                return f"{name}: not closed within {CLOSE_TIMEOUT_S:g} s"
            return ""

        outcomes = await asyncio.gather(
            *(close(name, state) for name, state in states.items()), return_exceptions=True
        )
        for outcome in outcomes:  # only now, so that one bad tool leaves no other one open
            if isinstance(outcome, BaseException):
                raise outcome
        problems = [outcome for outcome in outcomes if outcome]
        if problems:
            raise EnvError(f"task {self.task.id}: {'; '.join(map(str, problems))}")
