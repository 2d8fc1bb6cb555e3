"""Files into raw rows: JSONL, JSON, CSV, parquet, and folders of the `datasets` library.

A raw row is the file's content without interpretation: a dict, or a description of the error.
Rows are counted from 1; in JSONL the number is that of the line.
"""

from __future__ import annotations

import csv
import glob
import re
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from itertools import islice, starmap
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agentenv.base.disk import undecodable
from agentenv.base.errors import DataError, ForeignError, needed
from agentenv.base.registry import loaded
from agentenv.base.untrusted import decode_loose

Row = dict[str, Any]
ARROW = (".parquet", ".arrow")
TABLES = (".csv", ".tsv")  # without types: all fields are texts
SUFFIXES = (".jsonl", ".json", *TABLES, *ARROW)
SPLIT = re.compile(r"(train|test|validation|valid|val|dev)(?=[-_.0-9])")
ROWS_PER_BATCH = 1024
# functions that generate rows, by the prefix before the colon that replaces a path
GENERATORS = {
    "openenv": "agentenv.envs.bridges.openenv:rows",
    "reasoning_gym": "agentenv.envs.bridges.reasoning:rows",
    "verifiers": "agentenv.envs.bridges.verifiers_env:rows",
}


class RawRow(NamedTuple):
    """Row `number` of `path`; `problem` describes the error of an invalid row."""

    path: Path
    number: int
    row: Row
    problem: str = ""


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
) -> Iterator[RawRow]:
    """The generated rows of such a path, `most` at most; rows outside the training set if
    `held_out`. Raises DataError for an unknown WHICH."""
    name, _, which = str(path).partition(":")
    rows = loaded(GENERATORS[name])(which, options, held_out=held_out)
    for number, row in enumerate(islice(rows, most or None), 1):
        yield RawRow(path, number, row)


def read_rows(path: Path, ends: int = 0) -> Iterator[RawRow]:
    """The rows of one file, or only the first and the last `ends`. Raises DataError for an
    unreadable file, and ConfigError if pyarrow is needed but not installed."""
    if not path.exists():
        raise DataError(f"{path}: no such dataset file")
    readers = {
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_arrow,
        ".arrow": _read_arrow,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None or not path.is_file():
        raise DataError(
            f"{path}: unknown file type; expected a file that ends in {', '.join(SUFFIXES)}, or a "
            "folder of such files"
        )
    try:
        if ends and reader in (_read_jsonl, _read_arrow):  # they need not parse the rows between
            yield from reader(path, ends)
        else:
            yield from of_both_ends(reader(path), ends)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


T = TypeVar("T")


def plain(value: Any) -> Any:
    """The value with numpy arrays and numbers, as in pandas, converted to lists and numbers."""
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def of_both_ends(items: Iterable[T], size: int) -> Iterator[T]:
    """The first and the last `size` items, each once; 0: all."""
    rest = iter(items)
    if not size:
        yield from rest
        return
    yield from islice(rest, size)
    yield from deque(rest, maxlen=size)


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
    try:
        value = decode_loose(path.read_bytes())
    except (OSError, ForeignError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return value if isinstance(value, dict) else None


def _read_jsonl(path: Path, ends: int = 0) -> Iterator[RawRow]:
    with path.open("rb") as file:  # lines end at \n only: a text may hold other line separators
        lines = ((number, line) for number, line in enumerate(file, 1) if line.strip())
        for number, line in of_both_ends(lines, ends):
            try:
                row = decode_loose(line)
            except ForeignError as error:
                reason = re.sub(r"(?: at)?: line \d+ (column \d+).*", r" at \1", str(error))
                is_list = number == 1 and line.lstrip().startswith(b"[")
                hint = "; name a file that contains a single JSON list .json" if is_list else ""
                yield RawRow(path, number, {}, f"not valid JSON: {reason}{hint}")
                continue
            yield _checked(path, number, row)


def _read_json(path: Path) -> Iterator[RawRow]:
    """A list of rows, SQuAD's {"data": [{"paragraphs": ..}]}, or JSONL under another name."""
    try:
        whole = decode_loose(path.read_bytes())
    except ForeignError as error:
        if not str(error).startswith("Extra data"):
            raise DataError(f"{path}: not valid JSON: {error}") from error
        yield from _read_jsonl(path)
        return
    if isinstance(whole, dict) and isinstance(whole.get("data"), list):
        whole = whole["data"]
        if all(isinstance(article, dict) and "paragraphs" in article for article in whole):
            yield from _read_squad(path, whole)
            return
    if not isinstance(whole, list):
        raise DataError(
            f"{path}: expected a list of rows, or SQuAD's object with the key 'data', got "
            f"{type(whole).__name__}"
        )
    for number, row in enumerate(whole, 1):
        yield _checked(path, number, row)


def _read_squad(path: Path, articles: list[Row]) -> Iterator[RawRow]:
    number = 0
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    number += 1
                    about = {"context": paragraph["context"]}
                    if "title" in article:
                        about["title"] = article["title"]
                    yield _checked(path, number, {**question, **about})
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{path}: after question {number}: expected SQuAD's data, paragraphs, qas and context; "
            f"the error is at {error}"
        ) from error


def _read_csv(path: Path) -> Iterator[RawRow]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    csv.field_size_limit(sys.maxsize)  # process-wide; Python's default is 131,072 characters
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, restkey="", strict=True)
        names = reader.fieldnames or []
        if len(set(names)) < len(names) or "" in names:
            raise DataError(
                f"{path}: expected a first line that names each column once, got {list(names)}"
            )
        number = 0
        while True:
            number += 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                raise DataError(f"{path}, row {number}: not valid CSV: {error}") from error
            if "" in row or None in row.values():
                problem = (
                    f"expected {len(names)} fields as in the first line, got a different number"
                )
                yield RawRow(path, number, {}, problem)
            else:
                nulls: Row = {name: text or None for name, text in row.items()}
                yield RawRow(path, number, nulls)


def _read_arrow(path: Path, ends: int = 0) -> Iterator[RawRow]:
    if not ends:
        rows = (row for batch in _batches(path) for row in batch.to_pylist())
        yield from starmap(partial(_checked, path), enumerate(rows, 1))
        return
    places = ((batch, place) for batch in _batches(path) for place in range(batch.num_rows))
    for number, (batch, place) in of_both_ends(enumerate(places, 1), ends):
        yield _checked(path, number, batch.slice(place, 1).to_pylist()[0])


def _batches(path: Path) -> Iterator[Any]:
    """The record batches of a file."""
    arrow, parquet = (needed(name, "data", str(path)) for name in ("pyarrow", "pyarrow.parquet"))
    try:
        if path.suffix.lower() == ".parquet":
            with parquet.ParquetFile(path) as file:
                yield from file.iter_batches(batch_size=ROWS_PER_BATCH)
            return
        with arrow.memory_map(str(path)) as source:
            yield from _arrow_batches(arrow, source)
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as {path.suffix[1:]}: {error}") from error


def _arrow_batches(arrow: Any, source: Any) -> Iterator[Any]:
    """Batches of an Arrow stream, the form in which `datasets` saves, or of an Arrow file."""
    try:
        yield from arrow.ipc.open_stream(source)
    except arrow.ArrowInvalid:
        source.seek(0)
        file = arrow.ipc.open_file(source)
        yield from map(file.get_batch, range(file.num_record_batches))


def _checked(path: Path, number: int, row: Any) -> RawRow:
    if isinstance(row, dict):
        return RawRow(path, number, row)
    return RawRow(path, number, {}, f"expected a JSON object, got {type(row).__name__}")
