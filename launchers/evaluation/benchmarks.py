"""Benchmarks by name, from files that the user has: `load_benchmark("gaia", "metadata.jsonl")`.

The metadata of its tasks holds the benchmark's name and the fields that scores are split by, and
of the rest of a row only a system prompt and GSM8K's solution.
"""

from __future__ import annotations

import ast
import base64
import binascii
import difflib
import logging
import re
from collections.abc import Callable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from agentenv.data.dataset import Paths, load_tasks
from agentenv.data.files import Row, find_files
from agentenv.data.rows import ANSWERS, QUESTIONS, ColumnsConfig, RowsConfig
from agentenv.errors import ConfigError, DataError
from agentenv.prompt import SYSTEM_KEY
from agentenv.types import Task
from envs.grading.verdict import last_boxed
from launchers.evaluation.benchmark_specs import SPECS, Benchmark
from launchers.evaluation.store import EvalRow

# Rows of a benchmark's file, published or reduced, into the one form that tasks are made of.

BENCHMARK_KEY = "benchmark"  # of Task.metadata and EvalRow.metadata: the benchmark's name
CANARY = "canary"


class BenchmarkRows:
    """Called with each row, gives the row with question, answer, id, kind and the fields that
    scores are split by, or None for one that cannot be asked as text, counted in `num_left_out`.

    Columns are found whatever their case; `columns` names those of a file with other names.
    """

    def __init__(self, benchmark: Benchmark, columns: ColumnsConfig) -> None:
        self.benchmark = benchmark
        self.columns = columns
        self.num_left_out = 0
        self.fields_seen: set[str] = set()

    def __call__(self, row: Row) -> Row | None:
        """Raises DataError with the column and what was expected."""
        spec = self.benchmark
        if spec.literal:
            row = _unpacked(row, spec.literal)
        if spec.attachment and _given(_get(row, spec.attachment)):
            self.num_left_out += 1
            return None
        question = self._find(row, "question", QUESTIONS)
        answer = self._answer(row)
        if spec.encrypted and isinstance(question, str):
            question, answer = _decoded(question, answer, _get(row, CANARY))
        if spec.private and answer == spec.private:
            raise DataError(f"the answer is not published; {spec.how_to_get}")
        made: Row = {"question": question, "answer": answer, BENCHMARK_KEY: spec.name}
        made["kind"] = self._mapped(row, "kind") or spec.kind
        made["env_id"] = self._mapped(row, "env_id") or _get(row, "env_id")
        made["id"] = self._mapped(row, "id") or _first(row, spec.ids)
        made[SYSTEM_KEY] = self._mapped(row, SYSTEM_KEY) or _get(row, SYSTEM_KEY)
        return {**made, **self._fields(row)}

    def _answer(self, row: Row) -> Any:
        spec = self.benchmark
        if spec.solution and not self.columns.answer and _first(row, ANSWERS) is None:
            boxed = last_boxed(str(_get(row, spec.solution) or ""))
            if boxed is None:
                raise DataError(
                    f"expected an answer, or a solution with its answer in \\boxed{{}}, in the "
                    f"column {spec.solution!r}; the row has {sorted(row)}"
                )
            return boxed
        answer = self._find(row, "answer", ANSWERS)
        more = _get(row, spec.aliases) if spec.aliases else None
        if isinstance(more, list) and more:
            return [*(answer if isinstance(answer, list) else [answer]), *more]
        return answer

    def _find(self, row: Row, key: str, known: tuple[str, ...]) -> Any:
        mapped = getattr(self.columns, key)
        value = _first(row, (mapped,) if mapped else known)
        if value is None:
            wanted = f"the column {mapped!r}" if mapped else f"a column {' or '.join(known)}"
            raise DataError(
                f"expected {wanted} of {self.benchmark.title} (published columns: "
                f"{', '.join(self.benchmark.published)}), the row has {sorted(row)}"
            )
        return value

    def _mapped(self, row: Row, key: str) -> Any:
        column = getattr(self.columns, key)
        return self._find(row, key, (column,)) if column else None

    def _fields(self, row: Row) -> Row:
        found = {name: _get(row, column) for name, column in self.benchmark.group_by.items()}
        found = {name: str(value) for name, value in found.items() if _given(value)}
        self.fields_seen |= {*found}
        return found


def encrypt(text: str, canary: str) -> str:
    """A text as xBench publishes it: base64 of its UTF-8 bytes XORed with those of the canary."""
    return base64.b64encode(_xor(text.encode(), canary)).decode()


