"""Graders: from a matcher's verdict to a reward, the keys of a grader, and what they make.

The reward is the answer's score alone, or follows the rule of ARPO and Tool-Star.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_type_hints

import msgspec
from msgspec import NODEFAULT, Meta, Struct, defstruct, field
from msgspec.structs import replace

from agentenv.config import ESSENTIAL, PATH, build_config
from agentenv.crashes import at_start
from agentenv.env import shared
from agentenv.envs.grading.combined import Combined, Weighted
from agentenv.envs.grading.custom import STOPPED, CustomGrader, SolutionStr
from agentenv.envs.grading.exact import Exact, TokenF1
from agentenv.envs.grading.judge import JudgeConfig
from agentenv.envs.grading.layers import Layered
from agentenv.envs.grading.verdict import Matcher, check_format, final_answer
from agentenv.errors import ConfigError, CrashError, GraderError
from agentenv.registry import Kind
from agentenv.tool_env import Grade, Grader, graded, start_grader
from agentenv.types import Message, Task

TOOL_BONUS = 0.1
RELEASED_REWARD = "agentenv.reference.grading:ReleasedReward"  # loaded for compat, never imported
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


class ToolReward(AnswerReward):
    r"""The hierarchical reward of ARPO and Tool-Star on what the policy wrote.

    -1 for a bad format; else the matcher's score of the answer (default: 1 for a right one, 0 for
    a wrong one); and 0.1 more, if that is above 0, after both a search and a Python call really
    succeeded. "format", "accuracy" and "tool_bonus" add up to the reward.
    """

    def __init__(
        self,
        matcher: Matcher | None = None,
        *,
        bonus_tools: Sequence[str] = BONUS_TOOLS,
    ) -> None:
        super().__init__(matcher or Exact())
        self.bonus_tools = tuple(bonus_tools)

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Check the format of all turns together, then the answer, then the calls."""
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


NUM_CHECKED_ROWS = 3
EXPECTED = (
    "; expected `async def grade(self, task, written, calls)` that returns Grade(reward, success), "
    "a number and True or False"
)


class GraderPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of the keys of a grader from elsewhere, [grader.own]."""

    def build(self) -> Grader:
        """The grader; one for each set of keys in a process."""
        raise NotImplementedError


def _keys_of(found: Any) -> type[GraderPart] | None:
    """A class with `grade`, whose keys are what its constructor takes."""
    if not (isinstance(found, type) and callable(getattr(found, "grade", None))):
        return None
    fields: list[tuple[str, Any, Any]] = []
    try:
        types = get_type_hints(found.__init__)  # type: ignore[misc]
        for one in inspect.signature(found).parameters.values():
            if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                value = NODEFAULT if one.default is one.empty else one.default
                fields.append((one.name, types.get(one.name, Any), field(default=value)))
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(
            f"what the constructor of {found.__name__} takes cannot be keys: {error}; derive it "
            "from agentenv.envs.grading.reward.GraderPart"
        ) from error
    names = [name for name, _, _ in fields]

    def build(keys: GraderPart) -> Grader:
        return cast(Grader, found(**{name: getattr(keys, name) for name in names}))

    part = defstruct(
        found.__name__,
        fields,
        bases=(GraderPart,),
        namespace={"build": build},
        frozen=True,
        kw_only=True,
        module=found.__module__,
    )
    return cast(type[GraderPart], part)


GRADERS = Kind("grader", "agentenv.graders", GraderPart, [], _keys_of)

if TYPE_CHECKING:
    AnyGrader = GraderPart
else:
    AnyGrader = GRADERS.key

GraderKind = Literal["exact", "f1", "layered", "judge", "custom", "own", "combined"]
Reward = Literal["answer", "tools"]


class GraderKeys(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One grader."""

    kind: Annotated[
        GraderKind | None,
        Meta(
            description="exact match, SQuAD F1, all layers, layers then an LLM, your function, "
            "your class, several graders; none: own with [grader.own], custom with grader.path, "
            "judge with grader.judge, combined with [grader.combined.NAME], else that of the "
            "environment",
            extra=ESSENTIAL,
        ),
    ] = None
    reward: Annotated[
        Reward | None,
        Meta(
            description="the answer's score, or ARPO's rule: format -1, score, +0.1 for tools; "
            "none: that of the environment",
            extra=ESSENTIAL,
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
        bool | None,
        Meta(
            description="layered: a wrong answer in words earns its token F1, stays wrong; none: "
            "as the environment, true of those with tools",
        ),
    ] = None
    ordered: Annotated[
        bool,
        Meta(
            description="layered, judge: the items of a list count in the gold's order; without it "
            "a judge is asked about another order, and layered alone accepts it"
        ),
    ] = False
    judge: Annotated[JudgeConfig | None, Meta(description="judge: the server and its model")] = None
    own: Annotated[
        AnyGrader | None,
        Meta(
            description="own: a grader from elsewhere and its keys; name is 'module:Class', or the "
            "entry point of an installed package in agentenv.graders"
        ),
    ] = None
    path: Annotated[str, Meta(description="custom: the Python file", extra=PATH)] = ""
    name: Annotated[str, Meta(description="custom: the function in it")] = "compute_score"
    timeout_s: Annotated[
        float, Meta(gt=0, description="custom: limit of one call: seconds of CPU time, and asleep")
    ] = 10.0
    num_workers: Annotated[int, Meta(ge=1, description="custom: worker processes")] = 2
    success_at: Annotated[
        float, Meta(description="custom: the score from which an answer counts as right")
    ] = 1.0
    solution_str: Annotated[
        SolutionStr,
        Meta(
            description="custom, of verl's form: what the policy wrote, or the chat prompt before "
            "it too, which functions of Search-R1 and TinyZero look for"
        ),
    ] = "response"


class WeightedConfig(GraderKeys, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of several graders; what it does not say is as the environment says."""

    weight: Annotated[float, Meta(description="factor on its reward, which may be negative")] = 1.0
    decides: Annotated[
        bool,
        Meta(
            description="its verdict says whether an answer is right; of several all must; "
            "without any: that of the first"
        ),
    ] = False


class GraderConfig(GraderKeys, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How answers are graded."""

    combined: Annotated[
        dict[str, WeightedConfig],
        Meta(
            description="combined: graders by name, [grader.combined.NAME], whose rewards are "
            "weighted and added up"
        ),
    ] = field(default_factory=dict)


_READ_BY = {
    "combined": ("combined",),
    "compat": ("exact", "f1", "layered", "judge"),
    "reward": ("exact", "f1", "layered", "judge"),
    "math": ("layered", "judge"),
    "ordered": ("layered", "judge"),
    "partial_credit": ("layered",),
    "judge": ("judge",),
    "own": ("own",),
    "path": ("custom",),
    "name": ("custom",),
    "timeout_s": ("custom",),
    "num_workers": ("custom",),
    "success_at": ("custom",),
    "solution_str": ("custom",),
}


def grader_config(
    keys: GraderConfig | Mapping[str, Any] | None,
    *,
    kind: GraderKind = "layered",
    reward: Reward = "answer",
    partial_credit: bool = False,
) -> GraderConfig:
    """The keys as a checked config, with the environment's `kind`, `reward` and `partial_credit`
    where they say none; a ConfigError names a key that is wrong or not read."""
    if not isinstance(keys, GraderConfig):
        keys = build_config(GraderConfig, dict(keys or {}), "grader")
    if keys.kind is None:
        chosen: GraderKind = "custom" if keys.path else "judge" if keys.judge is not None else kind
        chosen = "own" if keys.own is not None else chosen
        keys = replace(keys, kind="combined" if keys.combined else chosen)
    default = GraderConfig()
    for key, kinds in _READ_BY.items():
        is_off = key == "partial_credit" and not keys.partial_credit
        if keys.kind not in kinds and not is_off and getattr(keys, key) != getattr(default, key):
            raise ConfigError(
                f"grader.{key} is read by kind {' or '.join(kinds)} only, not by "
                f"{keys.kind!r}; take it out or change grader.kind"
            )
    if keys.reward is None and keys.kind not in ("custom", "own", "combined"):
        keys = replace(keys, reward=reward)
    if keys.partial_credit is None:
        keys = replace(keys, partial_credit=partial_credit and keys.kind == "layered")
    if keys.compat and keys.reward != "tools":
        raise ConfigError('grader.compat = "reference" needs grader.reward = "tools"')
    if keys.kind == "judge" and keys.judge is None:
        raise ConfigError('grader.kind = "judge" needs grader.judge.url and grader.judge.model')
    if keys.kind == "own" and keys.own is None:
        raise ConfigError('grader.kind = "own" needs [grader.own] with the name of a grader')
    if keys.kind == "combined":
        return _with_parts(keys, kind, reward, partial_credit)
    if keys.kind == "custom" and not keys.path:
        raise ConfigError('grader.kind = "custom" needs grader.path, a Python file')
    return keys


def _with_parts(
    keys: GraderConfig, kind: GraderKind, reward: Reward, partial_credit: bool
) -> GraderConfig:
    """The keys of several graders, each of them checked and filled up."""
    if not keys.combined:
        raise ConfigError(
            'grader.kind = "combined" needs [grader.combined.NAME], a table for each grader'
        )
    filled = {}
    for name, one in keys.combined.items():
        if one.kind == "combined":
            raise ConfigError(f"grader.combined.{name}.kind: a grader of several is one of others")
        plain = {key: getattr(one, key) for key in GraderKeys.__struct_fields__}
        try:
            found = grader_config(
                GraderConfig(**plain), kind=kind, reward=reward, partial_credit=partial_credit
            )
        except ConfigError as error:
            problem = str(error).replace("grader.", f"grader.combined.{name}.")
            raise ConfigError(problem) from None
        taken = {key: getattr(found, key) for key in GraderKeys.__struct_fields__}
        filled[name] = replace(one, **taken)
    return replace(keys, combined=filled)


def make_grader(
    keys: GraderConfig | Mapping[str, Any] | None = None,
    *,
    kind: GraderKind = "layered",
    reward: Reward = "answer",
    partial_credit: bool = False,
) -> Grader:
    """The grader of these keys, `kind`, `reward` and `partial_credit` where they say none. One for
    each set of keys in a process, since what runs processes or holds connections is shared."""
    asked = ("grader keys", msgspec.json.encode(keys), kind, reward, partial_credit)
    config = shared(
        asked,
        lambda: grader_config(keys, kind=kind, reward=reward, partial_credit=partial_credit),
    )
    if config.compat:
        module, _, name = RELEASED_REWARD.partition(":")
        return cast(Grader, getattr(importlib.import_module(module), name)())
    key = ("grader", msgspec.json.encode(config))
    if config.kind == "custom":
        return shared(key, lambda: _custom(config))
    if config.own is not None:
        return shared(key, config.own.build)
    if config.combined:
        return shared(key, lambda: _combined(config))
    matcher = shared(key, lambda: MATCHERS[config.kind](config))
    if config.reward == "tools":
        return ToolReward(matcher)
    return AnswerReward(matcher)


def _combined(config: GraderConfig) -> Grader:
    fields = GraderKeys.__struct_fields__
    return Combined(
        {
            name: Weighted(
                make_grader(GraderConfig(**{key: getattr(one, key) for key in fields})),
                one.weight,
                one.decides,
            )
            for name, one in config.combined.items()
        }
    )


def _layered(config: GraderConfig) -> Matcher:
    return Layered(
        math=config.math, partial_credit=bool(config.partial_credit), ordered=config.ordered
    )


def _judge(config: GraderConfig) -> Matcher:
    from agentenv.envs.grading.judge import Judge  # brings an HTTP client, which only a judge needs

    assert config.judge is not None, "the configuration was checked"
    first = Layered(math=config.math, ordered=True)  # of another order the judge decides
    return Judge(config.judge, first=first, ordered=config.ordered)


def _custom(config: GraderConfig) -> Grader:
    return CustomGrader(
        config.path,
        config.name,
        timeout_s=config.timeout_s,
        num_workers=config.num_workers,
        success_at=config.success_at,
        solution_str=config.solution_str,
    )


# what compares answers, by the kind; "custom" and "own" are graders, not matchers
MATCHERS: Mapping[str | None, Callable[[GraderConfig], Matcher]] = {
    "exact": lambda config: Exact(),
    "f1": lambda config: TokenF1(),
    "layered": _layered,
    "judge": _judge,
}


async def check_grader(grader: Grader, tasks: Sequence[Task]) -> list[Grade]:
    """Grade the golds of the first three rows, so that a broken grader is refused at the start.

    Raises ConfigError: the grader cannot start, fails on a row, or gives no finite reward.
    """
    await at_start(start_grader(grader), f"the start of the grader {type(grader).__name__}")
    grades = []
    for task in tasks[:NUM_CHECKED_ROWS]:
        gold = task.answers[0] if task.answers else ""
        text = rf"<think>.</think><answer>\boxed{{{gold}}}</answer>"
        try:
            grade = await graded(grader, task, [Message("assistant", text)], {})
        except (GraderError, CrashError) as error:
            is_bug = isinstance(error, CrashError)
            raise ConfigError(
                f"the grader fails on row {task.id}, given its own gold {gold!r}: {error}"
                f"{EXPECTED if is_bug else ''}"
            ) from error
        if grade.parts.get(STOPPED):
            raise ConfigError(
                f"the grader fails on row {task.id}, given its own gold {gold!r}: {grade.reason}"
            )
        if not math.isfinite(grade.reward):
            raise ConfigError(
                f"the grader gives row {task.id} the reward {grade.reward}; expected a number"
            )
        grades.append(grade)
    return grades
