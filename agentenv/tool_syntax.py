"""How models write native tool calls: from the text of a turn to calls.

    Hermes, Qwen   <tool_call>{"name": "search", "arguments": {"query": "Lima"}}</tool_call>, any
                   number of them
    Llama 3.1      {"name": "search", "parameters": {"query": "Lima"}} and nothing else, or code
                   behind <|python_tag|>

A call that cannot be read is a call too, to MALFORMED_CALL: the policy reads what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from agentenv.types import MALFORMED_CALL, ToolCall

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
EXPECTED = 'expected {"name": "...", "arguments": {...}}'

_HERMES = re.compile(rf"{CALL_OPEN}(.*?)({CALL_CLOSE}|\Z)", re.DOTALL)

Parser = Callable[[str, Sequence[dict[str, Any]]], tuple[ToolCall, ...]]


def hermes_calls(text: str, tools: Sequence[dict[str, Any]]) -> tuple[ToolCall, ...]:
    """The calls behind the thoughts of a turn."""
    calls = []
    for body, closing in _HERMES.findall(after_thoughts(text)):
        if closing:
            calls.append(_call(body.strip()))
        else:
            calls.append(_malformed(f"{CALL_OPEN} is not closed by {CALL_CLOSE}"))
    return tuple(calls)


def llama_calls(text: str, tools: Sequence[dict[str, Any]]) -> tuple[ToolCall, ...]:
    """The one call that a turn may be."""
    body = after_thoughts(text).strip()
    tagged = body.startswith(PYTHON_TAG)
    body = body.removeprefix(PYTHON_TAG).strip()
    if body.startswith("{") and (tagged or '"name"' in body[:200]):
        return (_call(body),)
    if not tagged:
        return ()
    for tool in tools:
        if tool["name"] == "python":
            argument = next(iter(tool["parameters"]["properties"]))
            return (ToolCall("python", {argument: body}),)
    return (_malformed(f"there is no tool that runs code; {EXPECTED}"),)


def after_thoughts(text: str) -> str:
    """What follows the last thought; nothing while a thought is still open."""
    after = text.rpartition("</think>")[2]
    return "" if "<think>" in after else after


def _call(body: str) -> ToolCall:
    try:
        raw = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        return _malformed(f"not valid JSON ({error}); {EXPECTED}")
    if not isinstance(raw, dict) or not isinstance(raw.get("name"), str):
        return _malformed(f"no name; {EXPECTED}")
    arguments = raw.get("arguments", raw.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the arguments as a text of JSON
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            return _malformed(f"the arguments are not an object; {EXPECTED}")
    if not isinstance(arguments, dict):
        return _malformed(f"the arguments are not an object; {EXPECTED}")
    return ToolCall(raw["name"], arguments)


def _malformed(problem: str) -> ToolCall:
    return ToolCall(MALFORMED_CALL, {"problem": problem})
