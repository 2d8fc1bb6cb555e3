"""Messages of a dialogue, however a file names their roles and texts."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from msgspec.structs import replace

from agentenv.data_files import Row
from agentenv.errors import DataError
from agentenv.types import Message, ToolCall
from launchers.supervised.chat_config import MESSAGE_TAGS, SHAREGPT_TAGS, ChatTags, RowFormat


def read_messages(row: Row, column: str, form: RowFormat) -> list[Message]:
    value = row.get(column)
    if isinstance(value, str):  # CSV and some parquet files keep the list as a text
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(f"key {column!r}: not a list of messages: {error}") from error
    if not isinstance(value, list) or not value:
        raise DataError(
            f"key {column or 'messages'!r}: expected a list of messages, got {value!r:.60}"
        )
    return [read_message(raw, f"{column}[{number}]", form) for number, raw in enumerate(value)]


def _tags_of(raw: Row, form: RowFormat) -> ChatTags:
    sharegpt = form.format == "sharegpt" or (form.format == "auto" and "from" in raw)
    base = SHAREGPT_TAGS if sharegpt else MESSAGE_TAGS
    own = {name: value for name, value in msgspec.structs.asdict(form.tags).items() if value}
    return replace(base, **own)


def read_message(raw: Any, key: str, form: RowFormat) -> Message:
    if not isinstance(raw, dict):
        raise DataError(f"key '{key}': expected a message, got {raw!r:.60}")
    tags = _tags_of(raw, form)
    roles = {
        tags.user_tag: "user",
        tags.assistant_tag: "assistant",
        tags.observation_tag: "tool",
        tags.function_tag: "function",
        tags.system_tag: "system",
    }
    role = roles.get(raw.get(tags.role_tag, ""))
    if role is None:
        raise DataError(
            f"key '{key}.{tags.role_tag}': expected one of {sorted(roles)}, got "
            f"{raw.get(tags.role_tag)!r:.60}"
        )
    text = _content(
        raw.get(tags.content_tag), f"{key}.{tags.content_tag}", bool(raw.get("tool_calls"))
    )
    if role == "function":
        return Message("assistant", "", (_call(text, f"{key}.{tags.content_tag}"),))
    calls = tuple(
        _call(call, f"{key}.tool_calls[{number}]")
        for number, call in enumerate(raw.get("tool_calls") or ())
    )
    name = raw.get("name")
    return Message(role, text, calls, name if isinstance(name, str) else None)  # type: ignore[arg-type]


def _content(value: Any, key: str, may_be_empty: bool) -> str:
    if isinstance(value, list):  # parts, as of chat APIs
        parts = [part.get("text") if isinstance(part, dict) else part for part in value]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) == len(parts):
            return "".join(texts)
    if value is None and may_be_empty:
        return ""
    if not isinstance(value, str):
        raise DataError(f"key '{key}': expected a text, got {value!r:.60}")
    return value


def _call(raw: Any, key: str) -> ToolCall:
    """A call as an object or as its JSON, in {"function": ..} or by itself."""
    try:
        call = json.loads(raw) if isinstance(raw, str) else raw
        call = call.get("function", call)
        arguments = call.get("arguments", call.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        return msgspec.convert({"name": call["name"], "arguments": arguments}, ToolCall)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f'key \'{key}\': expected a call {{"name": .., "arguments": {{..}}}}, got {raw!r:.60}'
        ) from error
