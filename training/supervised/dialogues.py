"""Conversion of dialogue rows into messages.

    sharegpt   {"conversations": [{"from": "human", "value": ..}, {"from": "gpt", ..}], "system"}
    messages   {"messages": [{"role": "user", "content": ..}, ..], "tools"}, calls in "tool_calls"
    alpaca     {"instruction", "input", "output", "system", "history"}
    turns      {"question", "turns": [{"action", "result"}, ..]}, as in the quick start

A preference has a prompt in one of these formats, and "chosen" and "rejected": each a text, a
message, or a list of messages with tool results between them. Without a prompt, the common prefix
of both lists is the prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from agentenv.assembly.keys.supervised import ChatColumns, ChatDataConfig, Format
from agentenv.base.errors import DataError, ForeignError, reported_as
from agentenv.base.registry import meant
from agentenv.base.types import Message, ToolCall
from agentenv.base.untrusted import convert, decode_loose
from agentenv.data.data_files import Row, find_files

T = TypeVar("T")


class ChatTags(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Keys of a message and names of roles; empty: those of its format. The fields are named as in
    LLaMA-Factory's dataset_info.json."""

    role_tag: str = ""
    content_tag: str = ""
    user_tag: str = ""
    assistant_tag: str = ""
    observation_tag: str = ""  # role of a tool result
    function_tag: str = ""  # role of a call, a JSON text
    system_tag: str = ""


SHAREGPT_TAGS = ("from", "value", "human", "gpt", "observation", "function_call", "system")
MESSAGE_TAGS = ("role", "content", "user", "assistant", "tool", "function", "system")


class RowFormat(Struct, frozen=True):
    """The format of the rows of one file."""

    format: Format = "auto"
    columns: ChatColumns = ChatColumns()
    tags: ChatTags = ChatTags()


def converted(raw: Any, kind: type[T], where: str = "") -> T:
    """A value of a file, converted to `kind`. Raises DataError that starts with `where`."""
    with reported_as(DataError, where, ForeignError):
        return convert(raw, kind)


# Messages of a dialogue, with the file's names of roles and texts.


def read_messages(row: Row, column: str, form: RowFormat) -> list[Message]:
    value = row.get(column)
    if isinstance(value, str):  # CSV and some parquet files keep the list as a text
        with reported_as(DataError, f"key {column!r}: not a list of messages", ForeignError):
            value = decode_loose(value)
    if not isinstance(value, list) or not value:
        raise DataError(
            f"key {column or 'messages'!r}: expected a list of messages, got {value!r:.60}"
        )
    return [read_message(raw, f"{column}[{number}]", form) for number, raw in enumerate(value)]


def _tags_of(raw: Row, form: RowFormat) -> ChatTags:
    sharegpt = form.format == "sharegpt" or (form.format == "auto" and "from" in raw)
    base = SHAREGPT_TAGS if sharegpt else MESSAGE_TAGS
    own = msgspec.structs.asdict(form.tags)
    return ChatTags(**{name: own[name] or tag for name, tag in zip(own, base, strict=True)})


def read_message(raw: Any, key: str, form: RowFormat) -> Message:
    """A message of a row. Raises DataError with the key."""
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
    given, called = raw.get(tags.role_tag, ""), raw.get("tool_calls") or ()
    role, place = roles.get(given), f"{key}.{tags.content_tag}"
    if role is None:
        known = f"expected one of {sorted(roles)}, got {raw.get(tags.role_tag)!r:.60}"
        raise DataError(f"key '{key}.{tags.role_tag}': {known}")
    text = _content(raw.get(tags.content_tag), place, bool(called))
    if role == "function":
        return Message("assistant", "", (_call(text, place),))
    calls = tuple(_call(one, f"{key}.tool_calls[{number}]") for number, one in enumerate(called))
    name = raw.get("name")
    return Message(role, text, calls, name if isinstance(name, str) else None)  # type: ignore[arg-type]


def _content(value: Any, key: str, may_be_empty: bool) -> str:
    if isinstance(value, list):  # content parts, as in chat APIs
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
    """A call from an object or its JSON, with or without {"function": ..} around it."""
    try:
        call = decode_loose(raw) if isinstance(raw, str) else raw
        call = call.get("function", call)
        arguments = call.get("arguments", call.get("parameters", {}))
        arguments = decode_loose(arguments) if isinstance(arguments, str) else arguments
        return convert({"name": call["name"], "arguments": arguments}, ToolCall)
    except (ForeignError, AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f'key \'{key}\': expected a call {{"name": .., "arguments": {{..}}}}, got {raw!r:.60}'
        ) from error


MESSAGES = ("conversations", "messages", "prompt")
FOLLOWS = {  # role -> roles that may follow it
    "": ("system", "user"),
    "system": ("user",),
    "user": ("assistant", "user"),
    "assistant": ("tool", "user"),
    "tool": ("tool", "assistant", "user"),
}
EXPECTED_COLUMNS = (
    "expected conversations or messages, a list of messages; or instruction and output; or "
    "question and turns"
)


