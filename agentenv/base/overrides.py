"""Overrides of a configuration: `key.sub=value` texts, and the kinds of parts that they change."""

from __future__ import annotations

import copy
import logging
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import msgspec
from msgspec import inspect as mi

from agentenv.base import registry
from agentenv.base.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)
Tree = dict[str, Any]
Reporter = Callable[[str], None]

logger = logging.getLogger(__name__)


def override_kinds(
    config_type: type[T], raw: Tree, overrides: Sequence[str], report: Reporter | None = None
) -> None:
    """Apply overrides to `raw`. If one selects another kind of a part (algorithm.name=grpo), keys
    that only the old kind has are removed, unless they are overrides themselves; `report` reports
    them, by default as a warning."""
    before = copy.deepcopy(raw)
    apply_overrides(raw, overrides, config_type)
    named = {override.partition("=")[0].strip() for override in overrides}
    leave_out_old_kinds(config_type, raw, before, named, report)


def leave_out_old_kinds(
    config_type: type[T], raw: Tree, before: Tree, named: set[str], report: Reporter | None = None
) -> None:
    """If a part of `raw` has another kind than in `before`, remove the keys that only the old kind
    has, except those in `named`; `report` reports each that was set.
    """
    for line in _leave_out_old_kinds(raw, before, named, registry.type_info(config_type), ""):
        (report or logger.warning)(line)


@contextmanager
def blaming(source: str, overrides: Sequence[str]) -> Iterator[None]:
    """Within the block, a ConfigError about a key of `source` (or of one of its sets) that an
    override has set names the override."""
    try:
        yield
    except ConfigError as error:
        text = str(error).removeprefix(f"{source}: ")
        key = re.sub(r"^sets\.[^.]+\.", "", re.split(r": | = ", text, maxsplit=1)[0])
        for override in reversed(overrides) if text != str(error) else ():  # the last one holds
            name = override.partition("=")[0].strip()
            is_below = name.startswith(f"{key}.") and f"{key}: unknown key" in text
            if key == name or is_below or key.startswith((f"{name}.", f"{name}[")):
                raise ConfigError(f"{override!r} on the command line: {text}") from error
        raise


def apply_overrides(
    raw: Tree, overrides: Sequence[str], config_type: type[msgspec.Struct] | None = None
) -> None:
    """Set the keys of `key.sub=value` texts in `raw`; a value that is not TOML is a string, and
    `none` removes an optional table or value of `config_type`. Raises ConfigError, also for `none`
    on a table that must exist.
    """
    for override in overrides:
        key, value = _read(override)
        if value == "none" and config_type is not None:
            path, _, last = key.rpartition(".")
            if _is_named(config_type, path) or _is_plain_table(config_type, key, override):
                place = _lookup(raw, path) if path else raw
                if isinstance(place, dict):
                    place.pop(last, None)
                continue
            value = None if _may_be_none(config_type, key) else value
        *parents, last = key.split(".")
        place = raw
        for parent in parents:
            if place.get(parent) is None:
                place[parent] = {}
            place = place[parent]
            if not isinstance(place, dict):
                raise ConfigError(f"override {override!r}: {parent} is a value, not a table")
        place[last] = value


def _leave_out_old_kinds(
    raw: Tree, before: Tree, named: set[str], kind: mi.Type, path: str
) -> Iterator[str]:
    for field in [field for struct in registry.struct_types(kind) for field in struct.fields]:
        new, old = raw.get(field.encode_name), before.get(field.encode_name)
        if not isinstance(new, dict) or not isinstance(old, dict):
            continue
        key, tag = registry.joined(path, field.encode_name), registry.tag_field_of(field.type)
        if not tag:
            yield from _leave_out_old_kinds(new, old, named, field.type, key)
            continue
        if new.get(tag) == old.get(tag):
            continue
        chosen, replaced = (_struct_named(one.get(tag), field.type) for one in (new, old))
        if chosen is not None:
            known = {part.encode_name for part in chosen.fields} | {tag}
            others = registry.struct_types(field.type) if replaced is None else [replaced]
            of_others = {part.encode_name for struct in others for part in struct.fields}
            defaults = _defaults(replaced)
            gone = [name for name in new if name in old and name in of_others - known]
            gone = [name for name in gone if registry.joined(key, name) not in named]
            values = {name: new.pop(name) for name in gone}
            lost = [f"{n} = {v!r}" for n, v in values.items() if v != defaults.get(n)]
            if lost:
                yield (
                    f"{key}.{tag} = {chosen.tag} does not have these keys, ignored: "
                    f"{', '.join(lost)}"
                )


def _struct_named(name: Any, kind: mi.Type) -> mi.StructType | None:
    """The struct of this name; a part may also be the user's own, module:Class."""
    group = registry.registry_of(kind)
    if group is None:
        return next((one for one in registry.struct_types(kind) if str(one.tag) == str(name)), None)
    with suppress(ConfigError):  # the check of keys reports it
        return registry.struct_type(group.find(name))
    return None


def _defaults(struct: mi.StructType | None) -> Tree:
    """Plain values of the keys that have a default."""
    fields = () if struct is None else struct.fields
    return {
        field.encode_name: msgspec.to_builtins(field.default)
        for field in fields
        if field.default is not msgspec.NODEFAULT
    }


def _read(override: str) -> tuple[str, Any]:
    """Key and value."""
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"override {override!r} is not of the form key.sub=value")
    try:
        return key.strip(), tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return key.strip(), text  # a bare word is a string


def _is_named(config_type: type[msgspec.Struct], key: str) -> bool:
    """Whether a key holds tables under user-chosen names."""
    kind = registry.unwrap(registry.type_at(registry.type_info(config_type), key)) if key else None
    return isinstance(kind, mi.DictType) and bool(registry.struct_types(kind.value_type))


def _is_plain_table(config_type: type[msgspec.Struct], key: str, override: str) -> bool:
    """Whether a key holds tables under user-chosen names, possibly none, or a table with such a
    key. Raises ConfigError for a table that has several kinds."""
    kind = registry.unwrap(registry.type_at(registry.type_info(config_type), key))
    if isinstance(kind, mi.DictType):
        return True
    group = registry.registry_of(kind)
    structs = registry.struct_types(kind) if group is None else []
    if not (structs or group) or _may_be_none(config_type, key):
        return False
    if len(structs) == 1:
        fields = [field.encode_name for field in structs[0].fields]
        return any(_is_named(config_type, registry.joined(key, name)) for name in fields)
    tag = registry.tag_field_of(kind)
    names = sorted(group.names() if group else (str(one.tag) for one in structs))
    raise ConfigError(
        f"override {override!r}: this table always exists; choose its kind by {key}.{tag} = one of "
        f"{names}"
    )


def _may_be_none(config_type: type[msgspec.Struct], key: str) -> bool:
    """Whether a key may be unset, and "none" is not one of its values."""
    kind = registry.unwrap(registry.type_at(registry.type_info(config_type), key))
    kinds = (
        [registry.unwrap(one) for one in kind.types] if isinstance(kind, mi.UnionType) else [kind]
    )
    has_none = any(isinstance(one, mi.NoneType) for one in kinds)
    return has_none and "none" not in registry.choices_of(kind)


def _lookup(raw: Any, key: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(raw, list) and part.isdecimal() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            raw = raw.get(part) if isinstance(raw, dict) else None
    return raw
