"""Configuration: a TOML file plus `key.sub=value` overrides into typed, frozen structs.

Every key is a field of a msgspec struct, annotated with msgspec.Meta(description=...). An unknown
key, a wrong type or a value out of range is a ConfigError that names the key. Parts that come in
several kinds (an engine, an algorithm) are tagged unions on `name`: a key that belongs to another
kind is unknown to the chosen one, so no key is ever silently ignored.
"""

from __future__ import annotations

import copy
import difflib
import functools
import logging
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect as mi

from agentenv.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)
Tree = dict[str, Any]
_type_info = functools.cache(mi.type_info)  # costs milliseconds, and some envs ask each time
REQUIRED = "required"

logger = logging.getLogger(__name__)


def load_config(config_type: type[T], path: Path, overrides: Sequence[str] = ()) -> T:
    """Read `path`, apply overrides such as "learner.grad_clip=0.5", check, and build the struct.

    An override that chooses another kind of a part (algorithm.name=grpo) leaves out the file's
    keys that belong to the old kind only, with a warning.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such configuration file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    override_kinds(config_type, raw, overrides)
    return build_config(config_type, raw, str(path))


def override_kinds(config_type: type[T], raw: Tree, overrides: Sequence[str]) -> None:
    """Apply overrides to `raw`; keys that belong only to a kind that they replace are left out."""
    before = copy.deepcopy(raw)
    apply_overrides(raw, overrides)
    _leave_out_old_kinds(raw, before, _type_info(config_type), "")


def apply_overrides(raw: Tree, overrides: Sequence[str]) -> None:
    """Set the keys of `key.sub=value` texts in `raw`; a value that is no TOML is a text."""
    for override in overrides:
        _apply(raw, override)


def build_config(config_type: type[T], raw: Tree, source: str) -> T:
    """Check `raw` against the struct and convert it; errors name `source` and the key."""
    _check_keys(raw, _type_info(config_type), "", source)
    try:
        return msgspec.convert(raw, config_type, strict=True)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$")
        key = where.rstrip("`").lstrip(".")
        value = _lookup(raw, key)
        got = "" if value is None else f", got {value!r}"
        raise ConfigError(f"{source}: {key or 'the configuration'}: {reason}{got}") from error


def describe(config_type: type[msgspec.Struct]) -> Iterator[tuple[str, str, str, str]]:
    """(key, type, default, meaning) of every key, for --help."""
    yield from _describe(_type_info(config_type), "")


def to_plain(config: msgspec.Struct) -> Tree:
    """The resolved configuration as plain values, for saving with the run."""
    return cast(Tree, msgspec.to_builtins(config))


def changes(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """What differs between two plain configurations, as "key: old -> new"."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        if before != after:
            yield f"{path}: {before!r} -> {after!r}"
        return
    for key in [*before, *(key for key in after if key not in before)]:
        yield from changes(before.get(key), after.get(key), _join(path, key))


def _leave_out_old_kinds(raw: Tree, before: Tree, kind: mi.Type, path: str) -> None:
    for field in [field for struct in _structs(kind) for field in struct.fields]:
        new, old = raw.get(field.encode_name), before.get(field.encode_name)
        structs = {str(struct.tag): struct for struct in _structs(field.type)}
        if not isinstance(new, dict) or not isinstance(old, dict) or not structs:
            continue
        key, tag = _join(path, field.encode_name), str(next(iter(structs.values())).tag_field)
        chosen = structs.get(str(new.get(tag)))
        if len(structs) == 1:
            _leave_out_old_kinds(new, old, field.type, key)
        elif chosen is not None and new.get(tag) != old.get(tag):
            known = {part.encode_name for part in chosen.fields} | {tag}
            defaults = _defaults(structs.get(str(old.get(tag))))
            for name in [name for name in new if name in old and name not in known]:
                if new.pop(name) != defaults.get(name):
                    logger.warning("%s.%s is left out: %s has no such key", key, name, chosen.tag)


