"""The keys of a grader, [grader]."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast, get_type_hints

from msgspec import NODEFAULT, Struct, defstruct, field
from msgspec.structs import asdict, replace

from agentenv.base.config import ESSENTIAL, PATH, about, build_config
from agentenv.base.errors import ConfigError, reported_as
from agentenv.base.registry import Registry
from agentenv.contract.env import Grader
from agentenv.contract.server_config import ChatModelConfig

SolutionStr = Literal["response", "sequence"]
GraderKind = Literal["exact", "f1", "layered", "judge", "custom", "own", "combined"]
Reward = Literal["answer", "tools"]


class JudgeConfig(ChatModelConfig, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Server and requests of the judge."""

    url: Annotated[
        str, about("base URL of an OpenAI-compatible server, e.g. http://host:8000/v1", ESSENTIAL)
    ]
    model: Annotated[str, about("name of the model at that server", ESSENTIAL)]
    when: Annotated[
        Literal["rules_wrong", "always"],
        about(
            "asked when the rules do not accept the answer; or always, which changes "
            "no grade but measures the agreement of the two"
        ),
    ] = "rules_wrong"
    timeout_s: Annotated[float, about("deadline of one request, seconds", gt=0)] = 60.0
    max_tokens: Annotated[int, about("of the reply; raise it for a reasoning model", ge=1)] = 16
    compat: Annotated[
        Literal["", "reference"],
        about(
            "'reference': as in the released evaluation: the prompt of prompt_file, "
            "the server's default sampling, its verdict rule; max_tokens does not count"
        ),
    ] = ""
    prompt_file: Annotated[
        str,
        about(
            "compat: file with the prompt, as text or in a Python file such as "
            "evaluation/src/llm_evaluator_sds.py of ARPO's repository",
            PATH,
        ),
    ] = ""
    cache: Annotated[
        str, about('SQLite file of verdicts shared by processes; "": in memory only')
    ] = ""

    def __post_init__(self) -> None:
        if bool(self.compat) != bool(self.prompt_file):
            raise ConfigError(
                'grader.judge.compat = "reference" and grader.judge.prompt_file belong together: '
                "the released prompt comes from your copy of the repository"
            )


class GraderPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of the keys of a grader from elsewhere, [grader.own]."""

    def build(self) -> Grader:
        """The grader; one for each set of keys in a process."""
        raise NotImplementedError


def _keys_of(found: Any) -> type[GraderPart] | None:
    """A class with `grade`, whose keys are the arguments of its constructor."""
    if not (isinstance(found, type) and callable(getattr(found, "grade", None))):
        return None
    fields: list[tuple[str, Any, Any]] = []
    who = f"the constructor arguments of {found.__name__} cannot be keys"
    remedy = "; derive it from agentenv.envs.grading.keys.GraderPart"
    with reported_as(ConfigError, who, TypeError, ValueError, NameError, end=remedy):
        types = get_type_hints(found.__init__)  # type: ignore[misc]
        for one in inspect.signature(found).parameters.values():
            if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                value = NODEFAULT if one.default is one.empty else one.default
                fields.append((one.name, types.get(one.name, Any), field(default=value)))

    def build(keys: GraderPart) -> Grader:
        return cast(Grader, found(**asdict(keys)))

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


GRADERS = Registry(
    "grader",
    "agentenv.graders",
    GraderPart,
    {"reasoning_gym": "agentenv.envs.bridges.reasoning:ReasoningGymGrader"},
    _keys_of,
)

if TYPE_CHECKING:
    AnyGrader = GraderPart
else:
    AnyGrader = GRADERS.key


class GraderKeys(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One grader."""

    kind: Annotated[
        GraderKind | None,
        about(
            "exact match, SQuAD F1, all layers, layers then an LLM, your function, your class, "
            "several graders; none: own with [grader.own], custom with grader.path, judge with "
            "grader.judge, combined with [grader.combined.NAME], else that of the environment",
            ESSENTIAL,
        ),
    ] = None
    reward: Annotated[
        Reward | None,
        about(
            "the answer's score, or ARPO's rule: format -1, score, +0.1 for tools; "
            "none: the environment's; of combined: the parts' default",
            ESSENTIAL,
        ),
    ] = None
    compat: Annotated[
        Literal["", "reference"],
        about("with reward = tools: 'reference' is the released rule, F1 for all"),
    ] = ""
    math: Annotated[
        bool, about("layered, judge: compare expressions with math-verify (extra 'math')")
    ] = True
    partial_credit: Annotated[
        bool | None,
        about(
            "layered: a wrong answer in words earns its token F1 but stays wrong; "
            "none: the environment's default, true for those with tools"
        ),
    ] = None
    ordered: Annotated[
        bool,
        about(
            "layered, judge: the items of a list must be in the gold answer's order; "
            "otherwise a judge decides about a different order, and layered alone accepts it"
        ),
    ] = False
    judge: Annotated[JudgeConfig | None, about("judge: the server and its model")] = None
    own: Annotated[
        AnyGrader | None,
        about(
            "own: a custom grader and its keys; name is 'module:Class', or an entry "
            "point of an installed package in agentenv.graders"
        ),
    ] = None
    path: Annotated[str, about("custom: the Python file", PATH)] = ""
    name: Annotated[str, about("custom: the function in it")] = "compute_score"
    timeout_s: Annotated[
        float, about("custom: limit of one call: seconds of CPU time, and of sleep", gt=0)
    ] = 10.0
    success_at: Annotated[
        float, about("custom: the score from which an answer counts as correct")
    ] = 1.0
    solution_str: Annotated[
        SolutionStr,
        about(
            "custom, in verl's form: pass the policy's text alone, or also the chat "
            "prompt, which functions of Search-R1 and TinyZero expect"
        ),
    ] = "response"


