"""A turn of the policy as a client of a chat API receives it: thoughts, text and calls.

A call is delivered if the client offered its tool and it can be read. Any other remains in the
text, where the client, or the policy in its next turn, can read it. The thoughts end before the
first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from agentenv.base.types import MALFORMED_CALL, Message, ToolCall
from agentenv.text.call_syntax import FINDERS, MESSAGE, MESSAGED, FoundCalls, split_thoughts
from agentenv.text.tags import call_start

# why a call remains in the text
Kept = Literal["malformed", "not_offered", "no_tools", "second"]


class Spoken(NamedTuple):
    """The parts of a turn, and the reasons for which calls of it remain in its text."""

    thoughts: str
    text: str
    calls: tuple[ToolCall, ...] = ()
    kept: tuple[Kept, ...] = ()


def spoken(
    action: Message,
    style: str,
    tools: Sequence[dict[str, Any]],
    stop: str | None = None,
    *,
    raw: bool = False,
    single: bool = False,
) -> Spoken:
    """The parts of an action; `style` is that of its renderer, `stop` a stop string of the client
    that ended it. With `raw` every call is delivered, malformed ones included; if `single`, only
    one is."""
    text = action.content.removesuffix(stop or "")
    found = _found(action, text, style, tools) if action.tool_calls else ()
    names = {str(tool["name"]) for tool in tools}
    place = found[0].start if found else len(text)
    has_messages = style in MESSAGED and MESSAGE in text
    if has_messages:
        (thoughts, part), place = split_thoughts(text, style, ()), len(text)
    else:
        thoughts, part = split_thoughts(text[:place], "" if style in MESSAGED else style, ())
    parts: list[str] = []
    calls: list[ToolCall] = []
    kept: list[Kept] = []
    for one in found:
        reasons = [] if raw else [why for call in one.calls if (why := _reason(call, names))]
        fine = [call for call in one.calls if not (reasons and _reason(call, names))]
        room = 1 - len(calls) if single else len(fine)
        reasons += ["second"] * (len(fine) - room)
        calls += fine[:room]
        kept += reasons
        if not reasons:
            parts.append(part + text[place : one.start])
            part, place = "", max(place, one.end)
        elif has_messages:
            parts.append(text[one.start : one.end])
    shown = map(str.strip, (*parts, part + text[place:]))
    return Spoken(thoughts.strip(), "\n".join(filter(None, shown)), tuple(calls), tuple(kept))


def _reason(call: ToolCall, names: set[str]) -> Kept | None:
    if not names:
        return "no_tools"
    if call.name == MALFORMED_CALL:
        return "malformed"
    return None if call.name in names else "not_offered"


def _found(
    action: Message, text: str, style: str, tools: Sequence[dict[str, Any]]
) -> Sequence[FoundCalls]:
    if style != "tags":
        return FINDERS[style](text, tools)
    ended = text.rstrip()
    names = (str(tool["name"]) for tool in tools)
    called = next((name for name in names if ended.endswith(f"</{name}>")), "")
    return [FoundCalls(action.tool_calls, max(call_start(text, called), 0), len(text))]
