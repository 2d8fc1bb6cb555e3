"""The configuration keys as --help and --help-keys show them."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as mi

from agentenv.config import struct_types, type_info
from agentenv.config_keys import REQUIRED, Key, describe

KIND = re.compile(r"\[([a-z]\w*)\]")  # of name[kind].key; [n] is a place in a list
NOT_KINDS = ("n",)
HEADING = "configuration keys (in the file, or on the command line as key.sub=value):"


class HelpKey(NamedTuple):
    """A key that some or all kinds of a part have in common; no kinds: all, or there are none."""

    name: str
    kinds: tuple[str, ...]
    key: Key

    @property
    def shown(self) -> str:
        """algorithm[arpo|aepo].beam_size"""
        if not self.kinds:
            return self.name
        table = KIND.split(self.key.name)[0]
        return f"{table}[{'|'.join(self.kinds)}]{self.name.removeprefix(table)}"


class HelpKeys(argparse.Action):
    """--help-keys [PREFIX]: print the keys of a table and end."""

    def __init__(self, *args: Any, config_type: type[msgspec.Struct], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.config_type = config_type

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        keys = help_keys(self.config_type)
        prefix = str(values or "")
        found = select(keys, prefix)
        if not found:
            tables = sorted({key.name.partition(".")[0] for key in keys})
            near = difflib.get_close_matches(prefix, [*tables, *(key.name for key in keys)], n=1)
            hint = f"did you mean {near[0]}?" if near else f"tables: {', '.join(tables)}"
            parser.error(f"--help-keys: no key begins with {prefix!r}; {hint}")
        parser.exit(message=key_list(found) + "\n")


def add_key_help(parser: argparse.ArgumentParser, config_type: type[msgspec.Struct]) -> None:
    """The tables at the end of --help, and --help-keys for what is in them."""
    parser.epilog = table_overview(config_type)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--help-keys",
        nargs="?",
        action=HelpKeys,
        config_type=config_type,
        metavar="PREFIX",
        help="show every configuration key, or those of a table or kind (algorithm, "
        "algorithm.arpo, learner.lora): type, default, meaning",
    )


def key_table(config_type: type[msgspec.Struct]) -> str:
    """Every key, for a small configuration whose --help shows all of it."""
    return f"{HEADING}\n\n{key_list(help_keys(config_type))}"


def table_overview(config_type: type[msgspec.Struct]) -> str:
    """A line for each table of the configuration."""
    info = type_info(config_type)
    assert isinstance(info, mi.StructType)
    width = max(len(field.encode_name) for field in info.fields) + 2
    lines = ["configuration tables; keys are given in the file, or as table.key=value:"]
    for field in info.fields:
        meaning = _meaning(field)
        first, *rest = textwrap.wrap(meaning, max(40, _columns() - width - 2)) or [""]
        lines.append(f"  {field.encode_name:<{width}}{first}")
        lines += [" " * (width + 2) + line for line in rest]
    return "\n".join(lines)


def help_keys(config_type: type[msgspec.Struct]) -> list[HelpKey]:
    """Every key once: kinds of a part that have the same key share one entry."""
    kinds_of: dict[str, dict[str, None]] = {}
    entries: dict[tuple[str, ...], tuple[Key, dict[str, None]]] = {}
    for key in describe(config_type):
        kinds = [kind for kind in KIND.findall(key.name) if kind not in NOT_KINDS]
        name = key.name
        for kind in kinds:
            name = name.replace(f"[{kind}]", "")
            kinds_of.setdefault(KIND.split(key.name)[0], {})[kind] = None
        _, found = entries.setdefault((name, *key[1:]), (key, {}))
        found.update(dict.fromkeys(kinds))
    result = []
    for (name, *_), (key, kinds_found) in entries.items():
        everywhere = list(kinds_found) == list(kinds_of.get(KIND.split(key.name)[0], ()))
        result.append(HelpKey(name, () if everywhere else tuple(kinds_found), key))
    return result


def select(keys: Sequence[HelpKey], prefix: str) -> list[HelpKey]:
    """Those of a table, of table.kind or table[kind], or of a single key."""
    plain = prefix.strip().replace("[", ".").replace("]", "").rstrip(".")
    if not plain:
        return list(keys)
    found = [key for key in keys if key.name == plain or key.name.startswith(f"{plain}.")]
    if found:
        return found
    table, _, kind = plain.rpartition(".")
    of_table = [key for key in keys if table and key.name.startswith(f"{table}.")]
    has_kind = any(kind in key.kinds for key in of_table)
    return [key for key in of_table if kind in key.kinds or (has_kind and not key.kinds)]


def key_list(keys: Sequence[HelpKey]) -> str:
    """Type, default and meaning of each."""
    lines = []
    for entry in keys:
        default = entry.key.default
        told = default if default == REQUIRED else f"default {default!r}"
        lines.append(f"{entry.shown}  ({entry.key.type}, {told})")
        lines += textwrap.wrap(
            entry.key.meaning, _columns(), initial_indent=" " * 4, subsequent_indent=" " * 4
        )
    return "\n".join(lines)


def _meaning(field: mi.Field) -> str:
    if isinstance(field.type, mi.Metadata):
        text = str((field.type.extra_json_schema or {}).get("description", ""))
        if text:
            return text
    structs = struct_types(field.type)
    if len(structs) > 1:
        return "one of " + ", ".join(str(struct.tag) for struct in structs)
    return next(_first_line(structs), "")


def _first_line(structs: Sequence[mi.StructType]) -> Iterator[str]:
    for struct in structs:
        text = " ".join((struct.cls.__doc__ or "").split("\n\n")[0].split())
        yield text.partition(". ")[0].rstrip(".")


def _columns() -> int:
    return max(60, min(100, shutil.get_terminal_size().columns))
