"""What `agentenv synthesize` reads: an evaluation's keys, and what becomes of trajectories."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from agentenv.config import Tree, build_config, read_toml
from agentenv.errors import ConfigError
from agentenv.native import NativeConfig
from agentenv.pipelines.config.evaluation import EvaluateConfig, QuestionSet, resolve_sets
from agentenv.renderer import PromptConfig

HINT_TEXTS = read_toml(Path(__file__).with_name("hints.toml"))  # what is not given in [hints]

Way = Literal["direct", "tools", "hints"]
WAYS: tuple[Way, ...] = ("direct", "tools", "hints")
WITH_TOOLS: tuple[Way, ...] = ("tools", "hints")
OWN_KEYS = ("direct", "hints", "filter", "exclude", "skip_easy")

_Count = Annotated[int, Meta(ge=1)]


class DirectConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Language-only answers: the same environment, whose policy hears of no tools."""

    prompt: Annotated[
        PromptConfig, Meta(description="prompt of language-only answers, in place of [prompt]")
    ] = PromptConfig(template="no_tools", override_row=True)
    num_samples: Annotated[
        _Count | None, Meta(description="answers a question; none: num_samples of its set")
    ] = None


class HintsConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Hints into language-only chains of questions that were not answered directly; what follows
    a hint is sampled with tools."""

    place: Annotated[
        Literal["either", "uncertain", "answer"],
        Meta(
            description="uncertain: in place of the first sentence of a thought that has one of "
            "`phrases`; answer: behind the answer; either: the first if there is such a sentence"
        ),
    ] = "either"
    phrases: Annotated[
        list[str], Meta(description="words of doubt, in any case, as whole words")
    ] = field(default_factory=lambda: list(HINT_TEXTS["phrases"]))
    verification: Annotated[
        list[str], Meta(description="sentences put at a doubt; one is drawn by the seed")
    ] = field(default_factory=lambda: list(HINT_TEXTS["verification"]))
    reflection: Annotated[
        list[str], Meta(description="sentences put behind an answer; one is drawn by the seed")
    ] = field(default_factory=lambda: list(HINT_TEXTS["reflection"]))
    max_per_question: Annotated[
        int, Meta(ge=1, description="chains of a question that get a hint, the first ones")
    ] = 3

    def __post_init__(self) -> None:
        for name, unread in (("verification", "answer"), ("reflection", "uncertain")):
            if self.place != unread and not all(map(str.strip, getattr(self, name) or [""])):
                raise ConfigError(f"hints.{name}: expected sentences, at least one, none empty")
        if self.place != "answer" and not all(map(str.strip, self.phrases or [""])):
            raise ConfigError("hints.phrases: expected phrases, at least one, none empty")


class FilterConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which trajectories are fit to learn from. Changing it samples nothing anew."""

    max_tool_calls: Annotated[
        int, Meta(ge=1, description="a trajectory with more tool calls is dropped")
    ] = 5
    drop_failed_calls: Annotated[
        bool, Meta(description="drop a trajectory with a call that the tool answered by an error")
    ] = False
    require_box: Annotated[
        bool,
        Meta(description="the answer has a balanced \\boxed{}, as the published reward asks"),
    ] = True
    max_per_question: Annotated[
        int, Meta(ge=1, description="trajectories of a question that go to the SFT set")
    ] = 1


class SynthesisConfig(EvaluateConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Questions, policy, environment and limits are keys of an evaluation."""

    direct: DirectConfig = DirectConfig()
    hints: Annotated[
        HintsConfig | None, Meta(description="the second way; none: tool prompting alone")
    ] = None
    filter: FilterConfig = FilterConfig()
    exclude: Annotated[
        list[str],
        Meta(description="files of questions that must not be in the data, such as test sets"),
    ] = field(default_factory=list)
    skip_easy: Annotated[
        bool,
        Meta(description="what was answered directly is not asked with tools, which saves half"),
    ] = False

    def __post_init__(self) -> None:
        if self.assist is not None:
            raise ConfigError(
                "assist: a trajectory with helpers is none of the policy alone; take the table out"
            )
        if isinstance(self.renderer, NativeConfig):
            raise ConfigError(
                "renderer.name = 'native': the data is in the tag protocol; expected 'tags'"
            )


class SynthesisPlan(Struct, frozen=True):
    """A resolved synthesis. `sets` are those of the user by name; `evaluation` asks each of them
    once a way, as `set_name` calls it."""

    config: SynthesisConfig
    sets: dict[str, QuestionSet]
    evaluation: EvaluateConfig

    @property
    def ways(self) -> tuple[Way, ...]:
        return WAYS if self.config.hints is not None else WAYS[:2]


def set_name(name: str, way: Way) -> str:
    """What a set of questions is called where it is asked in one of the ways."""
    return f"{name}.{way}"


def make_plan(raw: Tree, source: str) -> SynthesisPlan:
    """The resolved synthesis. Raises ConfigError."""
    config = build_config(SynthesisConfig, raw, source)
    rest = {key: value for key, value in raw.items() if key not in OWN_KEYS}
    base = resolve_sets(rest, source)
    sets: dict[str, QuestionSet] = {}
    for name, one in base.sets.items():
        sets[set_name(name, "direct")] = replace(
            one,
            prompt=config.direct.prompt,
            num_samples=config.direct.num_samples or one.num_samples,
        )
        sets[set_name(name, "tools")] = one
        if config.hints is not None:
            sets[set_name(name, "hints")] = replace(one, num_samples=config.hints.max_per_question)
    return SynthesisPlan(config, base.sets, replace(base, sets=sets))