class WeightedConfig(GraderKeys, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of several graders; the environment supplies the keys that it omits."""

    weight: Annotated[float, about("weight of its reward; may be negative")] = 1.0
    decides: Annotated[
        bool,
        about(
            "its verdict decides whether an answer is correct; several must all agree; "
            "without any: the first grader's"
        ),
    ] = False


class GraderConfig(GraderKeys, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Grading of answers."""

    combined: Annotated[
        dict[str, WeightedConfig],
        about("combined: graders by name, [grader.combined.NAME], for a weighted sum of rewards"),
    ] = field(default_factory=dict)


READ_BY = {
    "combined": ("combined",), "compat": ("f1", "layered"),
    "reward": ("exact", "f1", "layered", "judge", "combined"), "math": ("layered", "judge"),
    "ordered": ("layered", "judge"), "partial_credit": ("layered",), "judge": ("judge",),
    "own": ("own",), "path": ("custom",), "name": ("custom",), "timeout_s": ("custom",),
    "success_at": ("custom",), "solution_str": ("custom",),
}  # fmt: skip
_NEEDED: dict[str, tuple[str, str]] = {
    "combined": ("combined", "[grader.combined.NAME], a table for each grader"),
    "own": ("own", "[grader.own] with the name of a grader"),
    "custom": ("path", "grader.path, a Python file"),
    "judge": ("judge", "grader.judge.url and grader.judge.model"),
}
Keys = TypeVar("Keys", bound=GraderKeys)


def kind_of(table: Mapping[str, Any]) -> GraderKind | None:
    """The kind of a grader's keys, named or implied by the key that it needs; None: that of the
    environment."""
    implied = (kind for kind, (key, _) in _NEEDED.items() if table.get(key))
    return cast(GraderKind | None, table.get("kind") or next(implied, None))


def fit(table: dict[str, Any], named: Collection[str]) -> None:
    """Remove the values that the kind of a grader's table refuses, except those of the `named` keys
    such as "judge.url" or "combined.NAME.kind"; of these, one that a kind needs chooses it."""
    tops = {one.partition(".")[0] for one in named}
    kind = table.get("kind") or kind_of({key: table.get(key) for key in tops}) or kind_of(table)
    for key, kinds in READ_BY.items():
        is_used = kind is None or kind in kinds or key in tops
        if not is_used and table.get(key) != getattr(GraderConfig(), key):
            table.pop(key, None)
    parts = table.get("combined")
    for name, part in parts.items() if isinstance(parts, dict) else ():
        if isinstance(part, dict):
            start = f"combined.{name}."
            fit(part, {one.removeprefix(start) for one in named if one.startswith(start)})


def grader_config(
    keys: GraderConfig | Mapping[str, Any] | None,
    *,
    kind: GraderKind = "layered",
    reward: Reward = "answer",
    partial_credit: bool = False,
) -> GraderConfig:
    """The keys as a checked config, with the environment's `kind`, `reward` and `partial_credit`
    for omitted ones; a ConfigError names a key that is wrong or not read."""
    if not isinstance(keys, GraderConfig):
        keys = build_config(GraderConfig, dict(keys or {}), "grader")
    keys = _filled(keys, "grader", kind, reward, partial_credit)
    parts = {}
    for name, one in keys.combined.items():
        where = f"grader.combined.{name}"
        if one.kind == "combined":
            raise ConfigError(f"{where}.kind: a combined grader cannot be part of another one")
        parts[name] = _filled(one, where, kind, keys.reward or reward, partial_credit)
    return replace(keys, combined=parts)


def _filled(keys: Keys, where: str, kind: GraderKind, reward: Reward, partial_credit: bool) -> Keys:
    """The keys of one grader, the table `where`, checked and filled up."""
    if keys.kind is None:
        keys = replace(keys, kind=kind_of(asdict(keys)) or kind)
    default = GraderConfig()
    for key, kinds in READ_BY.items():
        value, usual = getattr(keys, key, None) or None, getattr(default, key) or None
        if keys.kind not in kinds and value != usual:
            raise ConfigError(
                f"{where}.{key} is only used by kind {' or '.join(kinds)}, not by {keys.kind!r}; "
                f"remove it or change {where}.kind"
            )
    if keys.reward is None and keys.kind not in ("custom", "own", "combined"):
        keys = replace(keys, reward=reward)
    if keys.partial_credit is None:
        keys = replace(keys, partial_credit=partial_credit and keys.kind == "layered")
    if keys.compat and keys.reward != "tools":
        raise ConfigError(f'{where}.compat = "reference" needs {where}.reward = "tools"')
    needed, what = _NEEDED.get(keys.kind or "", ("kind", ""))
    if not getattr(keys, needed):
        what = what.replace("grader.", f"{where}.")
        raise ConfigError(f'{where}.kind = "{keys.kind}" needs {what}')
    return keys
