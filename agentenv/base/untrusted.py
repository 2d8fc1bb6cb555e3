"""Decoding of all untrusted input: replies of servers, frames of processes, arguments of tool
calls, files.

    try:
        rows = decode(reply.body, list[Row])
    except ForeignError as error:
        raise InfraError(f"{name}: {error}; expected a list of rows") from error

The caller converts the failure: to a ToolError that the policy reads, to an InfraError, or to an
error of a file or a configuration. An unconverted one fails its rollout, not the run.
"""

from __future__ import annotations

import ast
import json
from array import array
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar, overload

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from agentenv.base.errors import ForeignError

# Levels of nesting. Deeper values could be decoded, but would exceed the recursion limit of code
# that traverses them (an encoder, a template, `repr`), depending on its stack.
MAX_DEPTH = 100
MAX_ROW_CHARS = 1 << 20

T = TypeVar("T")

_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_OTHERS = bytes(set(range(256)) - set(b'[]{}"'))


@overload
def decode(data: bytes | bytearray | str, kind: type[T], *, packed: bool = ...) -> T: ...
@overload
def decode(data: bytes | bytearray | str, kind: Any = ..., *, packed: bool = ...) -> Any: ...
def decode(data: bytes | bytearray | str, kind: Any = Any, *, packed: bool = False) -> Any:
    """JSON, or MessagePack if `packed`, as a value of `kind`. Raises only ForeignError, for any
    data."""
    try:
        if isinstance(data, str):
            data = data.encode()
        read, is_open = _decoder(kind, packed)
        value = read(data)
        if is_open:
            _check_depth(data)
        return value
    except (ValueError, RecursionError, OverflowError) as error:  # msgspec's own are ValueErrors
        raise ForeignError(_reason(error)) from error


def decode_first(text: str, start: int = 0) -> tuple[Any, int]:
    """The JSON value at `start`, regardless of the text after it, and its end offset. Raises
    ForeignError."""
    try:
        end = _FIRST.raw_decode(text, start)[1]
    except (ValueError, RecursionError) as error:
        raise ForeignError(_reason(error)) from error
    return decode(text[start:end]), end


def _refused(constant: str) -> None:
    raise ValueError(f"{constant} is not valid JSON")


_FIRST = json.JSONDecoder(parse_int=str, parse_float=str, parse_constant=_refused)


def decode_loose(text: bytes | str) -> Any:
    """JSON as Python's encoder writes it, with NaN, for files of other programs. The depth of
    values that are larger than any row is not checked. Raises ForeignError."""
    try:
        text = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        value = json.loads(text)
        if "\\ud" in text or "\\uD" in text:  # it may be a lone surrogate
            json.dumps(value, ensure_ascii=False).encode()
        if len(text) <= MAX_ROW_CHARS:
            _check_depth(text.encode())
        return value
    except (ValueError, RecursionError) as error:
        raise ForeignError(_reason(error)) from error


def decode_python(text: str) -> Any:
    """A literal of Python. Raises ForeignError."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise ForeignError(_reason(error)) from error


def convert(value: Any, kind: type[T], *, strict: bool = True) -> T:
    """Convert a decoded value to `kind`. Raises ForeignError."""
    try:
        return msgspec.convert(value, kind, strict=strict)
    except (ValueError, RecursionError, OverflowError) as error:
        raise ForeignError(_reason(error)) from error


def decode_text(data: bytes) -> str:
    """Text in UTF-8. Raises ForeignError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ForeignError(_reason(error)) from error


def printable(text: str) -> str:
    """The text with a question mark for each lone surrogate, which encoders and tokenizers
    reject."""
    return text.encode("utf-8", "replace").decode()


