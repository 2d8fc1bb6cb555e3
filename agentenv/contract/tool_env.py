"""ToolEnv: the base of environments, which runs tool calls and grades; derive custom envs from it.

    class WeatherEnv(ToolEnv):
        def __init__(self, task: Task) -> None:
            super().__init__(task, tools=[weather], grader=ExactMatch())

An action with tool calls is answered with one tool message per call. An action without calls ends
the episode: the grader sees the policy's text, never the tool results. An env that is graded by its
final state overrides `judge` and needs no grader:

        async def judge(self, states, written, calls) -> Grade:
            booked = states["book"] == self.task.metadata["wanted"]
            return Grade(float(booked), booked)
"""

from __future__ import annotations

import asyncio
import copy
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from random import Random
from typing import Any, Self, TypeVar

from agentenv.base import deadline
from agentenv.base.crashes import guarded, not_a_text
from agentenv.base.errors import (
    SHOWN,
    AgentEnvError,
    ConfigError,
    EnvError,
    InfraError,
    OutageError,
    ToolError,
    named,
)
from agentenv.base.retries import through_outage
from agentenv.base.types import (
    MALFORMED_CALL,
    UNKNOWN_TOOL,
    Info,
    Limit,
    Message,
    Task,
    ToolCall,
    ToolResult,
)
from agentenv.base.untrusted import map_texts, printable, shortened
from agentenv.contract.env import (
    ForkMode,
    Grade,
    Grader,
    GraderOutageError,
    StepResult,
    judged,
    shared,
    start_grader,
)
from agentenv.contract.http import meaning
from agentenv.contract.instruction import Instruction
from agentenv.contract.tools import (
    CallBudget,
    ChosenTool,
    OnLimit,
    Tool,
    Toolbox,
    ToolLimits,
    ToolSource,
    has_close,
)

CLOSE_TIMEOUT_S = 10.0
PIECE_CHARS = 1 << 16  # characters of a result that are processed at once, in half a millisecond
MAX_ERROR_CHARS = 4000  # of each text in the record of a failed call
REPORT_S = 60.0  # between warnings that rollouts wait for a tool or grader
LEAST_WAIT_S = 1e-3  # shorter waits are not reported
DEFER_S = 1.0  # deferral of a deadline that waits for a call or a grade
NO_LIMITS = ToolLimits()

T = TypeVar("T")

logger = logging.getLogger(__name__)


Prompt = Callable[[Task], Sequence[Message]] | str | None


