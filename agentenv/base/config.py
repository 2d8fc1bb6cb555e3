"""Configuration: a TOML file plus `key.sub=value` overrides into typed, frozen structs.

Every key is a field of a msgspec struct, annotated with `about` or msgspec.Meta. An unknown key, a
wrong type or a value out of range is a ConfigError that names the key. Parts that come in several
kinds (an engine, an algorithm) are chosen by `name`, see `agentenv.base.registry`: a key that
belongs to another kind is unknown to the chosen one, so no key is ever silently ignored.
"""

from __future__ import annotations

import tomllib
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect as mi
from msgspec.structs import fields

from agentenv.base import registry
from agentenv.base.config_hints import hint_for, meant_file
from agentenv.base.errors import ConfigError, reported_as
from agentenv.base.model_files import place_on_hub
from agentenv.base.overrides import blaming, override_kinds
from agentenv.base.secrets import REDACTED, SECRETS
from agentenv.base.untrusted import map_texts

T = TypeVar("T", bound=msgspec.Struct)
Tree = dict[str, Any]
Reporter = Callable[[str], None]
Resolve = Callable[[str], Path]

# Marks of a key, in msgspec its `extra`: shown by --help; names files that must exist; names
# dataset files, which are searched before anything starts.
ESSENTIAL = {"essential": True}
PATH = {"path": True}
ROWS = {"path": True, "rows": True}


def about(description: str, *marks: dict[str, bool], **bounds: Any) -> msgspec.Meta:
    """The annotation of a key: its description, marks such as ESSENTIAL, and msgspec's bounds."""
    return msgspec.Meta(description=description, extra=dict(ChainMap(*marks)) or None, **bounds)


