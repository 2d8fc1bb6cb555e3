"""The seam of grading: from what the policy wrote to a reward and its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from agentenv.types import Message, Task


class Grade(Struct, frozen=True):
    """A verdict: the reward, whether the answer counts as right, the parts of the reward
    (metric name -> value), and why."""

    reward: float
    success: bool
    parts: dict[str, float] = {}
    reason: str = ""


class Grader(Protocol):
    """Grades a finished or cut-off episode. Must be quick or do its work off the event loop.

    A grader may have a method `async def start(self)`, awaited before each episode, that gets it
    ready once and raises ConfigError when it cannot work.
    """

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """`written` holds only the policy's own messages; `calls` counts, by tool, the calls
        that really ran without error. Raises GraderError."""
        ...


async def start_grader(grader: Grader) -> None:
    """Get a grader ready, if it has to be. Raises ConfigError."""
    start = getattr(grader, "start", None)
    if start is not None:
        await start()
