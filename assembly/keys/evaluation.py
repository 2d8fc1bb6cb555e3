"""The keys of `agentenv evaluate`: named sets of questions with their own settings; and those of
`agentenv synthesize`, which turns evaluated trajectories into training data.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from agentenv.assembly.keys import rl
from agentenv.assembly.keys.benchmarks import benchmark
from agentenv.base.config import ROWS, Tree, about, build_config, read_toml
from agentenv.base.errors import ConfigError
from agentenv.base.registry import Registry
from agentenv.base.types import Limits
from agentenv.contract.engine import EngineConfig
from agentenv.contract.server_config import ClientKeyEnv, ListenHost, ListenPort, RoleConfig
from agentenv.data.rows import RowsConfig
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.reference.helpers import AssistConfig
from agentenv.text.bridged import AnyRenderer
from agentenv.text.native import NativeConfig
from agentenv.text.prompt import PromptConfig
from agentenv.text.renderer import TagsConfig

# engines for evaluation: also any endpoint
EVALUATION_ENGINES = Registry(
    "engine",
    rl.ENGINES.group,
    EngineConfig,
    {**rl.ENGINES.own, "openai": "agentenv.engines.openai:OpenAIConfig"},
)

if TYPE_CHECKING:
    EvaluationEngine = EngineConfig
else:
    EvaluationEngine = EVALUATION_ENGINES.key

# tables that a set inherits from the evaluation
OWN_KEYS = ("env", *rl.TABLES, "prompt", "limits", "sampling", "num_samples")
_AsAbove = about("keys that override the evaluation's table for this set")


class QuestionSet(RowsConfig, frozen=True, kw_only=True):
    """One named set of questions."""

    path: Annotated[
        str | list[str], about("file, folder or pattern of questions, or a list of them", ROWS)
    ] = ""
    benchmark: Annotated[
        str,
        about(
            "name of a known benchmark, or FILE.toml:NAME, which defines schema, "
            "environment, prompt and size; empty: rows as in training"
        ),
    ] = ""
    max_tasks: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        about("first n questions; 0: all; none: all, or the benchmark's standard number"),
    ] = None
    num_samples: Annotated[
        int, about("trajectories per question, if different from the evaluation's", ge=1)
    ] = 1
    env: Annotated[rl.EnvConfig | None, _AsAbove] = None
    python: rl.PythonTable = None
    search: rl.SearchTable = None
    grader: rl.GraderTable = None
    prompt: Annotated[PromptConfig, _AsAbove] = PromptConfig()
    limits: Annotated[Limits, _AsAbove] = Limits()
    sampling: Annotated[rl.Sampling, _AsAbove] = rl.Sampling()


class EvaluateConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of an evaluation; those of a run are the defaults for evaluating it."""

    env: Annotated[
        rl.EnvConfig | None, about("environment of all sets; none: each set has its own")
    ] = None
    python: rl.PythonTable = None
    search: rl.SearchTable = None
    grader: rl.GraderTable = None
    sets: Annotated[dict[str, QuestionSet], about("sets of questions by name, [sets.NAME]")] = {}
    data: Annotated[
        str | list[str],
        about(
            "file, folder or pattern of questions, or a list of them, instead of "
            "[sets]: one set named after the file",
            ROWS,
        ),
    ] = ""
    prompt: PromptConfig = PromptConfig()
    renderer: AnyRenderer = TagsConfig()
    limits: Limits = Limits()
    sampling: rl.Sampling = rl.Sampling()
    engine: EvaluationEngine = EmbeddedConfig()
    assist: Annotated[
        AssistConfig | None,
        about("Tool-Star's inference-time tools, for all sets; none: plain rollouts"),
    ] = None
    roles: Annotated[
        dict[str, RoleConfig], about("models in addition to the policy by name, [roles.judge]")
    ] = {}
    num_samples: Annotated[int, about("trajectories per question", ge=1)] = 1
    concurrency: Annotated[int, about("trajectories in flight", ge=1)] = 256
    seed: Annotated[int, about("seed of sampling", ge=0)] = 0


class PolicyConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of `agentenv serve SUBJECT`; for a run, all but the last come from the run."""

    prompt: Annotated[
        PromptConfig, about("prompt format; the template is ignored: clients send their own")
    ] = PromptConfig()
    renderer: TagsConfig | NativeConfig = NativeConfig()
    sampling: Annotated[rl.Sampling, about("defaults for values that a request omits")] = (
        rl.Sampling()
    )
    engine: EvaluationEngine = EmbeddedConfig()
    max_tokens: Annotated[int, about("tokens of a turn, if a request omits it", ge=1)] = 4096
    name: Annotated[str, about("name of the model; empty: that of SUBJECT")] = ""
    host: ListenHost = "127.0.0.1"
    port: ListenPort = 8000
    api_key_env: ClientKeyEnv = ""


def resolve_sets(raw: Tree, source: str) -> EvaluateConfig:
    """The configuration with complete sets: they inherit missing keys from the evaluation. Raises
    ConfigError."""
    data, sets = raw.get("data"), raw.get("sets") or {}
    if not isinstance(sets, dict) or not all(isinstance(one, dict) for one in sets.values()):
        build_config(EvaluateConfig, raw, source)  # raises with the reason
    if data:
        first = data[0] if isinstance(data, list) else data
        name = Path(str(first)).stem
        more = [*(sets.keys() - {name}), *({"path", "benchmark"} & sets.get(name, {}).keys())]
        if more:
            raise ConfigError(
                f"{source}: data and [sets]: set only one of them; with data, keys of its set, "
                f"such as sets.{name}.columns.answer, may be set"
            )
        sets = {name: {**sets.get(name, {}), "path": data}}
    if not sets:
        others = {key: value for key, value in raw.items() if key not in ("data", "sets")}
        # Report a misspelled key first: it may be the table of sets.
        build_config(EvaluateConfig, others, source)
        raise ConfigError(f"{source}: no questions; give data=FILE or [sets.NAME] with a path")
    raw = {key: value for key, value in raw.items() if key != "data"}
    raw["sets"] = {name: _own_keys(raw, one) for name, one in sets.items()}
    config = build_config(EvaluateConfig, raw, source)
    for name, one in config.sets.items():
        if not one.path and not one.benchmark:
            raise ConfigError(f"{source}: sets.{name}.path: no question file given")
        if one.env is None:
            raise ConfigError(f"{source}: sets.{name}: no environment; give --env ID or env.id")
    return config


def _own_keys(raw: Tree, one: Tree) -> Tree:
    """A set's keys, over those of the evaluation, over those of its benchmark."""
    tables = {name: raw[name] for name in OWN_KEYS if raw.get(name) is not None}
    given = merged(tables, one, by_name=True)
    if not one.get("benchmark"):
        return given
    return merged(benchmark(str(one["benchmark"])).usual_keys(given), given)


def merged(below: Mapping[str, Any], above: Mapping[str, Any], *, by_name: bool = False) -> Tree:
    """Both trees in one; values of `above` take precedence. With `by_name`, a part with another
    name, such as another search backend, inherits none of the keys below."""
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


Way = Literal["direct", "tools", "hints"]
WAYS: tuple[Way, ...] = ("direct", "tools", "hints")
SYNTHESIS_KEYS = ("direct", "hints", "filter", "exclude")
HINTS: dict[str, list[str]] = read_toml(Path(__file__).with_name("hints.toml"))


class DirectConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Language-only answers: the same environment, with a prompt that does not mention tools."""

    prompt: Annotated[
        PromptConfig, about("prompt of language-only answers, instead of [prompt]")
    ] = PromptConfig(template="no_tools", override_row=True)


class HintsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hints inserted into language-only answers to questions that were not solved directly; the
    text after a hint is sampled with tools."""

    place: Annotated[
        Literal["either", "uncertain", "answer"],
        about(
            "uncertain: replaces the first sentence of a thought that contains one of "
            "`phrases`; answer: after the answer; either: the former if such a sentence exists"
        ),
    ] = "either"
    phrases: Annotated[list[str], about("phrases of doubt, case-insensitive, as whole words")] = (
        field(default_factory=HINTS["phrases"].copy)
    )
    verification: Annotated[
        list[str], about("sentences inserted at a doubt; the seed draws one")
    ] = field(default_factory=HINTS["verification"].copy)
    reflection: Annotated[
        list[str], about("sentences inserted after an answer; the seed draws one")
    ] = field(default_factory=HINTS["reflection"].copy)
    max_per_question: Annotated[
        int, about("number of chains of a question that get a hint (the first ones)", ge=1)
    ] = 3

    def __post_init__(self) -> None:
        for name, unread in (("verification", "answer"), ("reflection", "uncertain")):
            if self.place != unread and not all(map(str.strip, getattr(self, name) or [""])):
                raise ConfigError(f"hints.{name}: expected a non-empty list of non-empty sentences")
        if self.place != "answer" and not all(map(str.strip, self.phrases or [""])):
            raise ConfigError("hints.phrases: expected a non-empty list of non-empty phrases")


class FilterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Filter of trajectories for training. A change needs no new samples."""

    max_tool_calls: Annotated[int, about("trajectories with more tool calls are dropped", ge=1)] = 5
    require_box: Annotated[
        bool, about("require a balanced \\boxed{} in the answer, as the published reward does")
    ] = True
    max_per_question: Annotated[int, about("trajectories per question for the SFT set", ge=1)] = 1


class SynthesisConfig(EvaluateConfig, frozen=True, kw_only=True):
    """The keys of a synthesis: those of an evaluation, and the following."""

    direct: DirectConfig = DirectConfig()
    hints: Annotated[
        HintsConfig | None, about("hint-based sampling; none: tool prompting alone")
    ] = None
    filter: FilterConfig = FilterConfig()
    exclude: Annotated[
        list[str], about("files of questions to exclude from the data, such as test sets")
    ] = []

    def __post_init__(self) -> None:
        if self.assist is not None:
            raise ConfigError(
                "assist: a trajectory with helpers is not the policy's alone; remove the table"
            )
        if not isinstance(self.renderer, TagsConfig):
            raise ConfigError("renderer.name: the data is in the tag protocol; expected 'tags'")


class SynthesisPlan(Struct, frozen=True):
    """A resolved synthesis. `sets`: the user's sets by name. `evaluation`: has a set for each of
    them and each way, named by `set_name`."""

    config: SynthesisConfig
    sets: dict[str, QuestionSet]
    evaluation: EvaluateConfig

    @property
    def ways(self) -> tuple[Way, ...]:
        return WAYS if self.config.hints is not None else WAYS[:2]


def set_name(name: str, way: Way) -> str:
    """The name of the evaluation's set for a user's set and one of the ways."""
    return f"{name}.{way}"


def make_plan(raw: Tree, source: str) -> SynthesisPlan:
    """The resolved synthesis. Raises ConfigError."""
    config = build_config(SynthesisConfig, raw, source)
    rest = {key: value for key, value in raw.items() if key not in SYNTHESIS_KEYS}
    base = resolve_sets(rest, source)
    sets: dict[str, QuestionSet] = {}
    for name, one in base.sets.items():
        sets[set_name(name, "direct")] = replace(one, prompt=config.direct.prompt)
        sets[set_name(name, "tools")] = one
        if config.hints is not None:
            sets[set_name(name, "hints")] = replace(one, num_samples=config.hints.max_per_question)
    return SynthesisPlan(config, base.sets, replace(base, sets=sets))
