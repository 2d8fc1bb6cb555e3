"""Files into raw rows: JSONL, JSON, CSV, parquet, and folders of the `datasets` library.

A raw row is the file's content without interpretation: a dict, or a description of the error.
Rows are counted from 1; in JSONL the number is that of the line.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from agentenv.base.disk import undecodable
from agentenv.base.errors import DataError, ForeignError, reported_as
from agentenv.base.registry import loaded
from agentenv.base.untrusted import decode_loose
from agentenv.data import file_formats

Row = dict[str, Any]
ARROW = (".parquet", ".arrow")
TABLES = (".csv", ".tsv")  # without types: all fields are texts
SUFFIXES = (".jsonl", ".json", *TABLES, *ARROW)
SPLIT = re.compile(r"(train|test|validation|valid|val|dev)(?=[-_.0-9])")
# functions that generate rows, by the prefix before the colon that replaces a path
GENERATORS = {
    "gymnasium": "agentenv.envs.bridges.gymnasium_env:rows",
    "openenv": "agentenv.envs.bridges.openenv:rows",
    "reasoning_gym": "agentenv.envs.bridges.reasoning:rows",
    "verifiers": "agentenv.envs.bridges.verifiers_env:rows",
}


def find_files(paths: Iterable[str | Path]) -> list[Path]:
    """The data files of these files, folders and patterns, in order, without duplicates.

    A folder stands for its data files, sorted, or for the one split that `datasets` saved in it.
    Raises DataError for a path without files, and for a folder that mixes splits.
    """
    found: dict[Path, None] = {}
    for path in map(str, paths):
        if Path(path).is_dir():
            files = _files_of(Path(path))
        elif Path(path).exists() or not glob.has_magic(path):
            files = [Path(path)]
        else:
            files = [Path(name) for name in sorted(glob.glob(path, recursive=True))]
            if not files:
                raise DataError(f"{path}: no dataset file matches this pattern")
        for file in files:
            if shown := undecodable(str(file)):
                raise DataError(f"{shown}: the name of this file is not valid UTF-8; rename it")
        found |= dict.fromkeys(files)
    if not found:
        raise DataError("no dataset file given; expected a file, a folder or a pattern")
    return list(found)


def is_generated(path: str | Path) -> bool:
    """Whether a path stands for generated rows: NAME:WHICH."""
    name, colon, _ = str(path).partition(":")
    return bool(colon) and name in GENERATORS


def generated_rows(
    path: Path, options: Mapping[str, Any], *, held_out: bool, most: int = 0
) -> Iterator[file_formats.RawRow]:
    """The generated rows of such a path, `most` at most; rows outside the training set if
    `held_out`. Raises DataError for an unknown WHICH."""
    name, _, which = str(path).partition(":")
    rows = loaded(GENERATORS[name])(which, options, held_out=held_out)
    for number, row in enumerate(islice(rows, most or None), 1):
        yield file_formats.RawRow(path, number, row)


def read_rows(path: Path, ends: int = 0) -> Iterator[file_formats.RawRow]:
    """The rows of one file, or only the first and the last `ends`. Raises DataError for an
    unreadable file, and ConfigError if pyarrow is needed but not installed."""
    if not path.exists():
        raise DataError(f"{path}: no such dataset file")
    readers: dict[str, Callable[..., Iterator[file_formats.RawRow]]] = {
        ".jsonl": _read_jsonl,
        ".json": partial(file_formats.read_json, read_lines=_read_jsonl),
        ".csv": file_formats.read_csv,
        ".tsv": file_formats.read_csv,
        ".parquet": file_formats.read_arrow,
        ".arrow": file_formats.read_arrow,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None or not path.is_file():
        raise DataError(
            f"{path}: unknown file type; expected a file that ends in {', '.join(SUFFIXES)}, or a "
            "folder of such files"
        )
    with reported_as(DataError, f"{path}: cannot be read", OSError, UnicodeDecodeError):
        # These need not parse the rows between.
        if ends and reader in (_read_jsonl, file_formats.read_arrow):
            yield from reader(path, ends)
        else:
            yield from file_formats.of_both_ends(reader(path), ends)


def plain(value: Any) -> Any:
    """The value with numpy arrays and numbers, as in pandas, converted to lists and numbers."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def _files_of(folder: Path) -> list[Path]:
    saved, splits = _saved(folder / "state.json"), _saved(folder / "dataset_dict.json")
    if saved is not None:
        return [folder / str(file.get("filename")) for file in saved.get("_data_files", ())]
    if splits is not None:
        names = [str(name) for name in splits.get("splits", ())]
        if len(names) != 1:
            raise DataError(f"{folder}: contains the splits {names}; choose one, as {folder}/SPLIT")
        return _files_of(folder / names[0])
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise DataError(
            f"{folder}: contains no dataset file; expected files that end in "
            f"{', '.join(SUFFIXES)}, or a folder saved by the datasets library"
        )
    found = {match[1] for file in files if (match := SPLIT.match(file.name))}
    if len(found) > 1:
        raise DataError(
            f"{folder}: its files belong to several splits {sorted(found)}; choose one by a "
            f"pattern, as {folder}/{min(found)}*"
        )
    return files


def _saved(path: Path) -> Row | None:
    """The object in a JSON file of the datasets library; None without such a file."""
    if not path.is_file():
        return None
    with reported_as(DataError, f"{path}: cannot be read", OSError, ForeignError):
        value = decode_loose(path.read_bytes())
    return value if isinstance(value, dict) else None


def _read_jsonl(path: Path, ends: int = 0) -> Iterator[file_formats.RawRow]:
    with path.open("rb") as file:  # lines end at \n only: a text may hold other line separators
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for number, line in file_formats.of_both_ends(lines, ends):
            try:
                row = decode_loose(line)
            except ForeignError as error:
                reason = re.sub(r"(?: at)?: line \d+ (column \d+).*", r" at \1", str(error))
                is_list = number == 1 and line.lstrip().startswith(b"[")
                hint = "; name a file that contains a single JSON list .json" if is_list else ""
                yield file_formats.RawRow(path, number, {}, f"not valid JSON: {reason}{hint}")
                continue
            yield file_formats.checked(path, number, row)
