"""Configuration: a TOML file plus `key.sub=value` overrides into typed, frozen structs.

Every key is a field of a msgspec struct, annotated with msgspec.Meta(description=...). An unknown
key, a wrong type or a value out of range is a ConfigError that names the key. Parts that come in
several kinds (an engine, an algorithm) are chosen by `name`, see `agentenv.base.registry`: a key
that belongs to another kind is unknown to the chosen one, so no key is ever silently ignored.
"""

from __future__ import annotations

import copy
import difflib
import logging
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect as mi
from msgspec.structs import fields

from agentenv.base.errors import ConfigError
from agentenv.base.model_files import place_on_hub
from agentenv.base.registry import (
    TAG,
    Registry,
    decode_part,
    element,
    not_one_of,
    registry_of,
    struct_type,
    struct_types,
    type_info,
    unwrap,
)

T = TypeVar("T", bound=msgspec.Struct)
Tree = dict[str, Any]
Reporter = Callable[[str], None]
Resolve = Callable[[str], Path]

# Marks of a key, set by Meta(extra=...): shown by --help; names files that must exist; names
# dataset files, which are searched before anything starts.
ESSENTIAL = {"essential": True}
PATH = {"path": True}
ROWS = {"path": True, "rows": True}
SAME = 0.8  # minimum similarity of a misspelled key to the right one
MAX_PLACES = 3  # suggestions for a key in other tables
RUN = "{run}"  # in a path of a configuration: the run's directory


logger = logging.getLogger(__name__)


def load_config(
    config_type: type[T],
    path: Path,
    overrides: Sequence[str] = (),
    *,
    report: Reporter | None = None,
    explain: Callable[[Tree, str], None] | None = None,
) -> T:
    """Read `path`, apply overrides such as "learner.grad_clip=0.5", check, and build the struct.

    `report` gets the keys that `override_kinds` removes. `explain` gets rejected values and the
    path, and may raise a better error. Raises ConfigError.
    """
    return resolve_config(
        config_type, read_toml(path), str(path), overrides, report=report, explain=explain
    )


def resolve_config(
    config_type: type[T],
    raw: Tree,
    source: str,
    overrides: Sequence[str] = (),
    *,
    report: Reporter | None = None,
    explain: Callable[[Tree, str], None] | None = None,
) -> T:
    """As `load_config`, from plain values, which it modifies; errors name `source`."""
    override_kinds(config_type, raw, overrides, report)
    with blaming(source, overrides):
        try:
            return build_config(config_type, raw, source)
        except ConfigError:
            if explain is not None:
                explain(raw, source)
            raise


