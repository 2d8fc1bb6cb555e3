"""Benchmarks by name, from files that the user has: `load_benchmark("gaia", "metadata.jsonl")`.

Each benchmark is a table [benchmarks.NAME] in benchmarks.toml here, in the user's TOML file (its
name is then "mine.toml:NAME"), or in the benchmarks.toml of an installed package with the entry
point group "agentenv.benchmarks". The metadata of a task contains the benchmark's name, the fields
that group scores, and of the rest of a row only a system prompt and GSM8K's solution.
"""

from __future__ import annotations

import base64
import binascii
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from importlib.metadata import entry_points
from itertools import cycle
from operator import xor
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from agentenv.base.config import build_config, read_toml
from agentenv.base.errors import ConfigError, DataError, ForeignError
from agentenv.base.registry import not_one_of
from agentenv.base.types import SYSTEM_KEY, Task
from agentenv.base.untrusted import decode_python
from agentenv.data.data_files import Row, find_files
from agentenv.data.dataset import Paths, load_tasks
from agentenv.data.rows import ANSWERS, QUESTIONS, ColumnsConfig, RowsConfig, look_up
from agentenv.envs.grading.keys import READ_BY, kind_of
from agentenv.envs.grading.verdict import last_boxed

BenchmarkKind = Literal["math", "qa", "deep_search"]
Metric = Literal["math", "f1", "judge"]

# The papers' settings for all questions: MAX_*_TIMES and PROMPT_TYPE = "code_search" of
# evaluation/infer_local_sds.sh (RUC-NLPIR/ARPO at a95cd08), for all its sets.
ENV_ID = "agentenv/DeepSearch-v0"
MAX_CALLS = {"search": 10, "python": 5}
PRESET = "search+python"
MAX_TURNS = 100  # with refused calls; the released loop ends by tokens and seconds alone