def _defaults(struct: mi.StructType | None) -> Tree:
    """Plain values of the keys that have a default."""
    fields = () if struct is None else struct.fields
    return {
        field.encode_name: msgspec.to_builtins(field.default)
        for field in fields
        if field.default is not msgspec.NODEFAULT
    }


def _apply(raw: Tree, override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form key.sub=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string
    *parents, last = key.strip().split(".")
    place = raw
    for parent in parents:
        place = place.setdefault(parent, {})
        if not isinstance(place, dict):
            raise ConfigError(f"override {override!r}: {parent} is a value, not a table")
    place[last] = value


def _check_keys(raw: Any, kind: mi.Type, path: str, source: str) -> None:
    """Refuse unknown keys with the nearest known one; types are msgspec's business."""
    kind = _unwrap(kind)
    if isinstance(kind, mi.DictType) and isinstance(raw, dict):
        for key, value in raw.items():
            _check_keys(value, kind.value_type, _join(path, key), source)
        return
    if isinstance(kind, mi.ListType | mi.VarTupleType) and isinstance(raw, list):
        for number, value in enumerate(raw):
            _check_keys(value, kind.item_type, f"{path}[{number}]", source)
        return
    chosen = _chosen(raw, kind, path, source)
    if chosen is None or not isinstance(raw, dict):
        return
    known = {field.encode_name: field.type for field in chosen.fields}
    for key, value in raw.items():
        if key in known:
            _check_keys(value, known[key], _join(path, key), source)
        elif key != chosen.tag_field:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {_join(path, near[0])}?" if near else f"known: {sorted(known)}"
            for_kind = f" for {path}.{chosen.tag_field} = {chosen.tag!r}" if chosen.tag else ""
            raise ConfigError(f"{source}: {_join(path, key)}: unknown key{for_kind}; {hint}")


def _chosen(raw: Any, kind: mi.Type, path: str, source: str) -> mi.StructType | None:
    """The struct that describes `raw`: of a tagged union the one its tag names."""
    structs = _structs(kind)
    if len(structs) <= 1 or not isinstance(raw, dict):
        return structs[0] if structs else None
    tag_field = str(structs[0].tag_field)
    tags = {str(struct.tag): struct for struct in structs}
    name = raw.get(tag_field)
    if name not in tags:
        near = difflib.get_close_matches(str(name), tags, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"{source}: {_join(path, tag_field)}: expected one of {sorted(tags)}, "
            f"got {name!r}{hint}"
        )
    return tags[name]


def _structs(kind: mi.Type) -> list[mi.StructType]:
    kind = _unwrap(kind)
    if isinstance(kind, mi.UnionType):
        return [struct for part in kind.types for struct in _structs(part)]
    return [kind] if isinstance(kind, mi.StructType) else []


def _unwrap(kind: mi.Type) -> mi.Type:
    return _unwrap(kind.type) if isinstance(kind, mi.Metadata) else kind


def _describe(kind: mi.Type, path: str) -> Iterator[tuple[str, str, str, str]]:
    for struct in _structs(kind):
        variant = f"[{struct.tag}]" if struct.tag else ""
        for field in struct.fields:
            key = f"{path}{variant}.{field.encode_name}" if path else field.encode_name
            inner, suffix = _element(field.type)
            if _structs(inner):
                yield from _describe(inner, key + suffix)
                continue
            meta = field.type.extra_json_schema if isinstance(field.type, mi.Metadata) else None
            meaning = str((meta or {}).get("description", ""))
            yield key, _type_name(field.type), _default(field), meaning


def _element(kind: mi.Type) -> tuple[mi.Type, str]:
    """What a table or list holds, and how its keys are written; other types are themselves."""
    bare = _unwrap(kind)
    if isinstance(bare, mi.DictType):
        return bare.value_type, ".NAME"
    if isinstance(bare, mi.ListType):
        return bare.item_type, "[n]"
    return kind, ""


def _type_name(kind: mi.Type) -> str:
    kind = _unwrap(kind)
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


def _lookup(raw: Any, key: str) -> Any:
    for part in key.split("."):
        raw = raw.get(part) if isinstance(raw, dict) else None
    return raw


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
