"""A die to roll: the policy is asked for what it showed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentenv import Grade, Message, Task, ToolEnv, tool


@tool
def roll(sides: int) -> str:
    """Roll a die that always shows its number of sides."""
    return str(sides)


class Sides:
    """Right when the last message holds the number."""

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Compare the end of what was written with the gold."""
        right = written[-1].content.endswith(task.answers[0])
        return Grade(float(right), right)


class DiceEnv(ToolEnv):
    """One question about a die."""

    def __init__(self, task: Task, prompt: str = "Roll, then say what you saw.") -> None:
        super().__init__(task, tools=[roll], grader=Sides(), prompt=prompt)
