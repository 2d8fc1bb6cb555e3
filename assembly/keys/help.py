"""Help on configuration keys: type, default and meaning; and equivalents of verl's keys in a
rejected configuration.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import NODEFAULT, Struct
from msgspec import inspect as mi
from msgspec.structs import fields

from agentenv.base import registry
from agentenv.base.config import read_toml, registry_at, values_in
from agentenv.base.errors import ConfigError

REQUIRED = "required"
TABLE = "table"
SUFFIX = {mi.DictType: ".NAME", mi.ListType: "[n]", mi.VarTupleType: "[n]"}  # of entries


class Key(NamedTuple):
    """A key. In its dotted name, NAME and [n] stand for the entries of a table or list. `kinds`:
    the kinds of the part in `table` that have the key; empty: all kinds, or the part has none."""

    name: str
    type: str
    default: str
    meaning: str
    essential: bool = False
    table: str = ""
    kinds: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """The name with its kinds, such as algorithm[arpo|aepo].beam_size."""
        if not self.kinds:
            return self.name
        return f"{self.table}[{'|'.join(self.kinds)}]{self.name.removeprefix(self.table)}"


def describe(
    config_type: type[msgspec.Struct], *, once: bool = False, loads: bool = True
) -> list[Key]:
    """All keys, in the order of the structs. Kinds of a part with the same key share one entry.
    With `once`, a table in several places is described only at the shortest name, and is one key
    elsewhere. Without `loads`, no part that is chosen by name is loaded: its table has the keys of
    their common base."""
    info = registry.type_info(config_type)
    homes = _homes(info, "", loads) if once else {}
    of_key: dict[Key, list[str]] = {}
    of_table: dict[str, set[str]] = {}
    for key in _describe(info, KeyPlace(), homes, loads):
        of_key.setdefault(key._replace(kinds=()), []).extend(key.kinds)
        of_table.setdefault(key.table, set()).update(key.kinds)
    return [
        key if set(kinds) == of_table[key.table] else key._replace(kinds=tuple(kinds))
        for key, kinds in of_key.items()
    ]


class KeyPlace(NamedTuple):
    """The place of keys: below `path`, and for `kinds` of the part in `table`."""

    path: str = ""
    table: str = ""
    kinds: tuple[str, ...] = ()


Tables = tuple[type, ...]


def _describe(
    kind: mi.Type, place: KeyPlace, homes: dict[Tables, str], loads: bool
) -> Iterator[Key]:
    """The keys of a table, separately for each kind."""
    for struct, field, name, inner in _fields(kind, place.path, loads):
        own = place
        if struct.tag is not None and not place.kinds:
            own = KeyPlace(place.path, place.path, (str(struct.tag),))
        structs = registry.struct_types(inner, loads=loads)
        is_essential = bool(registry.marks_of(field.type).get("essential"))
        meaning, where = _description(field.type), (own.table, own.kinds)
        if not structs:
            default = _default(field)
            yield Key(name, _type_name(field.type), default, meaning, is_essential, *where)
            continue
        home = homes.get(_tables(structs), name)
        if home != name:
            yield Key(name, TABLE, "", f"the keys of {home}", False, *where)
            continue
        kinds = _kinds(inner, structs, loads)
        if len(kinds) > 1:
            chosen = getattr(field.default, "__struct_config__", None)
            tag = REQUIRED if chosen is None else str(chosen.tag)
            text = meaning or f"which {field.encode_name}"
            key = f"{name}.{structs[0].tag_field or registry.TAG}"
            yield Key(key, " | ".join(map(repr, kinds)), tag, text, is_essential, *where)
        yield from _describe(inner, own._replace(path=name), homes, loads)


def _kinds(kind: mi.Type, structs: Sequence[mi.StructType], loads: bool) -> list[str]:
    """The names of the kinds of a table."""
    group = None if loads else registry.registry_of(kind)
    return [str(one.tag) for one in structs] if group is None else group.names()


def _fields(
    kind: mi.Type, path: str, loads: bool
) -> Iterator[tuple[mi.StructType, mi.Field, str, mi.Type]]:
    """(struct, field, key, inner type) of each field of a table; the inner type of a table or list
    is that of its entries."""
    for struct in registry.struct_types(kind, loads=loads):
        for field in struct.fields:
            inner = registry.element(field.type)
            suffix = "" if inner is field.type else SUFFIX[type(registry.unwrap(field.type))]
            name = field.encode_name + (suffix if registry.struct_types(inner, loads=loads) else "")
            yield struct, field, registry.joined(path, name), inner


def _tables(structs: Sequence[mi.StructType]) -> Tables:
    return tuple(struct.cls for struct in structs)


def _homes(kind: mi.Type, path: str, loads: bool) -> dict[Tables, str]:
    """The shortest key of every table in `kind`; of equally short ones, the first."""
    found: dict[Tables, str] = {}
    for _, _, key, inner in _fields(kind, path, loads):
        if structs := registry.struct_types(inner, loads=loads):
            for tables, home in {_tables(structs): key, **_homes(inner, key, loads)}.items():
                if tables not in found or home.count(".") < found[tables].count("."):
                    found[tables] = home
    return found


def _description(kind: mi.Type) -> str:
    meta = kind.extra_json_schema if isinstance(kind, mi.Metadata) else None
    return str((meta or {}).get("description", ""))


def _type_name(kind: mi.Type) -> str:
    if registry.registry_of(kind) is not None:
        return "table"
    kind = registry.unwrap(kind)
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


# The configuration keys in --help and --help-keys.


class KeysParser(argparse.ArgumentParser):
    """The parser of a command with a configuration. Its --help ends with tables and essential keys,
    which are looked up only then, since that is slow."""

    config_type: type[msgspec.Struct] | None = None
    given: Sequence[str] = ()  # the arguments

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.given = sys.argv[1:] if args is None else list(args)
        return super().parse_known_args(args, namespace)

    def format_help(self) -> str:
        if self.config_type is not None:
            self.epilog = overview(self.config_type)
        return super().format_help()


class HelpKeys(argparse.Action):
    """--help-keys [PREFIX]: print the keys of a table and end."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        prefix, config_type = str(values or ""), parser.config_type
        registry.import_from_working_directory()
        try:
            for table, name in _named(" ".join([prefix, *parser.given])):
                group = registry_at(config_type, table)
                if group is not None:
                    group.find(name)
        except ConfigError as error:
            parser.error(f"--help-keys: {error}")
        keys = describe(config_type, once=not prefix)
        found = select(keys, prefix)
        if not found:
            tables = sorted({key.name.partition(".")[0] for key in keys})
            kinds = [f"{key.name.rpartition('.')[0]}.{kind}" for key in keys for kind in key.kinds]
            known = [*tables, *kinds, *(key.name for key in keys)]
            hint = registry.meant(prefix, known, f"tables: {', '.join(tables)}")
            parser.error(f"--help-keys: no key begins with {prefix!r}; {hint}")
        sys.stdout.write(key_list(found) + "\n")
        parser.exit()


