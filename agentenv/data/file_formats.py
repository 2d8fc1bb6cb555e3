"""Formats of dataset files other than JSONL: JSON, SQuAD, CSV, parquet and Arrow."""

from __future__ import annotations

import csv
import re
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice, starmap
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from agentenv.base.errors import DataError, ForeignError, reported_as
from agentenv.base.installation import needed
from agentenv.base.untrusted import decode_loose, decode_python

ROWS_PER_BATCH = 1024


class RawRow(NamedTuple):
    """Row `number` of `path`; `problem` describes the error of an invalid row."""

    path: Path
    number: int
    row: dict[str, Any]
    problem: str = ""


T = TypeVar("T")


def of_both_ends(items: Iterable[T], size: int) -> Iterator[T]:
    """The first and the last `size` items, each once; 0: all."""
    rest = iter(items)
    if not size:
        yield from rest
        return
    yield from islice(rest, size)
    yield from deque(rest, maxlen=size)


def read_json(path: Path, read_lines: Callable[[Path], Iterator[RawRow]]) -> Iterator[RawRow]:
    """A list of rows, SQuAD's {"data": [{"paragraphs": ..}]}, or JSONL under another name."""
    try:
        whole = decode_loose(path.read_bytes())
    except ForeignError as error:
        if not str(error).startswith("Extra data"):
            raise DataError(f"{path}: not valid JSON: {error}") from error
        yield from read_lines(path)
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
        yield checked(path, number, row)


def _read_squad(path: Path, articles: list[dict[str, Any]]) -> Iterator[RawRow]:
    number = 0
    try:
        for article in articles:
            for paragraph in article["paragraphs"]:
                for question in paragraph["qas"]:
                    number += 1
                    about = {"context": paragraph["context"]}
                    if "title" in article:
                        about["title"] = article["title"]
                    yield checked(path, number, {**question, **about})
    except (KeyError, TypeError) as error:
        raise DataError(
            f"{path}: after question {number}: expected SQuAD's data, paragraphs, qas and context; "
            f"the error is at {error}"
        ) from error


def read_csv(path: Path) -> Iterator[RawRow]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    csv.field_size_limit(sys.maxsize)  # process-wide; Python's default is 131,072 characters
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, restkey="", strict=True)
        names = reader.fieldnames or []
        if len(set(names)) < len(names) or "" in names:
            raise DataError(
                f"{path}: expected a first line that names each column once, got {list(names)}"
            )
        wrong = f"expected {len(names)} fields as in the first line, got a different number"
        number = 0
        try:
            for number, row in enumerate(reader, 1):
                if "" in row or None in row.values():
                    yield RawRow(path, number, {}, wrong)
                else:
                    yield RawRow(path, number, {key: text or None for key, text in row.items()})
        except csv.Error as error:
            raise DataError(f"{path}, row {number + 1}: not valid CSV: {error}") from error


def read_arrow(path: Path, ends: int = 0) -> Iterator[RawRow]:
    if not ends:
        rows = (row for batch in _batches(path) for row in _rows(batch))
        yield from starmap(partial(checked, path), enumerate(rows, 1))
        return
    places = ((batch, place) for batch in _batches(path) for place in range(batch.num_rows))
    for number, (batch, place) in of_both_ends(enumerate(places, 1), ends):
        yield checked(path, number, _rows(batch.slice(place, 1))[0])


def _batches(path: Path) -> Iterator[Any]:
    """The record batches of a file."""
    arrow, parquet = (needed(name, "data", str(path)) for name in ("pyarrow", "pyarrow.parquet"))
    problem = f"{path}: cannot be read as {path.suffix[1:]}"
    with reported_as(DataError, problem, arrow.ArrowException, OSError):
        if path.suffix.lower() == ".parquet":
            with parquet.ParquetFile(path) as file:
                yield from file.iter_batches(batch_size=ROWS_PER_BATCH)
            return
        with arrow.memory_map(str(path)) as source:
            yield from arrow.ipc.open_stream(source)  # as `datasets` saves


def _rows(batch: Any) -> list[Any]:
    """Its rows, with the names of the labels of ClassLabel columns, from the metadata."""
    about = (batch.schema.metadata or {}).get(b"huggingface", b"{}")
    try:
        features = decode_loose(about)["info"]["features"]
    except (ForeignError, LookupError, TypeError):
        features = {}
    names = {
        key: dict(enumerate(one["names"]))
        for key, one in features.items()
        if key in batch.schema.names and isinstance(one, dict) and one.get("_type") == "ClassLabel"
    }
    rows: list[Any] = batch.to_pylist()
    for row in rows if names else ():
        row.update({key: known.get(row[key]) for key, known in names.items()})
    return rows


def checked(path: Path, number: int, row: Any) -> RawRow:
    if isinstance(row, dict):
        return RawRow(path, number, row)
    return RawRow(path, number, {}, f"expected a JSON object, got {type(row).__name__}")


_NUMPY_ARRAY = re.compile(r"\barray\((\[[^()]*\])(?:,\s*dtype=[\w'<>]+)?\)")
_NUMPY_OBJECTS = re.compile(r"\}\s+\{")
_PYTHON_TEXT = r"""(?:'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")"""
_NUMPY_TEXTS = re.compile(rf"\[\s*{_PYTHON_TEXT}(?:\s+{_PYTHON_TEXT})+\s*\]")


def literal(text: str, *, only_json: bool = False) -> Any:
    """The value of a text in the notation of JSON, or in that of Python or numpy, as in tables
    without types; None for other texts."""
    with suppress(ForeignError):
        return decode_loose(text)
    if only_json:
        return None
    text = text.strip()
    if _NUMPY_TEXTS.fullmatch(text):  # ['a' 'b'], which Python would concatenate
        text = f"[{','.join(re.findall(_PYTHON_TEXT, text))}]"
    text = _NUMPY_ARRAY.sub(r"\1", text)
    for written in (text, _NUMPY_OBJECTS.sub("}, {", text)):
        with suppress(ForeignError):
            return decode_python(written)
    return None
