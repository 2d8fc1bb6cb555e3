"""The paths in a configuration: files, rows, and names on the hub."""

from __future__ import annotations

from collections.abc import Iterator
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec import inspect as mi

from agentenv.assembly.keys.run import ModelConfig
from agentenv.assembly.parts.assembly import Assembly
from agentenv.base import model_files
from agentenv.base.registry import joined, marks_of, type_info
from agentenv.data.data_files import is_generated


class PathKey(NamedTuple):
    """A key with a file, folder or pattern as its value; `rows`: it contains rows of data."""

    key: str
    text: str
    rows: bool = False


def paths_of(config: Any, path: str = "") -> Iterator[PathKey]:
    """Every path in a configuration, in the order of the keys; the paths of a list one by one."""
    if isinstance(config, list):
        for number, value in enumerate(config):
            yield from paths_of(value, f"{path}[{number}]")
    elif isinstance(config, dict):
        for name, value in config.items():
            yield from paths_of(value, joined(path, str(name)))
    elif isinstance(config, Struct):
        info = type_info(type(config))
        assert isinstance(info, mi.StructType)
        for field in info.fields:
            name = field.encode_name
            key, value = joined(path, name), getattr(config, field.name)
            marks = marks_of(field.type)
            if not marks.get("path"):
                yield from paths_of(value, key)
                continue
            for text in [value] if isinstance(value, str) else value or ():
                if text:
                    yield PathKey(key, text, bool(marks.get("rows")))


def hub_keys(config: Any) -> Iterator[tuple[str, str, model_files.HubKind]]:
    """(key, value, kind) of each key that may name a model or dataset on the hub."""
    model = getattr(config, "model", None)
    if isinstance(model, ModelConfig):
        yield "model.path", model.path, "model"
    for name, role in getattr(config, "roles", {}).items():
        yield f"roles.{name}.model", role.model, "model"
    if not dataset_registry(config):
        for key, path, is_rows in paths_of(config):
            if is_rows or key in ("data.train", "data.eval"):
                yield key, path, "dataset"


def dataset_registry(config: Any) -> str:
    """The file that maps dataset names in data.train to files; "" if data.train has paths."""
    return getattr(getattr(config, "data", None), "dataset_info", "")


def absent_paths(assembly: Assembly[Any]) -> Iterator[PathKey]:
    """The missing paths of the configuration, except those that the set-up creates, names in a
    registry of datasets, and the cold start's data in a resumed run."""
    config = assembly.config
    has_names = dataset_registry(config)
    for one in paths_of(config):
        key, path = one.key, one.text
        if assembly.makes(path) or (key.startswith("sft.") and assembly.checkpoint is not None):
            continue
        if has_names and key.startswith("data.") and key != "data.dataset_info":
            continue
        if not is_here(assembly.resolve(path).expanduser()):
            yield one


def is_here(path: Path) -> bool:
    """Whether the file or folder exists, the pattern matches, or the rows are generated."""
    return path.exists() or is_generated(path) or bool(glob(str(path), recursive=True))
