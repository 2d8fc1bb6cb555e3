r"""From a matcher's verdict to a reward: the answer alone, or the rule of ARPO and Tool-Star."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from agentenv.grader import Grade
from agentenv.types import Message, Task
from envs.grading.answer import check_format, final_answer
from envs.grading.exact import Exact
from envs.grading.reference import reference_reward
from envs.grading.verdict import Matcher

TOOL_BONUS = 0.1
BONUS_TOOLS = ("search", "python")


class AnswerReward:
    r"""The matcher's score of the answer is the reward.

    The answer is the last \boxed{} of the last message, else what its last answer tags hold,
    else what is left of it without its thoughts.
    """

    def __init__(self, matcher: Matcher) -> None:
        self.matcher = matcher

    async def start(self) -> None:
        """Get the matcher ready."""
        await self.matcher.start()

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Compare the last message with the golds."""
        answer = final_answer(written[-1].content) if written else ""
        verdict = await self.matcher.verdict(task.question, answer, task.answers)
        parts = {"accuracy": verdict.score, **verdict.parts}
        return Grade(verdict.score, verdict.right, parts, verdict.reason)


class ExactMatch(AnswerReward):
    """Reward 1 when the answer equals one of the golds after normalising, else 0."""

    def __init__(self) -> None:
        super().__init__(Exact())


class ToolReward:
    r"""The hierarchical reward of ARPO and Tool-Star on what the policy wrote.

    -1 for a bad format; else the matcher's score of the answer (default: 1 for a right one, 0 for
    a wrong one); and 0.1 more, if that is above 0, after both a search and a Python call really
    succeeded. "format", "accuracy" and "tool_bonus" add up to the reward.

    `compat = "reference"` is the released rule: token F1 for every kind of question, and the
    bonus for the text </search> and </python>. The tool results, which a grader here never sees,
    stand in it as if each were empty.
    """

    def __init__(
        self,
        matcher: Matcher | None = None,
        *,
        compat: Literal["", "reference"] = "",
        bonus_tools: Sequence[str] = BONUS_TOOLS,
    ) -> None:
        self.matcher = matcher or Exact()
        self.compat = compat
        self.bonus_tools = tuple(bonus_tools)

    async def start(self) -> None:
        """Get the matcher ready."""
        await self.matcher.start()

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Check the format of all turns together, then the answer, then the calls."""
        if self.compat:
            return _reference_grade(task, written)
        problem, answer = check_format("\n".join(message.content for message in written))
        if problem:
            parts = {"format": -1.0, "accuracy": 0.0, "tool_bonus": 0.0}
            return Grade(-1.0, False, parts, f"bad format: {problem}")
        verdict = await self.matcher.verdict(task.question, answer, task.answers)
        bonus = verdict.score > 0 and all(calls.get(name, 0) > 0 for name in self.bonus_tools)
        counted = {
            "format": 0.0,
            "accuracy": verdict.score,
            "tool_bonus": TOOL_BONUS if bonus else 0.0,
        }
        reason = verdict.reason + (f", with {' and '.join(self.bonus_tools)}" if bonus else "")
        return Grade(sum(counted.values()), verdict.right, {**verdict.parts, **counted}, reason)


def _reference_grade(task: Task, written: Sequence[Message]) -> Grade:
    text = "".join(
        message.content + (" <result>\n\n</result>" if message.tool_calls else "")
        for message in written
    )
    output = reference_reward(text, task.answers)
    score, f1 = float(output["score"]), float(output["f1_score"])
    parts = {
        "format": min(score, 0.0),
        "accuracy": f1,
        "tool_bonus": max(0.0, score - f1),
    }
    return Grade(score, f1 >= 1.0, parts, str(output["reason"]))
