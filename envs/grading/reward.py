"""Graders: from a matcher's verdict to a reward, and the grader of a table of keys.

The reward is the answer's score alone, or follows the rule of ARPO and Tool-Star.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec
from msgspec import Struct

from agentenv.base.crashes import at_start
from agentenv.base.errors import ConfigError, CrashError, GraderError
from agentenv.base.registry import loaded
from agentenv.base.types import Message, Task
from agentenv.contract.env import Grade, Grader, graded, shared, start_grader
from agentenv.envs.grading.keys import (
    READ_BY,
    GraderConfig,
    GraderKeys,
    GraderKind,
    Reward,
    grader_config,
)
from agentenv.envs.grading.keys import GraderPart as GraderPart
from agentenv.envs.grading.verdict import STOPPED, Exact, Matcher, check_format, final_answer

TOOL_BONUS = 0.1
RELEASED_REWARD = "agentenv.reference.grading:ReleasedReward"  # loaded for compat, never imported
BONUS_TOOLS = ("search", "python")


class AnswerReward:
    r"""The matcher's score of the answer is the reward.

    The answer is, outside of the thoughts of the last message, the last \boxed{}, else the content
    of the last answer tags, else all.
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
    """Reward 1 when the answer equals one of the golds after normalizing, else 0."""

    def __init__(self) -> None:
        super().__init__(Exact())


class ToolReward(AnswerReward):
    r"""The hierarchical reward of ARPO and Tool-Star for the text of the policy.

    -1 for a bad format; else the matcher's score of the answer (default: 1 for a right one, 0 for
    a wrong one); and 0.1 more, if that is above 0, after both a search and a Python call really
    succeeded. "format", "accuracy" and "tool_bonus" add up to the reward.
    """

    def __init__(self, matcher: Matcher | None = None) -> None:
        super().__init__(matcher or Exact())

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Check the format of all turns together, then the answer, then the calls."""
        problem, answer = check_format("\n".join(message.content for message in written))
        if problem:
            parts = {"format": -1.0, "accuracy": 0.0, "tool_bonus": 0.0}
            return Grade(-1.0, False, parts, f"bad format: {problem}")
        verdict = await self.matcher.verdict(task.question, answer, task.answers)
        bonus = verdict.score > 0 and all(calls.get(name, 0) > 0 for name in BONUS_TOOLS)
        counted = {
            "format": 0.0,
            "accuracy": verdict.score,
            "tool_bonus": TOOL_BONUS if bonus else 0.0,
        }
        reason = verdict.reason + (f", with {' and '.join(BONUS_TOOLS)}" if bonus else "")
        return Grade(sum(counted.values()), verdict.right, {**verdict.parts, **counted}, reason)


NUM_CHECKED_ROWS = 3
EXPECTED = (
    "; expected `async def grade(self, task, written, calls)` that returns Grade(reward, success), "
    "a number and True or False"
)


def make_grader(
    keys: GraderConfig | Mapping[str, Any] | None = None,
    *,
    kind: GraderKind = "layered",
    reward: Reward = "answer",
    partial_credit: bool = False,
) -> Grader:
    """The grader of these keys, with `kind`, `reward` and `partial_credit` for omitted ones. One
    for each set of keys in a process, since its processes and connections are shared."""
    table = ("grader keys", msgspec.json.encode(keys), kind, reward, partial_credit)
    config = shared(
        table, lambda: grader_config(keys, kind=kind, reward=reward, partial_credit=partial_credit)
    )
    return _grader(config)


def _grader(config: GraderKeys) -> Grader:
    """The grader of checked keys; each loads the file that it needs when it is chosen."""
    if config.compat:
        return cast(Grader, loaded(RELEASED_REWARD)())
    if isinstance(config, GraderConfig) and config.combined:
        parts = {
            name: Weighted(_grader(one), one.weight, one.decides)
            for name, one in config.combined.items()
        }
        return shared(("grader", msgspec.json.encode(config)), lambda: Combined(parts))
    fields = {key: getattr(config, key) for key in GraderKeys.__struct_fields__}
    key = ("grader", msgspec.json.encode(fields))
    if config.kind == "custom":
        from agentenv.envs.grading.custom import CustomGrader

        own = {name: fields[name] for name, kinds in READ_BY.items() if kinds == ("custom",)}
        return shared(key, lambda: CustomGrader(**own))
    if config.own is not None:
        return shared(key, config.own.build)
    matcher = shared(key, lambda: _matcher(config))
    return ToolReward(matcher) if config.reward == "tools" else AnswerReward(matcher)


def _matcher(config: GraderKeys) -> Matcher:
    """The comparison of answers of this kind; "custom" and "own" are graders, not matchers."""
    if config.kind == "exact":
        return Exact()
    from agentenv.envs.grading.layers import Layered, TokenF1

    if config.kind == "f1":
        return TokenF1()
    if config.kind == "layered":
        return Layered(
            math=config.math, partial_credit=bool(config.partial_credit), ordered=config.ordered
        )
    from agentenv.envs.grading.judge import Judge

    assert config.judge is not None, "the configuration was checked"
    first = Layered(math=config.math, ordered=True)  # the judge decides on another order
    return Judge(config.judge, first=first, ordered=config.ordered)


async def check_grader(grader: Grader, tasks: Sequence[Task]) -> list[Grade]:
    """Grade the golds of the first three rows, so that a broken grader is refused at the start.

    Raises ConfigError if the grader cannot start, or fails on a row.
    """
    await at_start(start_grader(grader), f"the start of the grader {type(grader).__name__}")
    grades = []
    for task in tasks[:NUM_CHECKED_ROWS]:
        gold = task.answers[0] if task.answers else ""
        text = rf"<think>.</think><answer>\boxed{{{gold}}}</answer>"
        where = f"the grader fails on the gold answer {gold!r} of row {task.id}"
        try:
            grade = await graded(grader, task, [Message("assistant", text)], {})
        except (GraderError, CrashError) as error:
            expected = EXPECTED if isinstance(error, CrashError) else ""
            raise ConfigError(f"{where}: {error}{expected}") from error
        if grade.parts.get(STOPPED):
            raise ConfigError(f"{where}: {grade.reason}")
        grades.append(grade)
    return grades


class Weighted(Struct, frozen=True):
    """One of several graders. Of those that `decides`, each must find the answer right."""

    grader: Grader
    weight: float = 1.0
    decides: bool = False


class Combined:
    """The sum of the rewards of graders, each times its weight, which is the part of that name.

    An answer is right if all deciding graders accept it; if none decides, the first one does.
    The parts of each grader are kept, as NAME.PART, and the reasons are joined.
    """

    def __init__(self, graders: Mapping[str, Weighted]) -> None:
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
        """Run all graders at once. Raises the first error of any of them."""
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
