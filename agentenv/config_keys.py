"""Every key of a configuration, with type, default and meaning, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec
from msgspec import inspect as mi

from agentenv.config import struct_types, type_info, unwrap

REQUIRED = "required"


class Key(NamedTuple):
    """One key. `name` is dotted; name[kind].key belongs to one kind only, NAME and [n] stand for
    the entries of a table or list."""

    name: str
    type: str
    default: str
    meaning: str


def describe(config_type: type[msgspec.Struct]) -> Iterator[Key]:
    """All keys, in the order of the structs; a key that several kinds have comes once for each."""
    yield from _describe(type_info(config_type), "")


def _describe(kind: mi.Type, path: str) -> Iterator[Key]:
    for struct in struct_types(kind):
        variant = f"[{struct.tag}]" if struct.tag else ""
        for field in struct.fields:
            key = f"{path}{variant}.{field.encode_name}" if path else field.encode_name
            inner, suffix = _element(field.type)
            if struct_types(inner):
                yield from _describe(inner, key + suffix)
                continue
            meta = field.type.extra_json_schema if isinstance(field.type, mi.Metadata) else None
            meaning = str((meta or {}).get("description", ""))
            yield Key(key, _type_name(field.type), _default(field), meaning)


def _element(kind: mi.Type) -> tuple[mi.Type, str]:
    """What a table or list holds, and how its keys are written; other types are themselves."""
    bare = unwrap(kind)
    if isinstance(bare, mi.DictType):
        return bare.value_type, ".NAME"
    if isinstance(bare, mi.ListType):
        return bare.item_type, "[n]"
    return kind, ""


def _type_name(kind: mi.Type) -> str:
    kind = unwrap(kind)
    if isinstance(kind, mi.UnionType):
        return " | ".join(_type_name(part) for part in kind.types)
    if isinstance(kind, mi.LiteralType):
        return " | ".join(map(repr, kind.values))
    if isinstance(kind, mi.EnumType):
        return " | ".join(repr(str(member.value)) for member in kind.cls)
    if isinstance(kind, mi.DictType):
        return f"{{{_type_name(kind.key_type)}: {_type_name(kind.value_type)}}}"
    if isinstance(kind, mi.ListType | mi.VarTupleType):
        return f"[{_type_name(kind.item_type)}]"
    return type(kind).__name__.removesuffix("Type").lower()


def _default(field: mi.Field) -> str:
    if field.default is not msgspec.NODEFAULT:
        return str(msgspec.to_builtins(field.default))
    if field.default_factory is not msgspec.NODEFAULT:
        return str(msgspec.to_builtins(field.default_factory()))
    return REQUIRED