def read_toml(path: Path) -> Tree:
    """The file's values. Raises ConfigError."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such configuration file{_meant(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        is_yaml = path.suffix in (".yaml", ".yml")
        hint = "; expected TOML: docs/from-verl.md maps the keys of verl's YAML"
        hint = hint if is_yaml else ""
        raise ConfigError(f"{path}: not valid TOML: {error}{hint}") from error


def _meant(path: Path) -> str:
    """A suggestion for a path that does not exist."""
    if "=" in path.name:
        return "; the file comes first, then key.sub=value"
    try:
        found = [one.name for one in path.parent.iterdir() if one.suffix == ".toml"]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, found, n=1, cutoff=0.4)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


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
    for line in _leave_out_old_kinds(raw, before, named, type_info(config_type), ""):
        (report or logger.warning)(line)


def keys_in(raw: Tree, path: str = "") -> Iterator[str]:
    """The dotted keys of all values in plain tables."""
    for name, value in raw.items():
        key = _join(path, name)
        yield from keys_in(value, key) if isinstance(value, dict) else (key,)


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


def build_config(config_type: type[T], raw: Tree, source: str) -> T:
    """Check `raw` against the struct and convert it; errors name `source` and the key."""
    _check_keys(raw, type_info(config_type), source)
    try:
        return msgspec.convert(raw, config_type, strict=True, dec_hook=decode_part)
    except msgspec.ValidationError as error:  # of an entry that should be a table
        raise ConfigError(f"{source}: {error}") from error


def resolver(run: Path | str) -> Resolve:
    """A function from a text of the configuration to a path: {run} is the run's directory, and a
    hub id that was found (agentenv/base/model_files.py) becomes its location in the cache."""
    return lambda text: place_on_hub(text) or Path(text.replace(RUN, str(run)))


def substituted(value: Any, resolve: Resolve) -> Any:
    """Plain values with {run} replaced in all texts."""
    if isinstance(value, str):
        return str(resolve(value)) if RUN in value else value
    if isinstance(value, dict):
        return {key: substituted(one, resolve) for key, one in value.items()}
    if isinstance(value, list):
        return [substituted(one, resolve) for one in value]
    return value


def to_plain(config: msgspec.Struct) -> Tree:
    """The resolved configuration as plain values, for saving with the run."""
    return cast(Tree, msgspec.to_builtins(config))


def changes(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Differences of two plain configurations, as "key: old -> new"."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        if before != after:
            yield f"{path}: {before!r} -> {after!r}"
        return
    for key in [*before, *(key for key in after if key not in before)]:
        yield from changes(before.get(key), after.get(key), _join(path, key))


def _leave_out_old_kinds(
    raw: Tree, before: Tree, named: set[str], kind: mi.Type, path: str
) -> Iterator[str]:
    for field in [field for struct in struct_types(kind) for field in struct.fields]:
        new, old = raw.get(field.encode_name), before.get(field.encode_name)
        if not isinstance(new, dict) or not isinstance(old, dict):
            continue
        key, tag = _join(path, field.encode_name), _tag_field(field.type)
        if not tag:
            yield from _leave_out_old_kinds(new, old, named, field.type, key)
            continue
        if new.get(tag) == old.get(tag):
            continue
        chosen, replaced = (_struct_named(one.get(tag), field.type) for one in (new, old))
        if chosen is not None:
            known = {part.encode_name for part in chosen.fields} | {tag}
            others = struct_types(field.type) if replaced is None else [replaced]
            of_others = {part.encode_name for struct in others for part in struct.fields}
            defaults = _defaults(replaced)
            gone = [name for name in new if name in old and name in of_others - known]
            gone = [name for name in gone if _join(key, name) not in named]
            values = {name: new.pop(name) for name in gone}
            lost = [f"{n} = {v!r}" for n, v in values.items() if v != defaults.get(n)]
            if lost:
                yield (
                    f"{key}.{tag} = {chosen.tag} does not have these keys, ignored: "
                    f"{', '.join(lost)}"
                )


def _struct_named(name: Any, kind: mi.Type) -> mi.StructType | None:
    """The struct of this name; a part may also be the user's own, module:Class."""
    registry = registry_of(kind)
    if registry is None:
        return next((one for one in struct_types(kind) if str(one.tag) == str(name)), None)
    with suppress(ConfigError):  # the check of keys reports it
        return struct_type(registry.find(name))
    return None


def _tag_field(kind: mi.Type) -> str:
    """The key that selects the kind of a table; empty if there is only one kind."""
    if registry_of(kind) is not None:
        return TAG
    structs = struct_types(kind)
    return str(structs[0].tag_field) if len(structs) > 1 else ""


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
    kind = unwrap(_type_at(type_info(config_type), key)) if key else None
    return isinstance(kind, mi.DictType) and bool(struct_types(kind.value_type))


def _is_plain_table(config_type: type[msgspec.Struct], key: str, override: str) -> bool:
    """Whether a key holds tables under user-chosen names, possibly none, or a table with such a
    key. Raises ConfigError for a table that has several kinds."""
    kind = unwrap(_type_at(type_info(config_type), key))
    if isinstance(kind, mi.DictType):
        return True
    registry = registry_of(kind)
    structs = struct_types(kind) if registry is None else []
    if not (structs or registry) or _may_be_none(config_type, key):
        return False
    if len(structs) == 1:
        fields = [field.encode_name for field in structs[0].fields]
        return any(_is_named(config_type, _join(key, name)) for name in fields)
    tag = _tag_field(kind)
    names = sorted(registry.names() if registry else (str(one.tag) for one in structs))
    raise ConfigError(
        f"override {override!r}: this table always exists; choose its kind by {key}.{tag} = one of "
        f"{names}"
    )