RUN = "{run}"  # in a path of a configuration: the run's directory


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
        raise ConfigError(f"{path}: no such configuration file{meant_file(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        is_yaml = path.suffix in (".yaml", ".yml")
        hint = "; expected TOML: docs/from-verl.md maps the keys of verl's YAML"
        hint = hint if is_yaml else ""
        raise ConfigError(f"{path}: not valid TOML: {error}{hint}") from error


def values_in(raw: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """All values in plain tables, each with its dotted key."""
    for name, value in raw.items():
        key = registry.joined(path, name)
        yield from values_in(value, key) if isinstance(value, Mapping) else ((key, value),)


def build_config(config_type: type[T], raw: Tree, source: str) -> T:
    """Check `raw` against the struct and convert it; errors name `source` and the key."""
    SECRETS.learn(raw)
    _check_keys(raw, registry.type_info(config_type), source)
    # of an entry that should be a table
    with reported_as(ConfigError, source, msgspec.ValidationError):
        return msgspec.convert(raw, config_type, strict=True, dec_hook=registry.decode_part)


def resolver(run: Path | str) -> Resolve:
    """A function from a text of the configuration to a path: {run} is the run's directory, and a
    hub id that was found (agentenv/base/model_files.py) becomes its location in the cache."""
    return lambda text: place_on_hub(text) or Path(text.replace(RUN, str(run)))


def substituted(value: Any, resolve: Resolve) -> Any:
    """Plain values with {run} replaced in all texts."""
    return map_texts(value, lambda text: str(resolve(text)) if RUN in text else text)


def to_plain(config: msgspec.Struct) -> Tree:
    """The resolved configuration as plain values without secrets, for saving with the run."""
    return cast(Tree, SECRETS.tree(msgspec.to_builtins(config)))


def changes(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Differences of two plain configurations, as "key: old -> new"."""
    if not isinstance(before, dict) or not isinstance(after, dict):
        if before != after:
            yield f"{path}: {before!r} -> {after!r}"
        return
    for key in [*before, *(key for key in after if key not in before)]:
        yield from changes(before.get(key), after.get(key), registry.joined(path, key))


def _check_keys(raw: Tree, kind: mi.Type, source: str) -> None:
    """Reject unknown keys with a suggestion, missing ones, and wrong types."""
    tables = list(_tables(raw, kind, "", source))
    for table, struct, path in tables:
        known = [field.encode_name for field in struct.fields]
        for key in table:
            if key in known or key == struct.tag_field:
                continue
            for_kind = f" for {path}.{struct.tag_field} = {struct.tag!r}" if struct.tag else ""
            hint = hint_for(kind, path, key, struct)
            raise ConfigError(
                f"{source}: {registry.joined(path, key)}: unknown key{for_kind}; {hint}"
            )
    for table, struct, path in tables:
        for field, info in zip(fields(struct.cls), struct.fields, strict=True):
            if field.encode_name in table:
                place = f"{source}: {registry.joined(path, field.encode_name)}"
                _check_value(table[field.encode_name], field.type, info.type, place)
    for table, struct, path in tables:
        for info in struct.fields:
            if info.required and info.encode_name not in table:
                name = registry.joined(path, info.encode_name)
                hint = f"--help-keys {name} explains it"
                raise ConfigError(f"{source}: {name} is missing; {hint}")


def _check_value(value: Any, annotation: Any, kind: mi.Type, place: str) -> None:
    """Reject a value of a wrong type, except tables, which are checked one by one."""
    if isinstance(value, dict | list) and registry.struct_types(
        registry.element(kind), loads=False
    ):
        return
    if REDACTED in str(value):
        raise ConfigError(f"{place}: a run does not keep secrets: set the key again")
    try:
        msgspec.convert(value, annotation, strict=True, dec_hook=registry.decode_part)
    except msgspec.ValidationError as error:
        if isinstance(value, str) and (choices := registry.choices_of(kind)):
            raise ConfigError(f"{place}: {registry.not_one_of(value, choices)}") from error
        reason = str(error).replace(" | null`", "`")  # TOML has no null
        raise ConfigError(f"{place}: {reason}: {value!r}") from error


def _tables(
    raw: Any, kind: mi.Type, path: str, source: str = ""
) -> Iterator[tuple[Tree, mi.StructType, str]]:
    """Every table of `raw` with its struct and its key; a table comes before its subtables. A table
    without a kind has the default one. Raises ConfigError for an unknown kind if there is a
    `source` to name; otherwise skips the table."""
    kind = registry.unwrap(kind)
    if isinstance(kind, mi.DictType) and isinstance(raw, dict):
        for key, value in raw.items():
            yield from _tables(value, kind.value_type, registry.joined(path, key), source)
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
                yield from _tables(value, types[key], registry.joined(path, key), source)


def _name_defaults(raw: Tree, struct: mi.StructType) -> None:
    """Set the default kind in subtables without a kind."""
    for field in struct.fields:
        value, tag = raw.get(field.encode_name), registry.tag_field_of(field.type)
        default = field.default
        if default is msgspec.NODEFAULT and field.default_factory is not msgspec.NODEFAULT:
            default = field.default_factory()
        if isinstance(value, dict) and tag and isinstance(default, msgspec.Struct):
            value.setdefault(tag, default.__struct_config__.tag)


def _chosen(raw: Tree, kind: mi.Type, path: str, source: str) -> mi.StructType | None:
    """The struct of `raw`; its tag selects one of several kinds."""
    group = registry.registry_of(kind)
    if group is not None:
        with reported_as(ConfigError, f"{source}: {registry.joined(path, 'name')}", ConfigError):
            return registry.struct_type(group.find(raw.get("name")))
    structs = registry.struct_types(kind)
    if len(structs) <= 1:
        return structs[0] if structs else None
    tag_field = str(structs[0].tag_field)
    tags = {str(struct.tag): struct for struct in structs}
    name = raw.get(tag_field)
    if name not in tags and source:
        known = registry.not_one_of(name, sorted(tags))
        raise ConfigError(f"{source}: {registry.joined(path, tag_field)}: {known}")
    return tags.get(name or "")


def registry_at(config_type: type[msgspec.Struct], key: str) -> registry.Registry[Any] | None:
    """The registry that a table's `name` selects from; None if it has no registry."""
    return registry.registry_of(registry.type_at(registry.type_info(config_type), key))