class ToolEnv:
    """One episode of `task` with these tools and this grader.

    `prompt` is the text of a system message, or a function from the task to all prompt messages;
    without it the question alone is the prompt. A call with an infrastructure failure, or beyond
    `tool_timeout_s`, is retried `num_retries` times, and then until `outage_s` after its first
    failure; then it raises OutageError. The policy is not informed, and neither failed attempts nor
    the pauses between them count against a limit. With `num_retries` 0, or for a tool that is not
    required, there is no wait for outages. A grader with an infrastructure failure is retried in
    the same way. `tool_limits` limits single tools by name, `max_tool_calls` all calls together;
    beyond a limit, with `on_limit` "result", the policy reads that the limit is reached, and with
    "end" the episode ends as truncated and is graded.

    A fork shares the attributes of a subclass; a subclass with state outside its tools' states
    overrides `fork`. A subclass without a grader overrides `judge`, or both `step` and `finish`,
    else ConfigError.
    """

    def __init__(
        self,
        task: Task,
        tools: Sequence[Tool | ToolSource],
        grader: Grader | None = None,
        *,
        prompt: Prompt = None,
        tool_timeout_s: float = 30.0,
        num_retries: int = 2,
        outage_s: float = 300.0,
        tool_limits: Mapping[str, ToolLimits] | None = None,
        max_tool_calls: int | None = None,
        on_limit: OnLimit = "result",
    ) -> None:
        kind = type(self)
        grades = ToolEnv.step is not kind.step and ToolEnv.finish is not kind.finish
        if grader is None and not (grades or grades_state(kind)):
            raise ConfigError(
                f"{kind.__name__} has neither a grader nor a `judge`; pass one to ToolEnv, such as "
                "ExactMatch() of agentenv.envs.grading.reward, or override `judge`"
            )
        self.task = task
        self._toolbox = Toolbox(tools, tool_limits or {})
        self.max_tool_calls = max_tool_calls
        self.on_limit: OnLimit = on_limit
        self.instruction = Instruction()
        self.grader = grader
        self.prompt = prompt
        self.tool_timeout_s = tool_timeout_s
        self.num_retries = num_retries
        self.outage_s = outage_s
        self._seed: int | None = None
        self._written: list[Message] = []
        self._budget = CallBudget(max_tool_calls)
        self._num_ok: Counter[str] = Counter()
        self._states: dict[str, Any] | None = None  # None before reset and after close
        self._closing: asyncio.Task[None] | None = None

    @property
    def fork_mode(self) -> ForkMode:
        """The weakest of the tools' modes."""
        return self._toolbox.fork_mode

    @property
    def tools(self) -> dict[str, Tool]:
        """The tools of the episode by name; tools of a source appear after `reset`."""
        return self._toolbox.tools

    @property
    def tool_limits(self) -> dict[str, ToolLimits]:
        """The limits of single tools by name."""
        return self._toolbox.limits

    def add_tool(self, tool: Tool | ToolSource, limits: ToolLimits | None = None) -> None:
        """Add a tool before `reset`; for subclasses of an env with tools."""
        self._toolbox.add(tool, limits)

    def configure(
        self,
        *,
        tools: Sequence[ChosenTool] = (),
        max_tool_calls: int | None = None,
        on_limit: OnLimit | None = None,
        outage_s: float | None = None,
        instruction: Instruction | None = None,
    ) -> None:
        """Apply a configuration, before `reset`; it overrides the class. `tools`, unless empty, are
        all tools of the episode; a name refers to a tool of the class.
        """
        if tools:
            self._toolbox = self._toolbox.chosen(tools, type(self).__name__)
        self.max_tool_calls = self.max_tool_calls if max_tool_calls is None else max_tool_calls
        self.on_limit = on_limit or self.on_limit
        self.outage_s = self.outage_s if outage_s is None else outage_s
        self.instruction = instruction or self.instruction

    async def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[list[Message], Info]:
        """The prompt; info["tools"] holds the schemas of the tools."""
        if self._states is not None:
            await self._close_states(self._states)
        await self._toolbox.load()
        await start_grader(self.grader)
        self._seed, self._written, self._num_ok = seed, [], Counter()
        self._budget = CallBudget(self.max_tool_calls)
        self._closing, self._states = None, {}
        for name, tool in self._toolbox.owners():
            own_seed = None if seed is None else Random(f"{seed}/{name}").getrandbits(31)
            self._states[name] = tool.start(own_seed)
        self._toolbox.share(self._states)
        return self._prompt_messages(), {"tools": self._toolbox.schemas()}

    async def step(self, action: Message) -> StepResult:
        """Run the calls of `action` in order; without any, grade and end the episode.

        info["tool_calls"] has for each call: name (UNKNOWN_TOOL for an unknown tool), arguments,
        ok, error (head and tail of a long text), duration_s, and waited_s, its idle part: waits for
        a slot, a rate limit or the next attempt, and failed attempts (seconds).
        """
        states = self._open_states("step")
        self._written.append(action)
        names = [call.name for call in action.tool_calls]
        over = self._budget.beyond(names, self.tool_limits) if self.on_limit == "end" else ""
        if over or not names:
            with self._ended():
                reward, info = await self._grade(self._written)
            limit = {"limit": over} if over else {}
            return [], reward, not over, bool(over), {"tool_calls": [], **limit, **info}
        messages: list[Message] = []
        records: list[Info] = []
        for call in action.tool_calls:
            text, record = await self._run(call, states)
            messages.append(Message("tool", text, name=call.name))
            records.append(record)
        return messages, 0.0, False, False, {"tool_calls": records}

    async def finish(self, reason: Limit, action: Message | None) -> tuple[float, Info]:
        """Grade the policy's text so far, as if the episode had ended. May be called again if it
        fails.
        """
        self._open_states("finish")
        written = self._written if action is None else [*self._written, action]
        return await self._grade(written)

    def state(self, name: str) -> Any:
        """The state of a tool in this episode, of a fork its own. Raises EnvError before `reset`,
        after `close`, and for an unknown tool."""
        states = self._open_states("state")
        if name not in states:
            raise EnvError(f"task {self.task.id}: no tool {name!r}; known: {', '.join(states)}")
        return states[name]

    async def judge(
        self, states: Mapping[str, Any], written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """The grade of the episode; by default that of the grader. `states` are those of the tools
        by name, of a fork its own; `written` and `calls` are those of `Grader.grade`, and so are
        the errors.
        """
        assert self.grader is not None, "the environment has no grader"
        return await self.grader.grade(self.task, written, calls)

    async def fork(self) -> Self:
        """A copy with its own transcript and a fork of each tool's state."""
        states = self._open_states("fork")
        other = copy.copy(self)
        other._written = list(self._written)
        other._num_ok, other._budget = self._num_ok.copy(), self._budget.copy()
        other._states, other._closing = {}, None
        complete = False
        try:
            for name, tool in self._toolbox.owners():
                forked = guarded(tool.fork(states[name]), f"the fork of the tool {name!r}")
                other._states[name] = await forked
            self._toolbox.share(other._states)
            complete = True
        except InfraError as error:
            raise EnvError(f"task {self.task.id}: fork failed: {error}") from error
        finally:
            if not complete:
                await other.close()
        return other

    def close_now(self) -> bool:
        """Close an env with stateless tools, without waiting; returns whether that was possible."""
        states = self._states or {}
        if self._closing is not None or any(has_close(self.tools[name]) for name in states):
            return False
        if type(self).close is not ToolEnv.close:  # a subclass has more to do
            return False
        self._states = None
        return True

    async def close(self) -> None:
        """Close each tool's state once, also under cancellation; idempotent."""
        if self._closing is None:
            if self._states is None or self.close_now():
                return
            states, self._states = self._states, None
            self._closing = asyncio.ensure_future(self._close_states(states))
        await deadline.uncancelled(self._closing)  # bounded, since each tool has CLOSE_TIMEOUT_S

    def _prompt_messages(self) -> list[Message]:
        if callable(self.prompt):
            messages = list(self.prompt(self.task))
        else:
            system = [Message("system", self.prompt)] if self.prompt else []
            messages = [*system, Message("user", self.task.question)]
        return self.instruction.apply(messages, self.task)

    def _open_states(self, what: str) -> dict[str, Any]:
        if self._states is None:
            raise EnvError(f"task {self.task.id}: {what} before reset or after close")
        return self._states

    def _ended(self) -> AbstractContextManager[None]:
        """During grading, no deadline of the rollout applies for `outage_s` seconds."""
        clock = deadline.work_clock() or deadline.WorkClock()
        until_s = clock() + self.outage_s
        return deadline.deferring(lambda: DEFER_S if clock() < until_s else 0.0)

    async def _grade(self, written: Sequence[Message]) -> tuple[float, Info]:
        who = f"the grader {type(self.grader or self).__name__}"
        call = partial(judged, who, self.judge, self._open_states("grade"), written, self._num_ok)
        try:
            grade = await self._through_outage(who, call, self.num_retries, self.outage_s)
        except OutageError as error:
            raise GraderOutageError(str(error)) from error
        info = {"success": grade.success, "parts": dict(grade.parts), "reason": grade.reason}
        return grade.reward, info

    async def _run(self, call: ToolCall, states: dict[str, Any]) -> tuple[str, Info]:
        """The text for the policy, and the record of the call."""
        loop, clock = asyncio.get_running_loop(), deadline.work_clock()
        start, worked_s = loop.time(), 0.0 if clock is None else clock()
        record: Info = {"name": call.name, "arguments": call.arguments, "ok": False, "error": None}
        self._budget.num_calls += 1
        try:
            if call.name == MALFORMED_CALL:
                problem = call.arguments.get("problem", "unknown tool")
                raise ToolError(f"The tool call cannot be read: {problem}")
            if call.name not in self.tools:
                record["name"] = UNKNOWN_TOOL  # records are counted by name
                known = ", ".join(self.tools) or "none"
                raise ToolError(f"There is no tool {call.name!r}. Known tools: {known}.")
            limits = self.tool_limits.get(call.name, NO_LIMITS)
            self._budget.use(call.name, limits)
            text = await self._call(call, states[call.name], record, limits)
            if record.get("info", {}).get("repeated"):  # a repeated query is no further search
                self._budget.num_of[call.name] -= 1
            record["ok"] = True
            self._num_ok[call.name] += 1
        except ToolError as error:
            text = str(error)
            record["error"] = _kept(text)
            record |= {"info": _kept(error.info)} if error.info else {}
        record["duration_s"] = seconds = loop.time() - start
        if clock is not None and (waited_s := seconds - (clock() - worked_s)) > LEAST_WAIT_S:
            record["waited_s"] = min(waited_s, seconds)  # discarded work may be older
        return await printable_text(text), record

    async def _call(self, call: ToolCall, state: Any, record: Info, limits: ToolLimits) -> str:
        """The text of a call's result; the tool's info goes to record["info"]. Raises ToolError,
        and OutageError when retries and `outage_s` are exhausted.
        """
        tool = self.tools[call.name]
        timeout_s = self.tool_timeout_s if limits.timeout_s is None else limits.timeout_s
        num_retries = self.num_retries if limits.num_retries is None else limits.num_retries
        max_outage_s = self.outage_s if limits.required and num_retries else 0.0
        called: Callable[[], Awaitable[ToolResult]]
        called = partial(call_in_time, timeout_s, tool, call.arguments, state)
        if limits.max_concurrency is not None:
            called = partial(_in_slot, tool.name, limits.max_concurrency, called)
        who = f"the tool {tool.name!r}"
        try:
            result = await self._through_outage(who, called, num_retries, max_outage_s)
        except OutageError as error:
            if limits.required:
                raise
            logger.warning("%s; the policy is informed that it is not available", error)
            raise ToolError(f"The tool {tool.name!r} is not available at the moment.") from error
        record |= {"info": result.info} if result.info else {}
        return result.text

    async def _through_outage(
        self, who: str, call: Callable[[], Awaitable[T]], num_retries: int, outage_s: float
    ) -> T:
        """The result of `call`. Raises OutageError when retries and `outage_s` are exhausted."""

        def failed(attempt: int, error: InfraError) -> None:
            if attempt >= num_retries:
                _report_outage(who, str(error), outage_s)

        key = f"{self._seed}/{self.task.id}/{self._budget.num_calls}"
        return await through_outage(
            call, who, key, outage_s=outage_s, num_retries=num_retries, failed=failed
        )

    async def _close_states(self, states: Mapping[str, Any]) -> None:
        """Close every state within CLOSE_TIMEOUT_S. Raises EnvError for states that do not close,
        and the CrashError of a tool, after the others are closed."""

        async def close(name: str, state: Any) -> str:
            clock = deadline.WorkClock()
            end_s, late = clock() + CLOSE_TIMEOUT_S, TimeoutError()
            try:
                with deadline.working(clock), deadline.Deadline(end_s, clock.__call__, late):
                    await self.tools[name].close(state)
            except AgentEnvError as error:
                return f"{name}: {error}"
            except TimeoutError:
                return f"{name}: not closed within {CLOSE_TIMEOUT_S:g} s"
            return ""

        owned = [(name, states[name]) for name, _ in self._toolbox.owners() if name in states]
        outcomes = await asyncio.gather(
            *(close(name, state) for name, state in owned if has_close(self.tools[name])),
            return_exceptions=True,
        )
        for outcome in outcomes:  # only now, so that one bad tool does not leave others open
            if isinstance(outcome, BaseException):
                raise outcome
        problems = "; ".join(str(outcome) for outcome in outcomes if outcome)
        if problems:
            raise EnvError(f"task {self.task.id}: {problems}")


def grades_state(env: Any) -> bool:
    """Whether this class of environments has a `judge` of its own: its final state decides, not an
    answer. False for a function that makes environments, except a partial of a class."""
    env = env.func if isinstance(env, partial) else env
    return isinstance(env, type) and issubclass(env, ToolEnv) and env.judge is not ToolEnv.judge


async def _in_slot(name: str, count: int, call: Callable[[], Awaitable[T]]) -> T:
    """The result of a call that has one of the tool's `count` slots; the wait does not count."""
    places = shared(("tool slots", name, count), lambda: asyncio.Semaphore(count))
    async with deadline.admitted(places, f"a slot of the tool {name!r}"):
        return await call()


async def call_in_time(
    timeout_s: float, tool: Tool, arguments: dict[str, Any], state: Any
) -> ToolResult:
    """One attempt of a call. Its deadline raises InfraError; waits for a slot or a rate limit do
    not count.
    """
    clock = deadline.work_clock()
    if clock is None:
        with deadline.working(deadline.WorkClock()):
            return await call_in_time(timeout_s, tool, arguments, state)
    # Only the end of the call shows whether the tool is down. Until then, other deadlines of the
    # rollout are deferred; this one is not, since it uses the time without deferrals.
    late = deadline.Deadline(
        clock() + timeout_s, clock.__call__, lambda: InfraError(f"no result within {timeout_s:g} s")
    )
    with late, deadline.doing(f"the tool {tool.name!r}"), deadline.deferring(lambda: DEFER_S):
        return await guarded(
            _called(tool, arguments, state),
            lambda: f"the tool {tool.name!r}, called with {arguments},",
        )


def _report_outage(who: str, problem: str, max_outage_s: float) -> None:
    """Log the outage, once a minute for all waiting rollouts."""
    reported: dict[str, float] = shared("outages reported", dict)
    now_s = asyncio.get_running_loop().time()
    if now_s - reported.get(who, -REPORT_S) >= REPORT_S:
        reported[who] = now_s
        logger.warning(
            "%s fails; retrying for up to %g s: %s", who, max_outage_s, problem, extra=SHOWN
        )


async def _called(tool: Tool, arguments: dict[str, Any], state: Any) -> ToolResult:
    try:
        result = await tool.call(arguments, state)
    except TimeoutError as error:  # a service of the tool is slow
        raise InfraError(f"TimeoutError: {error}") from error
    except Exception as error:
        known = meaning(error) or error
        if isinstance(known, ConfigError):
            known = named(f"the tool {tool.name!r}", known)
        if known is error:
            raise
        raise known from error
    if not (isinstance(result, ToolResult) and isinstance(result.text, str)):
        raise not_a_text(tool.name, result, type(tool).call)
    return result


def _kept(found: Any) -> Any:
    """The recorded part of a failed call: head and tail of long texts, also nested ones."""
    return map_texts(found, partial(shortened, max_chars=MAX_ERROR_CHARS))


async def printable_text(text: str) -> str:
    """`printable`, yielding to the event loop between pieces of a long text."""
    if text.isascii():
        return text
    pieces = list[str]()
    for start in range(0, len(text), PIECE_CHARS):
        if pieces:
            await asyncio.sleep(0)
        pieces.append(printable(text[start : start + PIECE_CHARS]))
    return "".join(pieces)