def _may_be_none(config_type: type[msgspec.Struct], key: str) -> bool:
    """Whether a key may be unset, and "none" is not one of its values."""
    kind = unwrap(_type_at(type_info(config_type), key))
    kinds = [unwrap(one) for one in kind.types] if isinstance(kind, mi.UnionType) else [kind]
    has_none = any(isinstance(one, mi.NoneType) for one in kinds)
    return has_none and "none" not in _choices(kind)


def _check_keys(raw: Tree, kind: mi.Type, source: str) -> None:
    """Reject unknown keys with a suggestion, missing ones, and wrong types."""
    tables = list(_tables(raw, kind, "", source))
    for table, struct, path in tables:
        known = [field.encode_name for field in struct.fields]
        for key in table:
            if key in known or key == struct.tag_field:
                continue
            for_kind = f" for {path}.{struct.tag_field} = {struct.tag!r}" if struct.tag else ""
            hint = _hint(kind, path, key, struct)
            raise ConfigError(f"{source}: {_join(path, key)}: unknown key{for_kind}; {hint}")
    for table, struct, path in tables:
        for field, info in zip(fields(struct.cls), struct.fields, strict=True):
            if field.encode_name in table:
                place = f"{source}: {_join(path, field.encode_name)}"
                _check_value(table[field.encode_name], field.type, info.type, place)
    for table, struct, path in tables:
        for info in struct.fields:
            if info.required and info.encode_name not in table:
                name = _join(path, info.encode_name)
                hint = f"--help-keys {name} explains it"
                raise ConfigError(f"{source}: {name} is missing; {hint}")


def _check_value(value: Any, annotation: Any, kind: mi.Type, place: str) -> None:
    """Reject a value of a wrong type, except tables, which are checked one by one."""
    if isinstance(value, dict | list) and struct_types(element(kind), loads=False):
        return
    try:
        msgspec.convert(value, annotation, strict=True, dec_hook=decode_part)
    except msgspec.ValidationError as error:
        if isinstance(value, str) and (choices := _choices(kind)):
            raise ConfigError(f"{place}: {not_one_of(value, choices)}") from error
        reason = str(error).replace(" | null`", "`")  # TOML has no null
        raise ConfigError(f"{place}: {reason}: {value!r}") from error


def _hint(kind: mi.Type, path: str, key: str, struct: mi.StructType) -> str:
    """A suggestion for an unknown key of a table of this struct."""
    field = f"{path}.{struct.tag_field}"
    kinds = struct_types(_type_at(kind, path)) if path else []
    having = [repr(one.tag) for one in kinds if key in {part.encode_name for part in one.fields}]
    if having:
        return (
            f"it is valid for {field} = {' or '.join(having)}; choose that too, or remove this key"
        )
    known = [part.encode_name for part in struct.fields]
    if difflib.get_close_matches(key, [struct.tag_field or ""], cutoff=SAME):
        return f"did you mean {field}?"
    for name in known:
        if len(key) > 1 and "".join(word[:1] for word in name.split("_")) == key:  # lr
            return f"did you mean {_join(path, name)}?"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    is_alike = bool(difflib.get_close_matches(key, near, cutoff=SAME))
    if places := [] if is_alike else _places(kind, key, cutoff=SAME if known else 1.0):
        return f"did you mean {' or '.join(places)}?"
    if near:
        return f"did you mean {_join(path, near[0])}?"
    if not known:
        return (
            f"this kind has no keys; other kinds: {[one.tag for one in kinds if one is not struct]}"
        )
    return f"known: {sorted(known)}" + (
        "" if path else "; or does the file belong to another command?"
    )


def _places(kind: mi.Type, key: str, cutoff: float) -> list[str]:
    """The keys of other tables with this name, or else with a similar one (`cutoff`); only those
    of the shallowest tables, since sets repeat the keys of the tables above them."""
    names = list(dict.fromkeys(_all_keys(kind)))
    leaves = [name.rpartition(".")[2] for name in names]
    near = difflib.get_close_matches(key, set(leaves), n=1, cutoff=cutoff)
    found = [name for name, leaf in zip(names, leaves, strict=True) if leaf in near]
    least = min((name.count(".") for name in found), default=0)
    return [name for name in found if name.count(".") == least][:MAX_PLACES]


