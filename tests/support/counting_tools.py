"""A tool that counts, whose states must be closed exactly once, and an env around it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentenv.base.types import Message, Task, ToolCall, ToolResult
from agentenv.contract.env import ForkMode, Grade
from agentenv.contract.tool_env import ToolEnv

TASK = Task("t", "test", "how many?", ("2",))
ANSWER = Message("assistant", "2")


def call(name: str = "counter", **arguments: Any) -> Message:
    return Message("assistant", f"<{name}>", (ToolCall(name, arguments),))


class LastMessage:
    """Right when the last message is the answer; records the messages."""

    def __init__(self) -> None:
        self.seen: list[Message] = []

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        self.seen = list(written)
        right = written[-1].content == task.answers[0]
        return Grade(float(right), right, {"calls": float(sum(calls.values()))}, "looked")


class Counter:
    """Counts the calls of an episode. `faults` are raised by the first calls, one each."""

    name = "counter"
    description = "Counts."
    schema: ClassVar = {"type": "object", "properties": {"by": {"type": "integer"}}}
    fork_mode: ForkMode = "snapshot"

    def __init__(self, *faults: BaseException, name: str = "counter", latency_s: float = 0) -> None:
        self.name = name
        self.latency_s = latency_s
        self.faults = list(faults)
        self.fork_fault: Exception | None = None
        self.open: list[list[int]] = []

    def start(self, seed: int | None) -> list[int]:
        state = [0]
        self.open.append(state)
        return state

    async def call(self, arguments: dict[str, Any], state: list[int]) -> ToolResult:
        await asyncio.sleep(self.latency_s)
        if self.faults:
            raise self.faults.pop(0)
        state[0] += arguments.get("by", 1)
        return ToolResult(str(state[0]), {"seen": state[0]})

    async def fork(self, state: list[int]) -> list[int]:
        await asyncio.sleep(self.latency_s)
        if self.fork_fault:
            raise self.fork_fault
        copy = list(state)
        self.open.append(copy)
        return copy

    async def close(self, state: list[int]) -> None:
        await asyncio.sleep(self.latency_s)
        (place,) = [i for i, other in enumerate(self.open) if other is state]  # once only
        del self.open[place]


def make(*tools: Any, **options: Any) -> ToolEnv:
    return ToolEnv(TASK, tools, LastMessage(), **options)
