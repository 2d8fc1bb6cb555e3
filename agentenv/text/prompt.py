"""Loads the system prompt of an episode: a preset, a file, or the one that rows share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from msgspec import Struct, field

from agentenv.base.config import ESSENTIAL, about
from agentenv.base.errors import ConfigError, DataError, reported_as
from agentenv.base.registry import meant
from agentenv.base.types import Message
from agentenv.contract.env import tally
from agentenv.contract.instruction import Instruction
from agentenv.data.data_files import SUFFIXES
from agentenv.data.system_prompts import shared_system_prompt
from agentenv.text.call_syntax import without_thoughts

WITHOUT_TOOLS = ("no_tools", "direct")  # presets that request an answer without calls
WITH_TAGS = ("search+python", "search", "python")  # presets that teach the tags of tools


class PromptConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The prompt of an episode."""

    template: Annotated[
        str,
        about(
            "system prompt: 'search+python', 'search', 'python', 'no_tools', 'chinese', 'direct', "
            "'native' (calls in the chat template's form), or a text file; a file that contains "
            "{question} is the whole user message; a file of rows, such as data/train.parquet: the "
            "system prompt that all its rows share; empty: the environment's",
            ESSENTIAL,
        ),
    ] = ""
    override_row: Annotated[
        bool, about("the template overrides the system prompt of a dataset row")
    ] = False
    apply_chat_template: Annotated[
        bool, about("false: for base models, the messages as plain text separated by blank lines")
    ] = True
    chat_template_kwargs: Annotated[
        dict[str, Any], about("passed to the chat template, such as {enable_thinking = false}")
    ] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.chat_template_kwargs and not self.apply_chat_template:
            raise ConfigError(
                "prompt.chat_template_kwargs: unused with prompt.apply_chat_template = false; "
                "remove one of the two"
            )


def load_instruction(config: PromptConfig, resolve: Callable[[str], Path] = Path) -> Instruction:
    """The text of a preset or of a file. Raises ConfigError if there is neither, and for rows with
    different system prompts."""
    if not config.template:
        if config.override_row:
            raise ConfigError("prompt.override_row: needs a prompt.template that overrides")
        return Instruction()
    if config.template in presets():
        return Instruction(preset(config.template), config.override_row)
    path = resolve(config.template)
    if is_rows(config.template):
        if not path.exists():
            raise ConfigError(
                f"prompt.template: no such file: {path}; expected the rows that the policy was "
                f"trained on, or a preset: {', '.join(presets())}"
            )
        with reported_as(ConfigError, "prompt.template", DataError):
            return Instruction(shared_system_prompt(path), config.override_row)
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        hint = meant(config.template, presets(), f"presets: {', '.join(presets())}")
        raise ConfigError(
            f"prompt.template: {config.template!r} is neither a preset nor a readable text "
            f"file ({error}); {hint}"
        ) from error
    if not text:
        raise ConfigError(f"prompt.template: the file {path} is empty")
    return Instruction(text, config.override_row)


def is_rows(template: str) -> bool:
    """Whether a template is a file of rows, which have a system prompt."""
    return template not in presets() and Path(template).suffix.lower() in SUFFIXES


@cache
def presets() -> tuple[str, ...]:
    """Names of the included system prompts."""
    folder = resources.files("agentenv") / "prompts"
    return tuple(sorted(file.name.removesuffix(".txt") for file in folder.iterdir()))


@cache
def preset(name: str) -> str:
    """The text of one of `presets()`."""
    file = resources.files("agentenv") / "prompts" / f"{name}.txt"
    return file.read_text(encoding="utf-8").strip()


def for_native_calls(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]
) -> Sequence[Message]:
    """The messages of a prompt for calls in the form of the chat template: the preset `native`
    replaces a preset that teaches the tags of tools. Another prompt that does is reported once."""
    text = "\n".join(message.content for message in messages)
    taught = tagged_tool(text, tools)
    if not taught:
        return messages
    tagged = {preset(name) for name in WITH_TAGS}
    found = [
        Message(one.role, preset("native")) if one.content in tagged else one for one in messages
    ]
    is_replaced = found != [*messages]
    end = "the preset 'native' replaces it" if is_replaced else "set prompt.template = 'native'"
    problem = f"calls are not tags, but the prompt teaches some such as {taught}: {end}"
    counted = "num_prompts_replaced" if is_replaced else "num_prompts_with_tags"
    tally(f"native/{counted}").add(1, problem)
    return found


def count_tagged_call(message: Message, tools: Sequence[Mapping[str, Any]]) -> Message:
    """Counts a turn that has the tags of a tool but no call in the form of the chat template.
    Returns the turn."""
    tagged = not message.tool_calls and tagged_tool(without_thoughts(message.content), tools)
    if tagged:
        problem = f"a turn has {tagged}, which is a call only with renderer.name = 'tags'"
        tally("native/num_turns_with_tags").add(1, problem)
    return message


def tagged_tool(text: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The tags of the first tool whose tags the text has; empty without one."""
    pairs = [(f"<{tool['name']}>", f"</{tool['name']}>") for tool in tools]
    return next((f"{a}..{b}" for a, b in pairs if a in text and b in text), "")
