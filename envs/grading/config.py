"""The keys of a grader, and the graders they make."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from agentenv.config import build_config
from agentenv.errors import ConfigError, GraderError
from agentenv.grader import Grader, start_grader
from agentenv.shared import shared
from agentenv.types import Message, Task
from envs.grading.custom import CustomGrader
from envs.grading.exact import Exact, TokenF1
from envs.grading.judge_config import JudgeConfig
from envs.grading.layers import Layered
from envs.grading.reward import AnswerReward, ToolReward
from envs.grading.verdict import Matcher

NUM_CHECKED_ROWS = 3

Kind = Literal["exact", "f1", "layered", "judge", "custom"]
Reward = Literal["answer", "tools"]


class GraderConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How answers are graded."""

    kind: Annotated[
        Kind | None,
        Meta(
            description="exact match, SQuAD F1, all layers, layers then an LLM, your function; "
            "none: custom with grader.path, judge with grader.judge, else that of the environment"
        ),
    ] = None
    reward: Annotated[
        Reward | None,
        Meta(
            description="the answer's score, or ARPO's rule: format -1, score, +0.1 for tools; "
            "none: that of the environment"
        ),
    ] = None
    compat: Annotated[
        Literal["", "reference"],
        Meta(description="with reward = tools: 'reference' is the released rule, F1 for all"),
    ] = ""
    math: Annotated[
        bool, Meta(description="layered, judge: ask math-verify (extra 'math') for expressions")
    ] = True
    partial_credit: Annotated[
        bool, Meta(description="layered: a wrong answer in words scores its token F1")
    ] = False
    judge: Annotated[JudgeConfig | None, Meta(description="judge: the server and its model")] = None
    path: Annotated[str, Meta(description="custom: the Python file")] = ""
    name: Annotated[str, Meta(description="custom: the function in it")] = "compute_score"
    timeout_s: Annotated[float, Meta(gt=0, description="custom: limit of one call, seconds")] = 10.0
    num_workers: Annotated[int, Meta(ge=1, description="custom: worker processes")] = 2
    success_at: Annotated[
        float, Meta(description="custom: the score from which an answer counts as right")
    ] = 1.0


_READ_BY = {
    "compat": ("exact", "f1", "layered", "judge"),
    "reward": ("exact", "f1", "layered", "judge"),
    "math": ("layered", "judge"),
    "partial_credit": ("layered",),
    "judge": ("judge",),
    "path": ("custom",),
    "name": ("custom",),
    "timeout_s": ("custom",),
    "num_workers": ("custom",),
    "success_at": ("custom",),
}


def grader_config(
    keys: GraderConfig | Mapping[str, Any] | None,
    *,
    kind: Kind = "layered",
    reward: Reward = "answer",
) -> GraderConfig:
    """The keys as a checked config, with the environment's `kind` and `reward` where they say
    none; a ConfigError names a key that is wrong or not read."""
    if not isinstance(keys, GraderConfig):
        keys = build_config(GraderConfig, dict(keys or {}), "grader")
    if keys.kind is None:
        chosen: Kind = "custom" if keys.path else "judge" if keys.judge is not None else kind
        keys = replace(keys, kind=chosen)
    default = GraderConfig()
    for key, kinds in _READ_BY.items():
        if keys.kind not in kinds and getattr(keys, key) != getattr(default, key):
            raise ConfigError(
                f"grader.{key} is read by kind {' or '.join(kinds)} only, not by "
                f"{keys.kind!r}; take it out or change grader.kind"
            )
    if keys.reward is None and keys.kind != "custom":
        keys = replace(keys, reward=reward)
    if keys.compat and keys.reward != "tools":
        raise ConfigError('grader.compat = "reference" needs grader.reward = "tools"')
    if keys.kind == "judge" and keys.judge is None:
        raise ConfigError('grader.kind = "judge" needs grader.judge.url and grader.judge.model')
    if keys.kind == "custom" and not keys.path:
        raise ConfigError('grader.kind = "custom" needs grader.path, a Python file')
    return keys


def make_grader(
    keys: GraderConfig | Mapping[str, Any] | None = None,
    *,
    kind: Kind = "layered",
    reward: Reward = "answer",
) -> Grader:
    """The grader of these keys, `kind` and `reward` where they say none. One for each set of keys
    in a process, since what runs processes or holds connections is shared."""
    asked = ("grader keys", msgspec.json.encode(keys), kind, reward)
    config = shared(asked, lambda: grader_config(keys, kind=kind, reward=reward))
    key = ("grader", msgspec.json.encode(config))
    if config.kind == "custom":
        return shared(
            key,
            lambda: CustomGrader(
                config.path,
                config.name,
                timeout_s=config.timeout_s,
                num_workers=config.num_workers,
                success_at=config.success_at,
            ),
        )
    matcher: Matcher
    if config.kind == "exact":
        matcher = Exact()
    elif config.kind == "f1":
        matcher = TokenF1()
    elif config.kind == "judge" and config.judge is not None:
        from envs.grading.judge import Judge  # brings an HTTP client, which only it needs

        judge, layered = config.judge, Layered(math=config.math)
        matcher = shared(key, lambda: Judge(judge, first=layered))
    else:
        matcher = Layered(math=config.math, partial_credit=config.partial_credit)
    if config.reward == "tools":
        return ToolReward(matcher, compat=config.compat)
    return AnswerReward(matcher)


async def check_grader(grader: Grader, tasks: Sequence[Task]) -> None:
    """Grade the golds of the first three rows, so that a broken grader is refused at the start.

    Raises ConfigError: the grader cannot start, fails on a row, or gives no finite reward.
    """
    await start_grader(grader)
    for task in tasks[:NUM_CHECKED_ROWS]:
        gold = task.answers[0] if task.answers else ""
        text = rf"<think>.</think><answer>\boxed{{{gold}}}</answer>"
        try:
            grade = await grader.grade(task, [Message("assistant", text)], {})
        except GraderError as error:
            raise ConfigError(
                f"the grader fails on row {task.id}, given its own gold {gold!r}: {error}"
            ) from None
        if not math.isfinite(grade.reward):
            raise ConfigError(
                f"the grader gives row {task.id} the reward {grade.reward}; expected a number"
            )
