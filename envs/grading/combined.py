"""Several graders as one: their rewards, weighted and added up.

[grader.combined.answer]              # nothing more: as the environment grades by itself
[grader.combined.short]
weight = 0.2
own = { name = "my_graders:Short" }
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from msgspec import Struct

from agentenv.env import Grade, Grader, graded, start_grader
from agentenv.types import Message, Task


class Weighted(Struct, frozen=True):
    """One of several graders. Of those that `decides`, each must find the answer right."""

    grader: Grader
    weight: float = 1.0
    decides: bool = False


class Combined:
    """The sum of what graders give, each times its weight, which is the part of that name.

    An answer is right when all that decide say so; where none decides, the first does.
    The parts of each grader are kept, as NAME.PART, and the reasons follow each other.
    """

    def __init__(self, graders: Mapping[str, Weighted]) -> None:
        if not graders:
            raise ValueError("Combined needs one grader at least")
        self.graders = dict(graders)
        deciding = [name for name, one in graders.items() if one.decides]
        self.deciding = deciding or [next(iter(graders))]

    async def start(self) -> None:
        """Get all graders ready."""
        for one in self.graders.values():
            await start_grader(one.grader)

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Ask all graders at once. Raises what any of them raises."""
        found = await asyncio.gather(
            *(graded(one.grader, task, written, calls) for one in self.graders.values())
        )
        grades = dict(zip(self.graders, found, strict=True))
        parts: dict[str, float] = {}
        for name, grade in grades.items():
            parts[name] = self.graders[name].weight * float(grade.reward)
            parts |= {f"{name}.{part}": value for part, value in grade.parts.items()}
        reward = sum(parts[name] for name in grades)
        success = all(grades[name].success for name in self.deciding)
        reasons = [f"{name}: {grade.reason}" for name, grade in grades.items() if grade.reason]
        return Grade(reward, success, parts, "; ".join(reasons))