class Benchmark(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A benchmark.

    kind           groups questions in reports
    metric         of the papers: mathematical equivalence (or a judge), token F1, or an LLM judge
    hub, part      its id on huggingface.co, and the evaluated part
    note           requirements of the download
    columns        of the published file
    num_questions  default number of questions; 0: all
    group_by       field that groups scores -> its column; a dot selects a key of an object
    attachment     column; rows with a value there are skipped, since they need more than text
    aliases        column of further golds
    solution       column whose last box is the gold if there is no answer
    literal        column that contains an object as text
    encrypted      question and answer may be base64 of the text XORed with the row's canary
    ordered        the official scorer compares the items of a list one by one
    private        placeholder of unpublished answers
    prompt         a system prompt, a preset of `agentenv.text.prompt`
    also           other names, in lower-case letters and digits
    """

    title: str
    kind: BenchmarkKind
    metric: Metric
    hub: str
    part: str
    licence: str
    columns: tuple[str, ...]
    name: str = ""  # that of its table
    note: str = ""
    num_questions: int = 0
    group_by: dict[str, str] = {}
    ids: tuple[str, ...] = ("id", "_id", "task_id", "unique_id")
    attachment: str = ""
    aliases: str = ""
    solution: str = ""
    literal: str = ""
    encrypted: bool = False
    ordered: bool = False
    private: str = ""
    prompt: str = PRESET
    also: tuple[str, ...] = ()

    def usual_keys(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The default keys of a set of this benchmark: environment, tools with the papers' limits
        on calls, a reward for only the answer, and the prompt.

        `given`: the keys that override them. An environment or grader of another kind gets no
        defaults, since it would not use them.
        """
        env: Mapping[str, Any] = given.get("env") or {}
        grader: Mapping[str, Any] = given.get("grader") or {}
        keys: dict[str, Any] = {"prompt": {"template": self.prompt}, "grader": {}}
        if env.get("id", ENV_ID) == ENV_ID:
            tools = [{"name": name, "max_calls": calls} for name, calls in MAX_CALLS.items()]
            keys["env"] = {"id": ENV_ID, "tools": tools}
            most = dict.fromkeys(("max_tool_calls", "max_turns"), MAX_TURNS)
            keys["limits"] = {**most, "on_limit": "result"}
        kind = kind_of(grader)
        usual = {"reward": "answer"} | ({"ordered": True} if self.ordered else {})
        keys["grader"] = {
            key: one for key, one in usual.items() if kind is None or kind in READ_BY[key]
        }
        if kind is None:
            keys["grader"]["kind"] = "layered"
        return keys

    @property
    def how_to_get(self) -> str:
        """A sentence on the origin of the file, for messages."""
        note = f"; {self.note}" if self.note else ""
        return (
            f"{self.title} is published at huggingface.co/datasets/{self.hub} ({self.part}; "
            f"{self.licence}), columns {', '.join(self.columns)}: `hf download {self.hub} "
            f"--repo-type dataset --local-dir DIR`{note}"
        )


# The known benchmarks.

FILE = "benchmarks.toml"
ENTRY_POINT_GROUP = "agentenv.benchmarks"
logger = logging.getLogger(__name__)


@cache
def read_benchmarks(path: Path, prefix: str = "") -> dict[str, Benchmark]:
    """The tables [benchmarks.NAME] of a TOML file by name, with `prefix` before each name. Raises
    ConfigError with file and key."""
    found = {}
    for name, table in read_toml(path).get("benchmarks", {}).items():
        one = build_config(Benchmark, table, f"{path}: benchmarks.{name}")
        found[prefix + name] = replace(one, name=prefix + name)
    return found


BENCHMARKS = read_benchmarks(Path(__file__).with_name(FILE))


@cache
def known_benchmarks() -> dict[str, Benchmark]:
    """The built-in benchmarks, and those of installed packages. Raises ConfigError for a name that
    is used twice."""
    known = dict(BENCHMARKS)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        with resources.as_file(resources.files(point.module) / FILE) as path:
            found = read_benchmarks(path)
        if twice := found.keys() & known.keys():
            raise ConfigError(f"{point.module}: the benchmark {min(twice)!r} already exists")
        known |= found
    return known


def benchmark(name: str) -> Benchmark:
    """The benchmark with this name, ignoring case and hyphens; "FILE.toml:NAME" is one of a file.
    Raises ConfigError with similar names if it is unknown."""
    file, _, own = name.rpartition(":")
    benchmarks = read_benchmarks(Path(file), f"{file}:") if file else known_benchmarks()
    plain = _plain(own)
    for known, one in benchmarks.items():
        if plain in (_plain(known.removeprefix(f"{file}:")), *one.also):
            return one
    raise ConfigError(f"benchmark: {not_one_of(own, [*benchmarks])}")


def benchmark_of(metadata: Mapping[str, Any]) -> Benchmark | None:
    """The benchmark of a task or stored row with this metadata; None for another dataset, and for a
    benchmark whose file or package no longer exists."""
    name = str(metadata.get(BENCHMARK_KEY, ""))
    try:
        return benchmark(name) if ":" in name else known_benchmarks().get(name)
    except ConfigError:
        return None


def groups(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The fields that group the scores of a task's benchmark, with values: [("level", "2")]."""
    found = benchmark_of(metadata)
    fields = found.group_by if found is not None else {}
    return [(field, str(metadata[field])) for field in fields if field in metadata]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# Conversion of rows of a benchmark's file, published or reduced, to the rows of tasks.

BENCHMARK_KEY = "benchmark"  # of Task.metadata and EvalRow.metadata: the benchmark's name
CANARY = "canary"


@dataclass(eq=False)
class BenchmarkRows:
    """A function from a file's row to a row with question, answer, id, kind and the fields that
    group scores; None for a row that needs more than text, which `num_left_out` counts.

    Column names ignore case; `columns` maps the columns of a file with other names.
    """

    benchmark: Benchmark
    columns: ColumnsConfig
    key: str
    num_left_out: int = 0
    fields_seen: set[str] = field(default_factory=set)

    def __call__(self, row: Row) -> Row | None:
        """Convert a row. Raises DataError with the column and the expected content."""
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
                    f"expected an answer, or a solution with its answer in \\boxed{{}}, in column "
                    f"{spec.solution!r}; the row has {sorted(row)}"
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
                f"{', '.join(self.benchmark.columns)}), the row has {sorted(row)}: set the column "
                f"by {self.key}.columns.{key}"
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


def _decoded(question: str, answer: Any, canary: Any) -> tuple[str, Any]:
    """Question and answer, decrypted; unchanged if the question is not base64 text."""
    try:
        base64.b64decode(question, validate=True)
    except (binascii.Error, ValueError):
        return question, answer
    if not isinstance(canary, str) or not canary:
        raise DataError(f"the question is encrypted, but there is no {CANARY!r} to decode it with")
    golds = answer if isinstance(answer, list) else [answer]
    try:
        data = [base64.b64decode(str(text), validate=True) for text in (question, *golds)]
        texts = [bytes(map(xor, one, cycle(canary.encode()))).decode() for one in data]
    except (binascii.Error, ValueError) as error:
        raise DataError(
            f"question or answer cannot be decoded with the row's {CANARY!r}: {error}"
        ) from error
    return texts[0], texts[1:] if isinstance(answer, list) else texts[1]


def _unpacked(row: Row, column: str) -> Row:
    """The row with the Python literal in a column parsed."""
    text = _get(row, column)
    if not isinstance(text, str) or not text.lstrip().startswith("{"):
        return row
    try:
        return {**row, column: decode_python(text)}
    except ForeignError as error:
        raise DataError(f"column {column!r}: not a readable object: {text!r:.80}") from error


def _first(row: Row, columns: tuple[str, ...]) -> Any:
    return next((value for name in columns if (value := _get(row, name)) is not None), None)


def _get(row: Row, column: str) -> Any:
    """The value of a column, ignoring case, or None."""
    return look_up(row, column, any_case=True)[1]


def _given(value: Any) -> bool:
    return value is not None and value != "" and value != {}


def load_benchmark(
    name: str,
    path: Paths,
    n: int | None = None,
    *,
    env_id: str = "",
    rows: RowsConfig | None = None,
    ends: int = 0,
    report: Callable[[str], None] = logger.warning,
    key: str = "sets.NAME",
) -> list[Task]:
    """Tasks of the benchmark in the order of its file: the first `n`; 0: all; None: the papers'
    number.

    `env_id`: the environment of rows that select none; empty: deep search. `rows`: keys as for any
    dataset. `ends`, `key`: see `load_tasks`. `report` reports skipped rows, and groups without a
    column. Raises ConfigError for an unknown name, and DataError for a bad row or a missing file,
    with its origin.
    """
    spec, config = benchmark(name), rows or RowsConfig()
    if not path:
        raise DataError(f"{spec.name}: no file given; {spec.how_to_get}")
    try:
        files = find_files([path] if isinstance(path, str | Path) else path)
        if absent := [str(file) for file in files if not file.exists()]:
            raise DataError(f"missing files: {', '.join(absent)}")
    except DataError as error:
        raise DataError(f"{spec.name}: {error}; {spec.how_to_get}") from None
    adapt = BenchmarkRows(spec, config.columns, key)
    tasks = load_tasks(
        files,
        env_id or ENV_ID,
        replace(config, columns=ColumnsConfig()),
        max_samples=spec.num_questions if n is None else n,
        ends=ends,
        report=report,
        adapt=adapt,
    )
    if adapt.num_left_out:
        report(
            f"{spec.name}: {adapt.num_left_out} questions with an attachment (column "
            f"{spec.attachment!r}) are skipped; {len(tasks)} remain"
        )
    missing = [field for field in spec.group_by if field not in adapt.fields_seen]
    if missing and len(missing) == len(spec.group_by) and spec.kind == "deep_search":
        columns = [spec.group_by[field] for field in missing]
        report(f"{spec.name}: no row has {', '.join(columns)}; scores by that column are omitted")
    return tasks