def _decoded(question: str, answer: Any, canary: Any) -> tuple[str, Any]:
    """Question and answer in plain text; as they are, if the question is no base64 text."""
    try:
        base64.b64decode(question, validate=True)
    except (binascii.Error, ValueError):
        return question, answer
    if not isinstance(canary, str) or not canary:
        raise DataError(f"the question is encrypted, but there is no {CANARY!r} to decode it with")
    golds = answer if isinstance(answer, list) else [answer]
    try:
        texts = [
            _xor(base64.b64decode(str(text), validate=True), canary).decode()
            for text in (question, *golds)
        ]
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"question or answer cannot be decoded with the row's {CANARY!r}: {error}"
        ) from error
    return texts[0], texts[1:] if isinstance(answer, list) else texts[1]


def _xor(data: bytes, canary: str) -> bytes:
    return bytes(one ^ key for one, key in zip(data, cycle(canary.encode()), strict=False))


def _unpacked(row: Row, column: str) -> Row:
    """The row with the Python literal that a column holds as text in its place."""
    text = _get(row, column)
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return row
    try:
        return {**row, column: ast.literal_eval(text)}
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise DataError(f"column {column!r}: not a readable object: {text!r:.80}") from error


def _first(row: Row, columns: tuple[str, ...]) -> Any:
    return next((value for name in columns if (value := _get(row, name)) is not None), None)


def _get(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column whatever its case, or None; a dot goes into an object."""
    named = {key.lower(): value for key, value in row.items() if isinstance(key, str)}
    if column.lower() in named:
        return named[column.lower()]
    head, _, rest = column.partition(".")
    inner = named.get(head.lower())
    return _get(inner, rest) if rest and isinstance(inner, Mapping) else None


def _given(value: Any) -> bool:
    return value is not None and value != "" and value != {}


__all__ = ["BENCHMARKS", "Benchmark", "benchmark", "groups", "load_benchmark"]

BENCHMARKS = {spec.name: spec for spec in SPECS}
logger = logging.getLogger(__name__)


def benchmark(name: str) -> Benchmark:
    """The benchmark of a name, whatever its case and hyphens. Raises ConfigError with the nearest
    names for an unknown one."""
    plain = _plain(name)
    for spec in SPECS:
        if plain in (_plain(spec.name), *spec.also):
            return spec
    near = difflib.get_close_matches(plain, [_plain(known) for known in BENCHMARKS], n=2)
    meant = [known for known in BENCHMARKS if _plain(known) in near]
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"known: {', '.join(BENCHMARKS)}"
    raise ConfigError(f"benchmark {name!r}: unknown; {hint}")


def load_benchmark(
    name: str,
    path: Paths,
    n: int | None = None,
    *,
    env_id: str = "",
    rows: RowsConfig | None = None,
    say: Callable[[str], None] = logger.warning,
) -> list[Task]:
    """Tasks of the benchmark in the order of its file: as many as the papers ask, the first `n`,
    or, for 0, all.

    `env_id` is the environment of rows that choose none; empty: the benchmark's. `rows` are keys
    as for any dataset. `say` is told what is left out and which groups have no column. Raises
    ConfigError for an unknown name, DataError for a missing file, with where to get it, or a bad
    row.
    """
    spec, config = benchmark(name), rows or RowsConfig()
    if not path:
        raise DataError(f"{spec.name}: no file is given; {spec.how_to_get}")
    try:
        files = find_files([path] if isinstance(path, str | Path) else path)
        absent = [str(file) for file in files if not file.exists()]
    except DataError as error:
        raise DataError(f"{spec.name}: {error}; {spec.how_to_get}") from None
    if absent:
        raise DataError(f"{spec.name}: there is no file {', '.join(absent)}; {spec.how_to_get}")
    adapt = BenchmarkRows(spec, config.columns)
    tasks = load_tasks(
        files,
        env_id or spec.env_id,
        replace(config, columns=ColumnsConfig()),
        max_samples=spec.num_questions if n is None else n,
        say=say,
        adapt=adapt,
    )
    if adapt.num_left_out:
        say(
            f"{spec.name}: {adapt.num_left_out} questions come with something in the column "
            f"{spec.attachment!r} and are left out; {len(tasks)} are asked"
        )
    missing = [field for field in spec.group_by if field not in adapt.fields_seen]
    if missing and len(missing) == len(spec.group_by) and spec.kind == "deep_search":
        columns = [spec.group_by[field] for field in missing]
        say(f"{spec.name}: no row has {', '.join(columns)}; there are no scores by it")
    return tasks


def groups(row: EvalRow) -> list[tuple[str, str]]:
    """The fields of a stored row that its benchmark is split by, e.g. [("level", "2")]."""
    spec = BENCHMARKS.get(str(row.metadata.get(BENCHMARK_KEY, "")))
    fields = spec.group_by if spec is not None else {}
    return [(field, str(row.metadata[field])) for field in fields if field in row.metadata]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())