class Dialogue(Struct, frozen=True):
    """Messages in order; a system prompt is the first. `tools`: schemas."""

    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] = []


class Preference(Struct, frozen=True):
    """Two answers to one prompt; each may have several turns with tool results between them."""

    prompt: Dialogue
    chosen: tuple[Message, ...]
    rejected: tuple[Message, ...]


def read_conversation(row: Row, form: RowFormat) -> Dialogue:
    """The dialogue of a row. Raises DataError with the key and the expected value."""
    found = _kind(row, form)
    if found == "turns":
        messages = _turns(row)
    elif found == "alpaca":
        answer = _text(row, form.columns.response)
        messages = [*_alpaca_prompt(row, form), Message("assistant", answer)]
    else:
        messages = _with_system(read_messages(row, _messages_column(row, form), form), row, form)
    check_order(messages)
    if not any(message.role == "assistant" for message in messages):
        raise DataError("no training signal: no message is the policy's")
    return Dialogue(tuple(messages), _tools(row, form))


def read_preference(row: Row, form: RowFormat) -> Preference:
    """The two answers of a row. Raises DataError with the key and the expected value."""
    columns = form.columns
    for column in (columns.chosen, columns.rejected):
        if row.get(column) is None:
            raise DataError(f"key {column!r} is missing; the row has {sorted(row)}")
    chosen, rejected = (_answer(row, name, form) for name in (columns.chosen, columns.rejected))
    prompt: Sequence[Message]
    if _kind(row, form, preference=True) == "alpaca":
        prompt = _alpaca_prompt(row, form)
    elif column := _messages_column(row, form):
        plain = isinstance(row[column], str)
        messages = [Message("user", row[column])] if plain else read_messages(row, column, form)
        prompt = _with_system(messages, row, form)
        if chosen[: len(prompt)] == prompt and rejected[: len(prompt)] == prompt:
            chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    else:
        size = _shared(chosen, rejected)
        prompt, chosen, rejected = chosen[:size], chosen[size:], rejected[size:]
    for name, answer in ((columns.chosen, chosen), (columns.rejected, rejected)):
        if not answer or answer[0].role != "assistant":
            raise DataError(f"key {name!r}: expected an answer that starts with the policy's turn")
        check_order([*prompt, *answer])
    whole = Dialogue(tuple(prompt), _tools(row, form))
    return Preference(whole, tuple(chosen), tuple(rejected))


def check_order(messages: Sequence[Message]) -> None:
    """Raises DataError for a message that cannot follow the previous one."""
    before = ""
    for number, message in enumerate(messages):
        if message.role not in FOLLOWS[before]:
            pair = f"{message.role!r}, which cannot follow {before or 'the beginning'!r}"
            expected = " or ".join(FOLLOWS[before])
            raise DataError(f"message {number} has the role {pair}; expected {expected}")
        before = message.role


def _kind(row: Row, form: RowFormat, *, preference: bool = False) -> str:
    if form.format != "auto":
        return form.format
    if _messages_column(row, form):
        return "messages"
    if isinstance(row.get("turns"), list):
        return "turns"
    if isinstance(row.get(form.columns.prompt), str):
        return "alpaca"
    if preference:
        return "messages"
    raise DataError(f"no dialogue found: {EXPECTED_COLUMNS}; the row has {sorted(row)}")


def _messages_column(row: Row, form: RowFormat) -> str:
    """The column of the messages; empty if the row has none."""
    if named := form.columns.messages:
        if row.get(named) is None:
            missing = f"key {named!r}, set by columns.messages, is missing"
            raise DataError(f"{missing}; the row has {sorted(row)}")
        return named
    return next((name for name in MESSAGES if row.get(name) is not None), "")


def _answer(row: Row, column: str, form: RowFormat) -> list[Message]:
    value = row[column]
    if isinstance(value, str):
        return [Message("assistant", value)]
    if isinstance(value, dict):
        return [read_message(value, column, form)]
    return read_messages(row, column, form)


def _with_system(messages: Sequence[Message], row: Row, form: RowFormat) -> list[Message]:
    system = row.get(form.columns.system) if form.columns.system else None
    if system is not None and not isinstance(system, str):
        raise DataError(f"key {form.columns.system!r}: expected a text, got {system!r:.60}")
    has_own = bool(messages) and messages[0].role == "system"
    return [Message("system", system), *messages] if system and not has_own else [*messages]


def _tools(row: Row, form: RowFormat) -> list[dict[str, Any]]:
    value = row.get(form.columns.tools) if form.columns.tools else None
    with suppress(ForeignError, AttributeError, KeyError, TypeError):
        schemas = decode_loose(value) if isinstance(value, str) and value.strip() else value
        tools = [schema.get("function", schema) for schema in schemas or ()]
        if all(isinstance(tool["name"], str) for tool in tools):
            return tools
    raise DataError(
        f"key {form.columns.tools!r}: expected a list of tools, each with a name, got {value!r:.60}"
    )


