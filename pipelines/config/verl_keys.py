"""Keys of verl in a configuration that was refused: the names of ours."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterator
from importlib import resources
from typing import Any

from agentenv.errors import ConfigError

DOCUMENT = "docs/from-verl.md"


def refuse_verl_keys(raw: dict[str, Any], source: str) -> None:
    """Raises ConfigError that names ours for each key of verl's among the values of `raw`.

    `+key` and `++key`, as Hydra writes overrides, are the same keys.
    """
    found = {key: entry for key, entry in map(_entry, _dotted(raw)) if entry is not None}
    if found:
        lines = [f"  {key}: {advice(*entry)}" for key, entry in found.items()]
        raise ConfigError(
            f"{source}: keys of verl, which have other names here ({DOCUMENT}):\n"
            + "\n".join(lines)
        )


def advice(ours: str, note: str) -> str:
    """What to use in place of a key."""
    if not ours:
        return f"there is none; {note}"
    return f"use {ours}" + (f" ({note})" if note else "")


@functools.cache
def verl_keys() -> dict[str, tuple[str, str]]:
    """Theirs -> ours and a note, see verl_keys.toml."""
    file = resources.files("agentenv.pipelines.config") / "verl_keys.toml"
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return {theirs: (ours, note[0] if note else "") for theirs, (ours, *note) in table.items()}


def find(key: str) -> tuple[str, str] | None:
    """Ours and the note for a key of verl's; None for a key that is none."""
    parts = key.split(".")
    tables = (".".join([*parts[:length], "*"]) for length in range(len(parts) - 1, 0, -1))
    return next((verl_keys()[name] for name in (key, *tables) if name in verl_keys()), None)


def _entry(key: str) -> tuple[str, tuple[str, str] | None]:
    key = key.lstrip("+")
    # Tables that both have: only names that are not ours get a general answer.
    if key.partition(".")[0] in ("data", "algorithm") and key not in verl_keys():
        return key, find(key) if key.startswith(_THEIR_TABLES) else None
    return key, find(key)


_THEIR_TABLES = ("data.custom_cls.", "algorithm.kl_ctrl.", "algorithm.pf_ppo.")


def _dotted(raw: dict[str, Any], path: str = "") -> Iterator[str]:
    for name, value in raw.items():
        key = f"{path}.{name}" if path else name
        if isinstance(value, dict) and value:
            yield from _dotted(value, key)
        else:
            yield key
