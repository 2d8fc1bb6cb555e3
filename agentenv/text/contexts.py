"""Whole contexts as tokens: prompts with turns that were not sampled there."""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from typing import Any, cast

from msgspec import to_builtins
from msgspec.structs import replace

from agentenv.base.errors import ConfigError
from agentenv.base.types import MALFORMED_CALL, Message, ToolCall
from agentenv.base.untrusted import convert
from agentenv.text.call_syntax import PARSERS
from agentenv.text.control_tokens import broken
from agentenv.text.renderer import ContextRenderer, ToolSchemas
from agentenv.text.tags import TAGS


def for_programs(renderer: Any, where: str) -> ContextRenderer:
    """The renderer, if it can write turns that were not sampled. Raises ConfigError."""
    if getattr(renderer, "turn", None) is None:  # one of messages, or a BridgedRenderer
        raise ConfigError(
            f"{where}: turns of programs need an engine of tokens and renderer.name = 'native' or "
            "'tags', which write turns that were not sampled"
        )
    return cast(ContextRenderer, renderer)


def context_ids(
    renderer: ContextRenderer,
    context: Sequence[Message | Sequence[int]],
    tools: ToolSchemas,
    max_tokens: int,
    before: Sequence[int] = (),
) -> array[int]:
    """Token ids of a whole context, up to the beginning of the next turn: its prompt, then turns of
    the policy and their answers. Ids instead of a message are a turn as it was sampled. `before`
    are ids that the context extends, up to the end of a turn. Messages forge no control token: a
    page may have written parts of them.

    Raises ConfigError, CrashError or DataError for messages that cannot be rendered.
    """
    ids = array("i", before)
    rest = [_unforged(renderer, one, tools) if isinstance(one, Message) else one for one in context]
    if not before:
        number = next((n for n, one in enumerate(rest) if _is_turn(one)), len(rest))
        prompt = [one for one in rest[:number] if isinstance(one, Message)]
        ids, rest = array("i", renderer.prompt(prompt, tools)), rest[number:]
    results: list[Message] = []
    for one in (*rest, None):
        if isinstance(one, Message) and one.role != "assistant":
            results.append(one)
            continue
        if results:
            results = [*renderer.placed(results, after_turn=True)]
            ids += array("i", renderer.observation(results, tools, max_tokens, ids[-1:]))
            results = []
        if one is not None:
            ids.extend(renderer.turn(one, tools) if isinstance(one, Message) else one)
    return ids


def num_common(one: Sequence[object], other: Sequence[object]) -> int:
    """The length of the common prefix."""
    size = min(len(one), len(other))
    if one[:size] == other[:size]:
        return size
    return next(place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)


def _unforged(renderer: ContextRenderer, message: Message, tools: ToolSchemas) -> Message:
    """The message with its control tokens broken, except for tags that its role writes: a system
    message may teach them, a turn has its thoughts and calls."""
    own: tuple[str, ...] = (*TAGS, *renderer.own_tags, *(str(tool["name"]) for tool in tools))
    text, control = message.content, renderer.control
    if message.role == "assistant" and renderer.style != "tags":
        found = PARSERS[renderer.style](text, tools)
        own = own if found and all(call.name != MALFORMED_CALL for call in found) else TAGS[:1]
    if control is not None and message.role in ("system", "assistant"):
        kept = rf"(?!</?(?:{'|'.join(map(re.escape, own))})>)"
        control = re.compile(kept + control.pattern, control.flags)
    calls = convert(renderer.shown(to_builtins(message.tool_calls)), tuple[ToolCall, ...])
    return replace(message, content=broken(control, text, counted=True), tool_calls=calls)


def _is_turn(one: Message | Sequence[int]) -> bool:
    return not isinstance(one, Message) or one.role == "assistant"