def _alpaca_prompt(row: Row, form: RowFormat) -> list[Message]:
    columns, messages = form.columns, []
    history, key = row.get(columns.history) or [], f"key {columns.history!r}"
    for question, answer in converted(history, list[tuple[str, str]], key):
        messages += [Message("user", question), Message("assistant", answer)]
    texts = [_text(row, columns.prompt), _text(row, columns.query, optional=True)]
    messages.append(Message("user", "\n".join(filter(None, texts))))
    return _with_system(messages, row, form)


def _text(row: Row, column: str, *, optional: bool = False) -> str:
    value = row.get(column)
    if value is None and optional:
        return ""
    if not isinstance(value, str) or not (value or optional):
        raise DataError(f"key {column!r}: expected a text, got {value!r:.60}")
    return value


class _Turn(Struct):
    action: str
    result: str | None = None


class _Turns(Struct):
    question: Annotated[str, Meta(min_length=1)]
    turns: list[_Turn]


def _turns(row: Row) -> list[Message]:
    found = converted(row, _Turns)
    messages = [Message("user", found.question)]
    for turn in found.turns:
        messages.append(Message("assistant", turn.action))
        if turn.result is not None:
            messages.append(Message("tool", turn.result))
    return messages


def _shared(chosen: Sequence[Message], rejected: Sequence[Message]) -> int:
    """Number of common first messages of two dialogues, up to the last user message of these.
    Raises DataError if there are none."""
    size = 0
    for number, (one, other) in enumerate(zip(chosen, rejected, strict=False)):
        if one != other:
            break
        if one.role == "user":
            size = number + 1
    if not size:
        raise DataError(
            "no prompt: expected conversations, messages or prompt, or that chosen and rejected "
            "start with the same messages"
        )
    return size


# LLaMA-Factory's registry of datasets: dataset_info.json, from names to files and their formats.
#
#     {"cold_start": {"file_name": "final.json", "formatting": "sharegpt",
#                     "columns": {"messages": "conversations", "system": "system"},
#                     "tags": {"role_tag": "from", ...}, "ranking": false, "num_samples": 1000}}
#
# As in LLaMA-Factory, the default `formatting` is alpaca, and system prompt and tools are read only
# if `columns` names them. Entries of a hub are rejected.

HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
FORMATS: dict[str, Format] = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}


class Source(Struct, frozen=True):
    """A file and its format; `max_samples`: only its first n rows (0: all)."""

    path: Path
    form: RowFormat
    max_samples: int = 0


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    file_name: str
    formatting: Literal["alpaca", "sharegpt", "openai"] = "alpaca"
    columns: dict[str, str] = {}
    tags: ChatTags = ChatTags()
    ranking: bool = False
    num_samples: int = 0


def find_sources(
    config: ChatDataConfig, names: list[str], resolve: Any = Path, *, ranking: bool = False
) -> list[Source]:
    """The files that `names` refer to; `ranking`: they contain preferences. Raises DataError, with
    file and key, for a missing name or file, and for an unsupported entry."""
    if config.dataset_info:
        path: Path = resolve(config.dataset_info)
        if path.is_dir():
            path /= "dataset_info.json"
        return [_source(path, name, ranking=ranking) for name in names]
    form = RowFormat(config.format, config.columns)
    return [Source(path, form) for path in find_files([resolve(name) for name in names])]


def registered_files(registry: Path, names: Iterable[str]) -> list[Path]:
    """The files of datasets in a registry, existing or not. Raises DataError for an unknown
    name."""
    if registry.is_dir():
        registry /= "dataset_info.json"
    return [registry.parent / _entry(registry, name).file_name for name in names]


def _source(registry: Path, name: str, *, ranking: bool) -> Source:
    entry = _entry(registry, name)
    where = f"{registry}: {name}"
    if entry.ranking != ranking:
        wanted = "true, since agentenv dpo needs preferences" if ranking else "false or absent"
        raise DataError(f"{where}.ranking: expected {wanted}; agentenv sft reads dialogues")
    named = {"system": "", "tools": "", **entry.columns}
    if entry.formatting != "alpaca":
        named.setdefault("messages", "conversations")
    columns = converted(named, ChatColumns, f"{where}.columns")
    path = registry.parent / entry.file_name
    if not path.exists():
        raise DataError(f"{where}.file_name: no such file: {path}")
    form = RowFormat(FORMATS[entry.formatting], columns, entry.tags)
    return Source(path, form, entry.num_samples)


def _entry(registry: Path, name: str) -> _Entry:
    problem = f"{registry}: not a readable dataset_info.json"
    with reported_as(DataError, problem, OSError, ForeignError):
        known = decode_loose(registry.read_bytes())
    raw = known.get(name) if isinstance(known, dict) else None
    if not isinstance(raw, dict):
        hint = meant(name, known, f"it has {sorted(known)[:20]}")
        raise DataError(f"{registry}: unknown dataset {name!r}; {hint}")
    hub = [key for key in HUBS if key in raw]
    if hub and "file_name" not in raw:
        why = "downloads are not supported; get the file and set file_name"
        raise DataError(f"{registry}: {name}.{hub[0]}: {why}")
    own = {key: value for key, value in raw.items() if key not in HUBS}
    return converted(own, _Entry, f"{registry}: {name}")
