"""What `agentenv evaluate` reads: one or several named sets of questions, and for each of them
where it is asked differently."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct, field

from agentenv.config import ROWS, Tree, build_config
from agentenv.engine import EngineConfig
from agentenv.engines.embedded import EmbeddedConfig
from agentenv.errors import ConfigError
from agentenv.native import NativeConfig
from agentenv.pipelines.config.benchmarks import benchmark
from agentenv.pipelines.config.rl import (
    ENGINES,
    TABLES,
    EnvConfig,
    GraderTable,
    PythonTable,
    Sampling,
    SearchTable,
)
from agentenv.reference.helpers import AssistConfig
from agentenv.registry import Registry
from agentenv.renderer import PromptConfig, TagsConfig
from agentenv.rows import RowsConfig
from agentenv.server_config import RoleConfig
from agentenv.types import Limits

# an evaluation may ask any endpoint, too
ASKED_ENGINES = Registry(
    "engine",
    ENGINES.group,
    EngineConfig,
    {**ENGINES.own, "openai": "agentenv.engines.openai:OpenAIConfig"},
)

if TYPE_CHECKING:
    AskedEngine = EngineConfig
else:
    AskedEngine = ASKED_ENGINES.key

# of a set: keys that it does not give are those of the evaluation
OWN_KEYS = ("env", *TABLES, "prompt", "limits", "sampling", "num_samples")
_AsAbove = Meta(description="keys in which this set differs from the evaluation's table")


class QuestionSet(RowsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One named set of questions."""

    path: Annotated[
        str | list[str],
        Meta(description="file, folder or pattern of questions, or a list of them", extra=ROWS),
    ] = ""
    benchmark: Annotated[
        str,
        Meta(
            description="name of a known benchmark, or FILE.toml:NAME, whose schema, environment, "
            "prompt and size are then known; empty: rows as in training"
        ),
    ] = ""
    max_tasks: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="first n questions; 0: all; none: all, or the benchmark's usual number"),
    ] = None
    num_samples: Annotated[
        int, Meta(ge=1, description="trajectories a question, if not that of the evaluation")
    ] = 1
    env: Annotated[EnvConfig | None, _AsAbove] = None
    python: PythonTable = None
    search: SearchTable = None
    grader: GraderTable = None
    prompt: Annotated[PromptConfig, _AsAbove] = PromptConfig()
    limits: Annotated[Limits, _AsAbove] = Limits()
    sampling: Annotated[Sampling, _AsAbove] = Sampling()


class EvaluateConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an evaluation reads; of a run, everything comes from the run."""

    env: Annotated[
        EnvConfig | None, Meta(description="the environment; none: each set has its own")
    ] = None
    python: PythonTable = None
    search: SearchTable = None
    grader: GraderTable = None
    sets: Annotated[
        dict[str, QuestionSet], Meta(description="the questions, sets by name, [sets.NAME]")
    ] = field(default_factory=dict)
    data: Annotated[
        str | list[str],
        Meta(
            description="file, folder or pattern of questions, or a list of them, in place of "
            "[sets]: one set that has the file's name",
            extra=ROWS,
        ),
    ] = ""
    prompt: PromptConfig = PromptConfig()
    renderer: TagsConfig | NativeConfig = TagsConfig()
    limits: Limits = Limits()
    sampling: Sampling = Sampling()
    engine: AskedEngine = EmbeddedConfig()
    assist: Annotated[
        AssistConfig | None,
        Meta(description="Tool-Star's inference-time tools, for all sets; none: plain rollouts"),
    ] = None
    roles: Annotated[
        dict[str, RoleConfig],
        Meta(description="models beside the policy by name, [roles.judge]"),
    ] = field(default_factory=dict)
    num_samples: Annotated[int, Meta(ge=1, description="trajectories a question")] = 1
    concurrency: Annotated[int, Meta(ge=1, description="trajectories in flight")] = 256
    seed: Annotated[int, Meta(ge=0, description="seed of sampling")] = 0


def resolve_sets(raw: Tree, source: str) -> EvaluateConfig:
    """The configuration, whose sets have all their tables: keys that a set does not give are those
    of the evaluation. Raises ConfigError."""
    data, sets = raw.get("data"), raw.get("sets") or {}
    if not isinstance(sets, dict) or not all(isinstance(one, dict) for one in sets.values()):
        build_config(EvaluateConfig, raw, source)  # which says what is wrong
    if data and sets:
        raise ConfigError(f"{source}: data and [sets]: give one of them")
    if data:
        first = data[0] if isinstance(data, list) else data
        sets = {Path(str(first)).stem: {"path": data}}
    if not sets:
        others = {key: value for key, value in raw.items() if key not in ("data", "sets")}
        build_config(EvaluateConfig, others, source)  # a misspelt key first: it may be their table
        raise ConfigError(f"{source}: no questions; give data=FILE or [sets.NAME] with a path")
    raw = {key: value for key, value in raw.items() if key != "data"}
    raw["sets"] = {name: _own_keys(raw, one) for name, one in sets.items()}
    config = build_config(EvaluateConfig, raw, source)
    for name, one in config.sets.items():
        if not one.path and not one.benchmark:
            raise ConfigError(f"{source}: sets.{name}.path: no file of questions is given")
        if one.env is None:
            raise ConfigError(f"{source}: sets.{name}: no environment; give --env ID or env.id")
    return config


def _own_keys(raw: Tree, one: Tree) -> Tree:
    """A set's keys, filled up from those of the evaluation, those of its benchmark below all."""
    tables = {name: raw[name] for name in OWN_KEYS if raw.get(name) is not None}
    above = merged(tables, one, by_name=True)
    if not one.get("benchmark"):
        return above
    return merged(benchmark(str(one["benchmark"])).usual_keys(above), above)


def merged(below: Mapping[str, Any], above: Mapping[str, Any], *, by_name: bool = False) -> Tree:
    """Both trees in one; where both have a value, that of `above`. With `by_name`, a part with
    another name, such as another search backend, has none of the keys of the one below."""
    tree = dict(below)
    for key, value in above.items():
        old = tree.get(key)
        if not isinstance(old, Mapping) or not isinstance(value, Mapping):
            tree[key] = value
        elif by_name and value.get("name", old.get("name")) != old.get("name"):
            tree[key] = dict(value)
        else:
            tree[key] = merged(old, value, by_name=by_name)
    return tree
