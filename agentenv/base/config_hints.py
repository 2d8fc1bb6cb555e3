"""Suggestions for misspelled keys and files of a configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

from msgspec import inspect as mi

from agentenv.base.registry import joined, struct_types, type_at, unwrap

SAME = 0.8  # minimum similarity of a misspelled key to the right one
MAX_PLACES = 3  # suggestions for a key in other tables


def meant_file(path: Path) -> str:
    """A suggestion for a path that does not exist."""
    if "=" in path.name:
        return "; the file comes first, then key.sub=value"
    try:
        found = [one.name for one in path.parent.iterdir() if one.suffix == ".toml"]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, found, n=1, cutoff=0.4)
    return f"; did you mean {path.with_name(near[0])}?" if near else ""


def hint_for(kind: mi.Type, path: str, key: str, struct: mi.StructType) -> str:
    """A suggestion for an unknown key of a table of this struct."""
    field = f"{path}.{struct.tag_field}"
    kinds = struct_types(type_at(kind, path)) if path else []
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
            return f"did you mean {joined(path, name)}?"
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    is_alike = bool(difflib.get_close_matches(key, near, cutoff=SAME))
    if places := [] if is_alike else _places(kind, key, cutoff=SAME if known else 1.0):
        return f"did you mean {' or '.join(places)}?"
    if near:
        return f"did you mean {joined(path, near[0])}?"
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
        kind, path = kind.value_type, joined(path, "NAME")
    for struct in struct_types(kind):
        for field in struct.fields if struct.cls not in above else ():
            name = joined(path, field.encode_name)
            yield name
            yield from _all_keys(field.type, name, (*above, struct.cls))