def _named(text: str) -> list[tuple[str, str]]:
    """(table, class) of each custom part on a command line."""
    found = re.findall(r"(?:^|\s)([\w.]+)\.name=([\w.]+:\w+)", text)
    return found + re.findall(r"^(\w+(?:\.own)?)\.([\w.]+:\w+)", text)


def add_key_help(parser: KeysParser, config_type: type[msgspec.Struct]) -> None:
    """Add tables and essential keys to the end of --help, and add --help-keys."""
    parser.config_type = config_type
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--help-keys",
        nargs="?",
        action=HelpKeys,
        metavar="PREFIX",
        help="show every configuration key, or those of a table or kind (algorithm, "
        "algorithm.arpo, learner.lora): type, default, meaning",
    )


def overview(config_type: type[msgspec.Struct]) -> str:
    """A line for each table of the configuration, and one for each of its essential keys."""
    info = registry.type_info(config_type)
    assert isinstance(info, mi.StructType)
    keys = essential_keys(config_type)
    lines = ["tables and essential keys, given in the file or as table.key=value:"]
    for field in info.fields:
        lines.append(_line(f"  {field.encode_name} ", 14, "", _meaning(field)))
        for entry in keys:
            if re.match(rf"{field.encode_name}\b", entry.name):
                default = "" if entry.default in ("", REQUIRED) else entry.default
                lines.append(_line(f"    {entry.name} ", 43, default, entry.meaning))
    return "\n".join(lines)


def essential_keys(config_type: type[msgspec.Struct]) -> list[Key]:
    """The keys that most users set. A key of several tables appears once, by its shortest name."""
    found: dict[tuple[str, str], Key] = {}
    for entry in describe(config_type, once=True, loads=False):
        same = (entry.name.rpartition(".")[2], entry.meaning)
        held = found.get(same)
        if entry.essential and (held is None or entry.name.count(".") < held.name.count(".")):
            found[same] = entry
    return list(found.values())


def _line(start: str, width: int, default: str, meaning: str) -> str:
    text = f"{meaning} ({default})" if default and meaning else meaning or default
    room = max(20, _columns() - width)
    return start.ljust(width) + textwrap.shorten(text, room, placeholder="...")


def select(keys: Sequence[Key], prefix: str) -> list[Key]:
    """The keys of a table, of table.kind or table[kind], or a single key; if there are none, the
    keys whose names start with `prefix`."""
    plain = prefix.strip().replace("[", ".").replace("]", "").rstrip(".")
    if not plain:
        return list(keys)
    found = [key for key in keys if key.name == plain or key.name.startswith(f"{plain}.")]
    if found:
        return found
    table, _, kind = plain.rpartition(".")
    of_table = [key for key in keys if table and key.name.startswith(f"{table}.")]
    has_kind = any(kind in key.kinds for key in of_table)
    found = [key for key in of_table if kind in key.kinds or (has_kind and not key.kinds)]
    return found or [key for key in keys if key.name.startswith(plain)]


