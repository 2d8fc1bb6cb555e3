"""LLaMA-Factory's registry of datasets: dataset_info.json, from names to files and their form.

    {"cold_start": {"file_name": "final.json", "formatting": "sharegpt",
                    "columns": {"messages": "conversations", "system": "system"},
                    "tags": {"role_tag": "from", ...}, "ranking": false, "num_samples": 1000}}

As there, `formatting` is alpaca unless it is given, and a system prompt or tools are read only
where `columns` names them. What would be downloaded from a hub is refused.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from agentenv.data_files import find_files
from agentenv.errors import DataError
from launchers.supervised.chat_config import (
    ChatColumns,
    ChatDataConfig,
    ChatTags,
    Format,
    RowFormat,
)

HUBS = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
UNREAD = ("images", "videos", "audios", "kto_tag")
FORMATS: dict[str, Format] = {"alpaca": "alpaca", "sharegpt": "sharegpt", "openai": "messages"}


class Source(Struct, frozen=True):
    """One file and how it is read; `max_samples` takes its first n rows (0: all)."""

    path: Path
    form: RowFormat
    max_samples: int = 0


class _Entry(Struct, frozen=True, forbid_unknown_fields=True):
    file_name: str
    formatting: Literal["alpaca", "sharegpt", "openai"] = "alpaca"
    columns: dict[str, str] = {}
    tags: ChatTags = ChatTags()
    ranking: bool = False
    num_samples: int = 0


def find_sources(
    config: ChatDataConfig, names: list[str], resolve: Any = Path, *, ranking: bool = False
) -> list[Source]:
    """The files that `names` stand for, of preferences if `ranking`. Raises DataError for a name
    or file that is not there, and for an entry that cannot be used, naming file and key."""
    if config.dataset_info:
        path: Path = resolve(config.dataset_info)
        if path.is_dir():
            path /= "dataset_info.json"
        return [_source(path, name, ranking=ranking) for name in names]
    form = RowFormat(config.format, config.columns, config.tags)
    return [Source(path, form) for path in find_files([resolve(name) for name in names])]


def _source(registry: Path, name: str, *, ranking: bool) -> Source:
    entry = _entry(registry, name)
    where = f"{registry}: {name}"
    if entry.ranking != ranking:
        wanted = "true, since launchers/dpo.py needs preferences" if ranking else "false or absent"
        raise DataError(f"{where}.ranking: expected {wanted}; launchers/sft.py reads dialogues")
    unread = sorted({*UNREAD} & {*entry.columns})
    if unread:
        raise DataError(f"{where}.columns.{unread[0]}: only texts can be learned from")
    named = {"system": "", "tools": "", **entry.columns}
    if entry.formatting != "alpaca":
        named.setdefault("messages", "conversations")
    try:
        columns = msgspec.convert(named, ChatColumns)
    except msgspec.ValidationError as error:
        raise DataError(f"{where}.columns: {error}") from error
    path = registry.parent / entry.file_name
    if not path.exists():
        raise DataError(f"{where}.file_name: there is no {path}")
    return Source(
        path, RowFormat(FORMATS[entry.formatting], columns, entry.tags), entry.num_samples
    )


def _entry(registry: Path, name: str) -> _Entry:
    try:
        known = json.loads(registry.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{registry}: not a readable dataset_info.json: {error}") from error
    raw = known.get(name) if isinstance(known, dict) else None
    if not isinstance(raw, dict):
        near = difflib.get_close_matches(name, list(known), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"it has {sorted(known)[:20]}"
        raise DataError(f"{registry}: there is no dataset {name!r}; {hint}")
    hub = [key for key in HUBS if key in raw]
    if hub and "file_name" not in raw:
        raise DataError(
            f"{registry}: {name}.{hub[0]}: nothing is downloaded; get the file and give file_name"
        )
    try:
        return msgspec.convert({k: v for k, v in raw.items() if k not in HUBS}, _Entry)
    except msgspec.ValidationError as error:
        raise DataError(f"{registry}: {name}: {error}") from error