def _all_keys(kind: mi.Type, path: str = "", above: tuple[type, ...] = ()) -> Iterator[str]:
    """The dotted keys of all tables below; NAME stands for a user-chosen name."""
    kind = unwrap(kind)
    if isinstance(kind, mi.DictType):
        kind, path = kind.value_type, _join(path, "NAME")
    for struct in struct_types(kind):
        for field in struct.fields if struct.cls not in above else ():
            name = _join(path, field.encode_name)
            yield name
            yield from _all_keys(field.type, name, (*above, struct.cls))


def _tables(
    raw: Any, kind: mi.Type, path: str, source: str = ""
) -> Iterator[tuple[Tree, mi.StructType, str]]:
    """Every table of `raw` with its struct and its key; a table comes before its subtables. A table
    without a kind has the default one. Raises ConfigError for an unknown kind if there is a
    `source` to name; otherwise skips the table."""
    kind = unwrap(kind)
    if isinstance(kind, mi.DictType) and isinstance(raw, dict):
        for key, value in raw.items():
            yield from _tables(value, kind.value_type, _join(path, key), source)
    elif isinstance(kind, mi.ListType | mi.VarTupleType) and isinstance(raw, list):
        for number, value in enumerate(raw):
            yield from _tables(value, kind.item_type, f"{path}[{number}]", source)
    elif isinstance(raw, dict):
        struct = _chosen(raw, kind, path, source)
        if struct is None:
            return
        _name_defaults(raw, struct)
        yield raw, struct, path
        types = {field.encode_name: field.type for field in struct.fields}
        for key, value in raw.items():
            if key in types:
                yield from _tables(value, types[key], _join(path, key), source)


def _name_defaults(raw: Tree, struct: mi.StructType) -> None:
    """Set the default kind in subtables without a kind."""
    for field in struct.fields:
        value, tag = raw.get(field.encode_name), _tag_field(field.type)
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if isinstance(value, dict) and tag and isinstance(default, msgspec.Struct):
            value.setdefault(tag, default.__struct_config__.tag)


def _chosen(raw: Tree, kind: mi.Type, path: str, source: str) -> mi.StructType | None:
    """The struct of `raw`; its tag selects one of several kinds."""
    registry = registry_of(kind)
    if registry is not None:
        try:
            return struct_type(registry.find(raw.get("name")))
        except ConfigError as error:
            raise ConfigError(f"{source}: {_join(path, 'name')}: {error}") from error
    structs = struct_types(kind)
    if len(structs) <= 1:
        return structs[0] if structs else None
    tag_field = str(structs[0].tag_field)
    tags = {str(struct.tag): struct for struct in structs}
    name = raw.get(tag_field)
    if name not in tags and not source:
        return None
    if name not in tags:
        raise ConfigError(f"{source}: {_join(path, tag_field)}: {not_one_of(name, sorted(tags))}")
    return tags[name]


def registry_at(config_type: type[msgspec.Struct], key: str) -> Registry[Any] | None:
    """The registry that a table's `name` selects from; None if it has no registry."""
    return registry_of(_type_at(type_info(config_type), key))


def _lookup(raw: Any, key: str) -> Any:
    for part in re.findall(r"[^.\[\]]+", key):
        if isinstance(raw, list) and part.isdecimal() and int(part) < len(raw):
            raw = raw[int(part)]
        else:
            raw = raw.get(part) if isinstance(raw, dict) else None
    return raw


def _choices(kind: mi.Type) -> list[str]:
    """The allowed texts of a key; empty if it is not restricted."""
    kind = unwrap(kind)
    kinds = [*map(unwrap, kind.types if isinstance(kind, mi.UnionType) else [kind])]
    texts = [str(value) for one in kinds if isinstance(one, mi.LiteralType) for value in one.values]
    is_switch = texts and any(isinstance(one, mi.BoolType) for one in kinds)
    return [*texts, "true", "false"] if is_switch else texts


def _type_at(kind: mi.Type, key: str) -> mi.Type:
    """The type of a key; AnyType in a list or below a user-chosen name."""
    for part in key.split("."):
        fields = [field for struct in struct_types(kind) for field in struct.fields]
        kind = next((one.type for one in fields if one.encode_name == part), mi.AnyType())
    return kind


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