def key_list(keys: Sequence[Key]) -> str:
    """Type, default and meaning of each key, as text."""
    lines = []
    for entry in keys:
        default = entry.default
        shown = default if default == REQUIRED else f"default {default!r}"
        is_table = entry.type == TABLE
        lines.append(f"{entry.shown}  ({TABLE if is_table else f'{entry.type}, {shown}'})")
        lines += textwrap.wrap(
            entry.meaning, _columns(), initial_indent=" " * 4, subsequent_indent=" " * 4
        )
    return "\n".join(lines)


def _meaning(field: mi.Field) -> str:
    if text := _description(field.type):
        return text
    structs = registry.struct_types(field.type, loads=False)
    kinds = _kinds(field.type, structs, loads=False)
    if len(kinds) > 1:
        return "one of " + ", ".join(kinds)
    text = (structs[0].cls.__doc__ or "") if structs else ""
    return " ".join(text.split("\n\n")[0].split()).partition(". ")[0].rstrip(".")


def _columns() -> int:
    return max(60, min(100, shutil.get_terminal_size().columns))


# The values of a configuration, and whether they differ from the defaults.


class Value(NamedTuple):
    """A key with its value as TOML; `chosen`: the value is not the default."""

    key: str
    text: str
    chosen: bool


def shown(value: Any) -> str:
    """The value as TOML; "none" for None."""
    if value is None:
        return "none"
    if isinstance(value, dict):
        inner = ", ".join(f"{name} = {shown(item)}" for name, item in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(shown, value))}]"
    return json.dumps(value, ensure_ascii=False, default=str)


def values_of(config: Struct, base: Struct | None = None, path: str = "") -> Iterator[Value]:
    """Every value, in the order of the structs. A missing table is one value. `base`: the default
    of the struct, if there is one of the same type; `path`: its key."""
    tag = config.__struct_config__.tag
    if tag is not None:
        field = f"{path}.{config.__struct_config__.tag_field}"
        yield Value(field, shown(tag), chosen=base is None)
    for part in fields(type(config)):
        key = registry.joined(path, part.encode_name)
        default = part.default
        if base is not None:
            default = getattr(base, part.name)
        elif default is NODEFAULT and part.default_factory is not NODEFAULT:
            default = part.default_factory()
        yield from _of_value(key, getattr(config, part.name), default)


def _of_value(key: str, value: Any, default: Any) -> Iterator[Value]:
    if isinstance(value, Struct):
        yield from values_of(value, default if type(default) is type(value) else None, key)
    elif isinstance(value, dict) and value and all(isinstance(v, Struct) for v in value.values()):
        for name, item in value.items():
            yield from _of_value(f"{key}.{name}", item, NODEFAULT)
    elif isinstance(value, list) and value and all(isinstance(v, Struct) for v in value):
        for number, item in enumerate(value):
            yield from _of_value(f"{key}[{number}]", item, NODEFAULT)
    else:
        yield Value(key, shown(msgspec.to_builtins(value)), chosen=value != default)


def refuse_verl_keys(raw: dict[str, Any], source: str) -> None:
    """Raises ConfigError if `raw` contains keys of verl, with our equivalent of each.

    Hydra's overrides `+key` and `++key` are the same keys.
    """
    found = {key: text for key in dict(values_in(raw)) if (text := _advice(key.lstrip("+")))}
    if found:
        lines = [f"  {key.lstrip('+')}: {text}" for key, text in found.items()]
        raise ConfigError(
            f"{source}: keys of verl, which have different names here (docs/from-verl.md):\n"
            + "\n".join(lines)
        )


@functools.cache
def verl_keys() -> dict[str, tuple[str, str]]:
    """verl's key -> (our key, note), see verl_keys.toml."""
    table = read_toml(Path(__file__).with_name("verl_keys.toml"))
    return {theirs: (ours, note[0] if note else "") for theirs, (ours, *note) in table.items()}


def find(key: str) -> tuple[str, str] | None:
    """Ours and the note for a key of verl's; None for a key that is none."""
    parts = key.split(".")
    tables = (".".join([*parts[:length], "*"]) for length in range(len(parts) - 1, 0, -1))
    return next((verl_keys()[name] for name in (key, *tables) if name in verl_keys()), None)


def _advice(key: str) -> str:
    """The advice for a key of verl's; empty for other keys."""
    root = key.partition(".")[0]
    # Tables that both have: only names that are not ours get a general answer.
    if root in BOTH and key not in verl_keys() and not key.startswith(_THEIR_TABLES):
        return ""
    if (entry := find(key)) is None:
        is_theirs = root not in BOTH and any(one.startswith(f"{root}.") for one in verl_keys())
        return "no key with a counterpart here" if is_theirs else ""
    ours, note = entry
    if not ours:
        return f"no such key; {note}"
    return f"use {ours}" + (f" ({note})" if note else "")


BOTH = ("data", "algorithm")  # tables that verl and agentenv both have
_THEIR_TABLES = ("data.custom_cls.", "algorithm.kl_ctrl.", "algorithm.pf_ppo.")
