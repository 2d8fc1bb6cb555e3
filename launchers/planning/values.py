"""The values of a configuration, and which of them are not the defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec.structs import fields


class Value(NamedTuple):
    """One key with its value as TOML would have it; `chosen`: it is not the default."""

    key: str
    text: str
    chosen: bool


def values_of(config: Struct) -> Iterator[Value]:
    """Every value, in the order of the structs. A table that is not there is one value."""
    return _of_struct(config, None, "")


def shown(value: Any) -> str:
    """As TOML has it; none as an empty text of its own."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        inner = ", ".join(f"{name} = {shown(item)}" for name, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return json.dumps(value, ensure_ascii=False)


def _of_struct(config: Struct, base: Struct | None, path: str) -> Iterator[Value]:
    """`base` is the default for all of it, if there is one of the same kind."""
    tag = config.__struct_config__.tag
    if tag is not None:
        field = f"{path}.{config.__struct_config__.tag_field}"
        yield Value(field, shown(tag), chosen=base is None)
    for part in fields(type(config)):
        key = f"{path}.{part.encode_name}" if path else part.encode_name
        default = part.default
        if base is not None:
            default = getattr(base, part.name)
        elif default is NODEFAULT and part.default_factory is not NODEFAULT:
            default = part.default_factory()
        yield from _of_value(key, getattr(config, part.name), default)


def _of_value(key: str, value: Any, default: Any) -> Iterator[Value]:
    if isinstance(value, Struct):
        yield from _of_struct(value, default if type(default) is type(value) else None, key)
    elif isinstance(value, dict) and value and all(isinstance(v, Struct) for v in value.values()):
        for name, item in value.items():
            yield from _of_value(f"{key}.{name}", item, NODEFAULT)
    elif isinstance(value, list) and value and all(isinstance(v, Struct) for v in value):
        for number, item in enumerate(value):
            yield from _of_value(f"{key}[{number}]", item, NODEFAULT)
    else:
        yield Value(key, shown(msgspec.to_builtins(value)), chosen=value != default)
