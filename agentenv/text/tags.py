"""Calls of the tag protocol: parsing, writing, descriptions, and checks of tool names.

    <stock>bolts</stock>                            a tool with one parameter: its value
    <order>{"item": "bolts", "count": 3}</order>    with several: a JSON object

The schema of a tool determines the form. A single parameter that is a list or an object is also
written as a JSON object. A tool with at most one required parameter accepts it as text too, unless
the text begins with a brace. An invalid call becomes a call of MALFORMED_CALL, whose result tells
the policy the error and the correct form.

The first closing tag of a tool ends the turn, since engines stop there. Within a string of an
object it must be written <\\/order>. A call whose text opens its own tag again is malformed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from agentenv.base.errors import ConfigError, ForeignError
from agentenv.base.types import Message, ToolCall
from agentenv.base.untrusted import decode, schema_types
from agentenv.text.call_syntax import THOUGHT_CLOSE, THOUGHT_OPEN, malformed, properties_of

TAGS = ("think", "result", "answer")
ToolSchema = Mapping[str, Any]
Shown = Literal["several", "all", "none"]  # tools that a prompt describes

_TEXTS = {"string", "integer", "number", "boolean", "null"}  # types that a text can express
_NAME = re.compile(r"[^\s<>/\"']+")
_INTRODUCTION = "You can call these tools; what a call gives follows it between <result> tags:"


def takes_object(tool: ToolSchema) -> bool:
    """Whether the arguments of the tool are a JSON object, not one text."""
    schema = tool["parameters"]
    properties = properties_of(tool)
    if not properties:
        return any(schema.get(key) for key in ("required", "additionalProperties", "anyOf"))
    if len(properties) > 1:
        return True
    types = schema_types(next(iter(properties.values())))
    return bool(types) and not types & _TEXTS


def tagged_call(text: str, tool: ToolSchema) -> tuple[ToolCall, ...]:
    """The call at the end of a text; empty if its tag was never opened."""
    name = tool["name"]
    opened = f"<{name}>"
    start, end = call_start(text, name), text.rfind(f"</{name}>")
    if start < 0:
        return ()
    written = text[start + len(opened) : end].strip()
    is_object = takes_object(tool)
    alone = _alone(tool) if is_object else None
    is_text = not is_object or (alone is not None and not written.startswith("{"))
    if is_text and opened in written:
        return (malformed(f"{opened} is opened twice before </{name}>; expected {form(tool)}"),)
    if not is_object:
        return (ToolCall(name, dict.fromkeys([*properties_of(tool)][:1], written)),)
    if alone is not None and is_text:
        return (ToolCall(name, {alone: written} if written else {}),)
    return (_object_call(name, written, tool),)


def call_start(text: str, name: str) -> int:
    """The offset of the call at the end of a text; -1 if its tag was never opened."""
    opened = f"<{name}>"
    body = text[: text.rfind(f"</{name}>")]
    return body.find(opened, _text_start(body, opened))


def _text_start(body: str, opened: str) -> int:
    """The end of the thoughts before a call; a call within an unclosed thought is valid."""
    place = 0
    while True:
        thought, call = body.find(THOUGHT_OPEN, place), body.find(opened, place)
        end = body.find(THOUGHT_CLOSE, thought)
        if thought < 0 or end < 0 or 0 <= call < thought:
            return place
        place = end + len(THOUGHT_CLOSE)


def tag_calls(
    text: str, tools: Sequence[ToolSchema], stop: str | None = None
) -> tuple[ToolCall, ...]:
    """The call at the end of a whole turn, or at the closing tag `stop` that ended it, if any."""
    end = text.rstrip() if stop is None else stop
    for tool in tools:
        closing = f"</{tool['name']}>"
        if end.endswith(closing) if stop is None else end == closing:
            return tagged_call(text, tool)
    return ()


def written_arguments(arguments: Mapping[str, Any], tool: ToolSchema | None) -> str:
    """The text between the tags of a call with these arguments; `tool` is its schema, if any."""
    if takes_object(tool) if tool is not None else len(arguments) > 1:
        return json.dumps(dict(arguments), ensure_ascii=False).replace("</", "<\\/")
    value = next(iter(arguments.values()), "")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def form(tool: ToolSchema) -> str:
    """A call of the tool with types in place of values."""
    name = tool["name"]
    if takes_object(tool):
        needed = tool["parameters"].get("required", ())
        parts = [
            f'"{key}": {_type_text(schema)}{"" if key in needed else " (optional)"}'
            for key, schema in properties_of(tool).items()
        ]
        return f"<{name}>{{{', '.join(parts)}}}</{name}>"
    return f"<{name}>{next(iter(properties_of(tool)), '')}</{name}>"


def with_tools(
    messages: Sequence[Message], tools: Sequence[ToolSchema], shown: Shown
) -> list[Message]:
    """The messages of a prompt, with descriptions of the tools that they do not show yet: at the
    end of the system message, else before the question. With "several", all of these tools are
    described if one of them has several parameters, since a partial list would hide the others.
    """
    prompt = "\n".join(message.content for message in messages)
    unknown = [tool for tool in tools if f"<{tool['name']}>" not in prompt]
    is_listed = shown == "all" or (shown == "several" and any(map(takes_object, unknown)))
    if not (is_listed and unknown and messages):
        return list(messages)
    text = "\n".join((_INTRODUCTION, *map(_line, unknown)))
    first, *rest = messages
    if first.role == "system":
        return [Message("system", f"{first.content}\n\n{text}"), *rest]
    return [Message(first.role, f"{text}\n\n{first.content}"), *rest]


def check_tags(tools: Sequence[ToolSchema]) -> None:
    """Raises ConfigError for a tool that the tag protocol cannot call."""
    for tool in tools:
        problem = _problem(tool)
        if problem:
            raise ConfigError(f"the tag protocol cannot call the tool {tool['name']!r}: {problem}")


def _problem(tool: ToolSchema) -> str:
    name = tool["name"]
    if name in TAGS:
        return (
            f"<{name}> is a tag of the protocol itself; rename the tool, or choose renderer.name = "
            "'native'"
        )
    if not _NAME.fullmatch(name):
        return "its name is not a valid tag; use a name without spaces, quotes and brackets"
    unknown = sorted(set(tool["parameters"].get("required", ())) - properties_of(tool).keys())
    if unknown and properties_of(tool):
        return f"its schema requires {unknown}, which properties lacks; add them there"
    return ""


def _alone(tool: ToolSchema) -> str | None:
    """The parameter that may be given as text; None if several are required, or if no text can be
    its value."""
    needed = list(tool["parameters"].get("required", ()))
    properties = properties_of(tool)
    if len(needed) > 1 or not properties:
        return None
    name = needed[0] if needed else next(iter(properties))
    types = schema_types(properties.get(name))
    return name if not types or types & _TEXTS else None


def _object_call(name: str, written: str, tool: ToolSchema) -> ToolCall:
    try:
        arguments = decode(written)
    except ForeignError as error:
        cut = written.count('"') % 2  # perhaps at a closing tag within a string
        hint = f"; within a text </{name}> is written <\\/{name}>" if cut else ""
        return malformed(
            f"expected {form(tool)}; the text between the tags is not valid JSON: {error}{hint}"
        )
    if not isinstance(arguments, dict):
        return malformed(f"expected {form(tool)}; the text between the tags is not a JSON object")
    return ToolCall(name, arguments)


def _line(tool: ToolSchema) -> str:
    return "\n".join([f"{form(tool)}: {tool.get('description') or 'a tool.'}", *_notes(tool)])


def _notes(tool: ToolSchema) -> Iterator[str]:
    for name, schema in properties_of(tool).items():
        description = schema.get("description") if isinstance(schema, dict) else None
        if description:
            yield f"  {name}: {description}"


def _type_text(schema: Any) -> str:
    """The type of a parameter, for a description."""
    if isinstance(schema, dict) and "enum" in schema:
        return " | ".join(json.dumps(one, ensure_ascii=False) for one in schema["enum"])
    return " | ".join(sorted(schema_types(schema) - {"null"})) or "value"