def shortened(text: str, max_chars: int, gap: str = "\n...\n") -> str:
    """The text, or the head and tail of a text longer than `max_chars`."""
    tail = max_chars // 2
    head = max_chars - tail
    return text if len(text) <= max_chars else text[:head] + gap + text[len(text) - tail :]


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """The value with each text changed, also in nested dicts, lists and tuples."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: map_texts(one, change) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)([map_texts(one, change) for one in value])
    return value


@cache
def _decoder(kind: Any, packed: bool) -> tuple[Callable[[bytes | bytearray], Any], bool]:
    """The decoder of a type, and whether the type has a field for arbitrary JSON, nested to any
    depth."""
    if packed:
        return msgspec.msgpack.Decoder(kind).decode, False
    return msgspec.json.Decoder(kind).decode, "AnyType()" in repr(msgspec.inspect.type_info(kind))


def _check_depth(data: bytes | bytearray) -> None:
    """Raises ValueError for JSON that is nested too deeply."""
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    # without escaped quotes, every second piece between quotes is a string
    bare = data.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
    brackets = b"".join(bare.split(b'"')[::2]).translate(_STEPS)
    if max(accumulate(memoryview(brackets).cast("b")), default=0) > MAX_DEPTH:
        raise ValueError(f"nested over {MAX_DEPTH} levels deep")


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def packed(value: Struct | dict[str, Any]) -> bytes:
    """The value as MessagePack, arrays as bytes. Values of envs and policies are converted by
    `packable`; unknown types become text."""
    try:
        return _encode(value)
    except (UnicodeEncodeError, OverflowError, TypeError, RecursionError):
        return _encode_any(packable(value))


def packable(value: Any, above: tuple[int, ...] = ()) -> Any:
    """The value with lone surrogates escaped, with integers over 64 bits, keys of other types, and
    recursive or too deeply nested values as text. `above`: the ids of its containers."""
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, int) and value.bit_length() > 63:
        return str(value)
    if not isinstance(value, dict | list | tuple | Struct):
        return value
    if id(value) in above or len(above) > MAX_DEPTH:
        return _text(value)
    above = (*above, id(value))
    if isinstance(value, dict):
        return {packable(_text(key)): packable(one, above) for key, one in value.items()}
    if isinstance(value, Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
        return replace(value, **{name: packable(one, above) for name, one in fields.items()})
    return [packable(one, above) for one in value]


def _text(value: object) -> str:
    """The value's own text, if it can be computed."""
    try:
        return str(value)
    except Exception:  # a user's `__str__` may raise anything
        return f"<{type(value).__name__}>"


def _simple(value: object) -> object:
    return value.tobytes() if isinstance(value, array) else _text(value)


# A deterministic order is an error for keys that are not texts.
_encode = msgspec.msgpack.Encoder(enc_hook=_simple, order="deterministic").encode
_encode_any = msgspec.msgpack.Encoder(enc_hook=_simple).encode


_PYTHON_NAMES = {"True": "true", "False": "false", "None": "null"}
_TYPES: tuple[tuple[str, type], ...] = (  # bool first, since it is a subclass of int
    ("boolean", bool),
    ("integer", int),
    ("number", int),
    ("number", float),
    ("array", list),
    ("object", dict),
    ("null", type(None)),
)


def typed(text: str, schema: Any) -> Any:
    """The value of a text for a parameter of this schema: JSON of an allowed type, else the text
    itself, which the tool then rejects."""
    types = schema_types(schema)
    if types == {"string"}:
        return text
    try:
        value = decode(_PYTHON_NAMES.get(text.strip(), text))
    except ForeignError:
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in types:
        return int(value)
    if not types:
        return text if isinstance(value, str) else value
    kinds = {name for name, kind in _TYPES if type(value) is kind}
    return value if kinds & types else text


def schema_types(schema: Any) -> set[str]:
    """The JSON types that a parameter's schema allows; empty if it does not state them."""
    if not isinstance(schema, dict):
        return set()
    declared = schema.get("type") or ()
    types = {declared} if isinstance(declared, str) else set(map(str, declared))
    for choice in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        types |= schema_types(choice)
    if "enum" in schema and not types:
        types = {"string"} if all(isinstance(one, str) for one in schema["enum"]) else set()
    return types | ({"null"} if schema.get("nullable") else set())
