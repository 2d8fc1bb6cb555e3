"""Requests and replies in a common form for all APIs, and their errors.

Only this module decodes client input; every fault is a named `ApiError`.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby, pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import Struct

from agentenv.base.errors import ForeignError
from agentenv.base.types import Constraints, Message, NextTurn, ToolCall, Turn
from agentenv.base.untrusted import convert, decode, printable
from agentenv.text.call_syntax import THOUGHT_CLOSE, THOUGHT_OPEN

Json = dict[str, Any]
T = TypeVar("T")
Finish = Literal["stop", "length", "tool_calls"]

MAX_MESSAGES, MAX_TOOLS, MAX_CALLS, MAX_CHOICES = 10_000, 1_000, 1_000, 128
MAX_STOPS = 16
TOOL_REFERENCE = "tool_reference"  # a part that offers a deferred tool, which Anthropic's API has

# name of an error -> status, type and code of OpenAI's APIs, type of Anthropic's
ERRORS: dict[str, tuple[int, str, str | None, str]] = {
    "malformed": (400, "invalid_request_error", "malformed", "invalid_request_error"),
    "invalid": (400, "invalid_request_error", "invalid_value", "invalid_request_error"),
    "unsupported": (400, "invalid_request_error", "unsupported_value", "invalid_request_error"),
    "too_long": (400, "invalid_request_error", "context_length_exceeded", "invalid_request_error"),
    "no_key": (401, "authentication_error", "invalid_api_key", "authentication_error"),
    "ended": (403, "permission_error", "branch_ended", "permission_error"),
    "other_page": (403, "permission_error", "other_page", "permission_error"),
    "no_route": (404, "invalid_request_error", "not_found", "not_found_error"),
    "no_model": (404, "invalid_request_error", "model_not_found", "not_found_error"),
    "no_method": (405, "invalid_request_error", "method_not_allowed", "invalid_request_error"),
    "too_slow": (408, "invalid_request_error", "request_timeout", "timeout_error"),
    "too_large": (413, "invalid_request_error", "request_too_large", "request_too_large"),
    "other_host": (421, "invalid_request_error", "other_host", "invalid_request_error"),
    "engine": (502, "server_error", "engine_failed", "api_error"),
    "engine_dead": (503, "server_error", "engine_dead", "overloaded_error"),
    "unavailable": (503, "server_error", "unavailable", "api_error"),
    "bug": (500, "server_error", "internal_error", "api_error"),
}


class ApiError(Exception):
    """A rejection with a name of ERRORS; `param` is the invalid key of the request."""

    def __init__(self, name: str, text: str, param: str | None = None) -> None:
        super().__init__(printable(text))
        self.name, self.param = name, param

    @property
    def status(self) -> int:
        return ERRORS[self.name][0]


class ServedCall(NamedTuple):
    """A tool call; `arguments` is the JSON text of an object, as served or received."""

    id: str
    name: str
    arguments: str


class Given(NamedTuple):
    """A message of a request, or a served one, compared by value."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str
    thoughts: str = ""
    calls: tuple[ServedCall, ...] = ()
    answers: str = ""  # id of the call that a tool result answers
    name: str | None = None


class Request(Struct, kw_only=True):
    """A request. `tools` are (name, description, parameters) in JSON; of those, `custom` take one
    text, and `namespaces` has namespace and own name of those that are in one; items of the call
    and of earlier ones `added` some, here as they came. `schema`: the form
    of the reply, which is in the messages. `forced`, `single`: see NextTurn. `ignored`: keys
    without an effect; `own_sampling`: those without an effect in a run. `logprobs`: return those of
    the sampled tokens. `raw`: return the turn as sampled, and malformed calls. `compact`: its
    client writes JSON without blanks. `repeats` is its key of idempotency. `id` and `created`
    (seconds since 1970) are those of its reply."""

    model: str
    messages: tuple[Given, ...]
    tools: tuple[Json, ...] = ()
    custom: frozenset[str] = frozenset()
    namespaces: dict[str, tuple[str, str]] = {}
    added: tuple[Json, ...] = ()
    schema: Json | None = None
    forced: tuple[str, ...] = ()
    single: bool = False
    ignored: set[str] = set()
    own_sampling: set[str] = set()
    stream: bool = False
    usage_in_stream: bool = False
    n: int = 1
    max_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    session: str = ""
    raw: bool = False
    compact: bool = False
    repeats: str = ""
    body: Json = {}
    id: str = ""
    created: int = 0


class TokenLogprob(NamedTuple):
    """A sampled token: its text and its log-prob in nats."""

    text: str
    logprob: float


class ServedTurn(Struct, kw_only=True):
    """A served turn."""

    message: Given
    finish: Finish
    num_prompt_tokens: int = 0
    num_tokens: int = 0
    num_cached_tokens: int = 0
    stop: str | None = None
    logprobs: Sequence[TokenLogprob] | None = None
    raw: str | None = None


Event = tuple[str, Json]  # name and data of a stream's event; empty name: only data


class HandedTurn(NamedTuple):
    """An answered call: `context` has its messages and the served one."""

    request: Request
    answer: ServedTurn
    context: tuple[Given, ...]


Handed = dict[str, HandedTurn]  # by the id of the reply


# The keys of requests.


class Keys(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys, or the types, of one kind of object, see keys.toml. `refused`: by remedy."""

    done: frozenset[str] = frozenset()
    neutral: frozenset[str] = frozenset()
    sampling: frozenset[str] = frozenset()
    served: frozenset[str] = frozenset()
    unserved: frozenset[str] = frozenset()
    usual: Json = {}
    refused: dict[str, frozenset[str]] = {}
    within: dict[str, str] = {}

    def ignores(self, name: str, param: str) -> bool:
        """Whether a key or type is neutral. Raises ApiError unless it is known."""
        if name in self.done | self.sampling | self.served | self.unserved:
            return False
        if name not in self.neutral:
            remedies = (remedy for remedy, names in self.refused.items() if name in names)
            remedy = next(remedies, "it is unknown; omit it")
            shown = param if param.endswith(name[:60]) else f"{param} {name!r:.60}"
            raise ApiError("unsupported", f"{shown} is not supported: {remedy}", param)
        return True


_TABLE = Path(__file__).with_name("keys.toml").read_text(encoding="utf-8")
KEYS = msgspec.convert(tomllib.loads(_TABLE), dict[str, Keys])  # by the kind of object
LEFT_OUT = KEYS["part_type"].neutral


@cache
def _usual(kind: str, above: tuple[str, ...] = ()) -> Any:
    """A struct that holds an object of this kind if all keys and types in it are done."""
    known, types = KEYS[kind], KEYS.get(f"{kind}_type")
    fields: Json = dict.fromkeys(known.done | known.sampling | known.served, Any)
    if types is not None:
        fields["type"] = Literal[*types.done, None]
    for key in known.within.keys() & fields.keys():
        inner = known.within[key]
        one: Any = str if inner in above else _usual(inner, (*above, kind))
        fields[key] = str | one | list[one] | None
    optional = [(key, hint, None) for key, hint in fields.items()]
    return msgspec.defstruct(kind, optional, forbid_unknown_fields=True)


def check_keys(body: Mapping[str, Any], kind: str, ignored: set[str], where: str = "") -> None:
    """Refuse each key and type of an object, and of those within, that is neither done nor neutral;
    add the neutral ones to `ignored`, with their kind where that is not an API."""
    with suppress(msgspec.ValidationError):  # ten times as fast as the rest
        msgspec.convert(body, _usual(kind))
        return
    known, types = KEYS[kind], KEYS.get(f"{kind}_type")
    own = body.get("type")
    if (
        types is not None
        and own is not None
        and types.ignores(str(own), f"{where}type.{own}"[:160])
    ):
        ignored.add(f"{kind}.{own}")
        return
    for key, value in body.items():
        if value is None or (key in known.usual and value == known.usual[key]):
            continue
        found = ignored
        if key not in known.done and known.ignores(key, where + key[:60]):
            ignored.add(f"{kind}.{key}" if where else key)
            found = set()  # it is counted as a whole
        inner = known.within.get(key)
        if inner is not None and isinstance(value, dict):
            check_keys(value, inner, found, f"{where}{key}.")
        elif inner is not None and isinstance(value, list):
            for place, one in enumerate(value):
                if isinstance(one, dict):
                    check_keys(one, inner, found, f"{where}{key}[{place}].")


# Decoding client input.

# half of a surrogate pair, which no text can hold; not after an escaped backslash
_SURROGATES = re.compile(
    rb"\\\\|\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}|(\\u[dD][89a-fA-F][\da-fA-F]{2})"
)


def read_body(data: bytes) -> Json:
    """The JSON object of a request. Half of a surrogate pair becomes U+FFFD."""
    try:
        try:
            body = decode(data)
        except ForeignError:  # perhaps of half a pair
            body = decode(_SURROGATES.sub(lambda one: b"\\ufffd" if one[1] else one[0], data))
    except ForeignError as error:
        raise ApiError("malformed", f"the body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise ApiError("malformed", f"the body must be a JSON object, got {_kind(body)}")
    return body


def get(body: Mapping[str, Any], key: str, kind: type[T], default: T, where: str = "") -> T:
    """A value of this type; the default for null and a missing key."""
    value = body.get(key)
    if value is None:
        return default
    if type(value) is kind:
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ApiError("invalid", f"expected {kind.__name__}, got {_kind(value)}", where + key)
    return value


def number(
    body: Mapping[str, Any], key: str, kind: type[Any], low: float, high: float
) -> Any | None:
    """A number within bounds; None if it is missing."""
    if body.get(key) is None:
        return None
    value = get(body, key, kind, kind())
    if not (isfinite(value) and low <= value <= high):
        raise ApiError("invalid", f"expected {low:g} to {high:g}, got {value:g}", key)
    return value


def objects(value: Any, where: str, most: int) -> list[Json]:
    """A list of objects."""
    if not isinstance(value, list):
        raise ApiError("invalid", f"expected a list of objects, got {_kind(value)}", where)
    if not {dict}.issuperset(map(type, value)):
        place, one = next((n, one) for n, one in enumerate(value) if type(one) is not dict)
        raise ApiError("invalid", f"expected an object, got {_kind(one)}", f"{where}[{place}]")
    if len(value) > most:
        raise ApiError("invalid", f"{len(value)} items exceed the maximum of {most}", where)
    return value


def text_of(content: Any, where: str, kinds: Sequence[str]) -> str:
    """The text of a content: a string, or a list of parts of these kinds, joined by line breaks as
    by vLLM."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = objects(content, where, MAX_MESSAGES)
    return "\n".join(part_text(one, f"{where}[{n}]", kinds) for n, one in enumerate(parts))


def part_text(part: Json, where: str, kinds: Sequence[str]) -> str:
    """The text of a part; a mark for one that the policy cannot read."""
    kind = part.get("type", "text")
    if kind not in kinds:
        if kind in LEFT_OUT:
            return f"[{kind} left out: the policy reads text]"
        shown = f"expected {' or '.join(kinds)}, got a part of type {kind!r:.60}"
        raise ApiError("unsupported", shown, f"{where}.type")
    key = {"refusal": "refusal", TOOL_REFERENCE: "tool_name"}.get(kind, "text")
    return get(part, key, str, "", f"{where}.")


def read_call(id: Any, name: Any, arguments: Any, where: str) -> ServedCall:
    """A call that a client returns; null are no arguments."""
    if not isinstance(id, str) or not isinstance(name, str) or not name:
        raise ApiError("invalid", "expected a call with an id and a name", where)
    if arguments is None or isinstance(arguments, dict):
        return ServedCall(id, name, arguments_text(arguments or {}))
    if not isinstance(arguments, str):
        raise ApiError("invalid", f"expected JSON as a string, got {_kind(arguments)}", where)
    return ServedCall(id, name, arguments)


class _Schema(Struct):
    """The parts of a JSON schema that renderers and parsers use."""

    type: str | list[str] | None = None
    properties: dict[str, _Schema | bool] | None = None
    anyOf: list[_Schema | bool] | None = None
    oneOf: list[_Schema | bool] | None = None
    enum: list[Any] | None = None
    required: list[str] | None = None
    items: _Schema | bool | list[Any] | None = None


def read_tool(tool: Mapping[str, Any], parameters: str, where: str) -> Json:
    """A tool in the renderers' form."""
    name, schema = get(tool, "name", str, "", where), get(tool, parameters, dict, {}, where)
    if not name:
        raise ApiError("invalid", "a tool needs a name", where + "name")
    try:
        convert(schema, _Schema)
    except ForeignError as error:
        raise ApiError("invalid", f"not a JSON schema: {error}", where + parameters) from error
    described = get(tool, "description", str, "", where)
    return {"name": name, "description": described, "parameters": {"type": "object", **schema}}


def stops(body: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Stop strings: one, or a list of them."""
    value = body.get(key)
    found = [value] if isinstance(value, str) else value or []
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        raise ApiError("invalid", "expected a non-empty string or a list of non-empty strings", key)
    if len(found) > MAX_STOPS:
        raise ApiError("invalid", f"expected at most {MAX_STOPS}, got {len(found)}", key)
    return tuple(found)


def earlier(id: str, prefix: str, handed: Handed, where: str) -> HandedTurn:
    """The reply of this id."""
    found = handed.get(id.removeprefix(prefix))
    if found is None:
        raise ApiError("invalid", f"no reply of this key has the id {id!r:.80}", where)
    return found


def instructed(messages: Sequence[Given], text: str, *, again: bool) -> list[Given]:
    """The messages after a system message of this text, if any; where a call continues an earlier
    one (`again`), it replaces that of the earlier one."""
    if not text:
        return [*messages]
    is_replaced = again and messages[0].role == "system"
    return [Given("system", text), *messages[is_replaced:]]


def in_order(messages: Sequence[Given]) -> Iterable[Given]:
    """The messages; the results of a turn in the order of its calls, since templates write no ids.
    A program that runs them at once returns them as they end."""
    order: dict[str, int] = {}
    for _, group in groupby(messages, lambda one: one.role == "tool"):
        found = [*group]
        yield from sorted(found, key=lambda one: order.get(one.answers, len(order)))
        order = {call.id: place for place, call in enumerate(found[-1].calls)}


def separated(messages: list[Given], ignored: set[str]) -> list[Given]:
    """The messages, with an empty one of the user after an empty turn of the policy that another
    turn follows, since templates begin a turn after a message of others."""
    empty = [place for place, one in enumerate(messages) if not (one.text or one.calls)]
    for place in reversed(empty):
        here, *then = messages[place : place + 2]
        if here.role == "assistant" and all(one.role == "assistant" for one in then):
            ignored.add("message.empty")
            messages.insert(place + 1, Given("user", ""))
    return messages


def checked(request: Request) -> Request:
    """The request, after checking that a turn can follow its messages."""
    roles = [one.role for one in request.messages]
    if ("tool", "tool") in pairwise(roles):
        request.messages = tuple(in_order(request.messages))
    if not request.messages:
        raise ApiError("invalid", "the request has no message", "messages")
    if roles[-1] == "assistant":
        what = "the last message is the assistant's; expected one of the user or a tool"
        raise ApiError("unsupported", what, "messages")
    called = {call.id for one in request.messages if one.calls for call in one.calls}
    if {one.answers for one in request.messages if one.role == "tool"} - called:
        request.ignored.add("tool_call_id")
    return request


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


# Conversions between the forms.


_COMPACT = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))
_SPACED = json.JSONEncoder(ensure_ascii=False)


def arguments_text(arguments: Mapping[str, Any], *, compact: bool = False) -> str:
    """Arguments in the client's JSON style, so that they are returned unchanged: with blanks for
    Python, without for JavaScript."""
    return (_COMPACT if compact else _SPACED).encode(arguments)


def as_message(given: Given, before: Sequence[Given] = ()) -> Message:
    """The message for a renderer; `before` has the earlier messages, with the name of the call that
    a result answers. Raises ApiError for arguments that are not a JSON object."""
    if given.role == "tool":
        calls = (call for one in reversed(before) for call in reversed(one.calls))
        name = given.name or next((call.name for call in calls if call.id == given.answers), None)
        return Message("tool", given.text, name=name)
    text = with_thoughts(given.thoughts, given.text) if given.thoughts else given.text
    return Message(given.role, text, tuple(map(_as_call, given.calls)))


def with_thoughts(thoughts: str, text: str) -> str:
    """A text that begins with its thoughts."""
    return f"{THOUGHT_OPEN}\n{thoughts}\n{THOUGHT_CLOSE}\n\n{text}"


def _as_call(call: ServedCall) -> ToolCall:
    try:
        arguments = decode(call.arguments or "{}")
    except ForeignError as error:
        raise ApiError(
            "invalid", f"the arguments of {call.name} are not valid JSON: {error}"
        ) from error
    if not isinstance(arguments, dict):
        raise ApiError("invalid", f"the arguments of {call.name} are not a JSON object")
    return ToolCall(call.name, arguments)


INPUT = "input"  # the only argument of a tool that takes one text


def input_text(arguments: Mapping[str, Any]) -> str:
    """The text that a tool of the type custom gets."""
    text = arguments.get(INPUT) if len(arguments) == 1 else None
    return text if isinstance(text, str) else arguments_text(arguments)


def turn_of(request: Request, constraints: Constraints) -> NextTurn:
    """Its requirements, as far as the engine enforces them."""
    return NextTurn(
        stop=request.stop,
        max_tokens=request.max_tokens,
        forced=request.forced,
        single=request.single,
        schema=request.schema if constraints == "all" else None,
    )


def served(turn: Turn, calls: Sequence[ToolCall], reply: str, request: Request) -> ServedTurn:
    """A turn with these calls as it is served; `reply` is the id of its reply."""

    def arguments(call: ToolCall) -> str:
        if call.name in request.custom:
            return arguments_text({INPUT: input_text(call.arguments)})
        return arguments_text(call.arguments, compact=request.compact)

    found = (
        ServedCall(f"call_{reply}_{place}", call.name, arguments(call))
        for place, call in enumerate(calls)
    )
    message = Given("assistant", turn.text, turn.thoughts, tuple(found))
    return ServedTurn(
        message=message,
        finish="tool_calls" if message.calls else turn.finish_reason,
        num_prompt_tokens=turn.num_prompt_tokens,
        num_tokens=turn.num_tokens,
        stop=turn.stop,
    )


def alteration(now: Given, then: Given) -> str:
    """The cause by which a returned message (`now`) differs from the served one (`then`)."""
    if now.thoughts != then.thoughts and now._replace(thoughts="") == then._replace(thoughts=""):
        return "thoughts_changed" if now.thoughts else "thoughts_dropped"
    if now.calls == then.calls:
        return "trimmed" if now.text.strip() == then.text.strip() else "text"
    if [call[1:] for call in now.calls] == [call[1:] for call in then.calls]:
        return "call_ids"
    if [call.name for call in now.calls] == [call.name for call in then.calls]:
        same = [_value(call) for call in now.calls] == [_value(call) for call in then.calls]
        return "json_rewritten" if same else "arguments"
    return "calls"


def _value(call: ServedCall) -> Any:
    try:
        return decode(call.arguments)
    except ForeignError:
        return call.arguments
