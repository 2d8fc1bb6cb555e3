"""Benchmarks by name, from files that the user has: `load_benchmark("gaia", "metadata.jsonl")`.

Their facts are in benchmarks.toml. Another benchmark is one table [benchmarks.NAME],
there, in a TOML file of the user's own, which the name then begins with ("mine.toml:NAME"), or in
the benchmarks.toml of an installed package that declares itself in the entry point group
"agentenv.benchmarks". The metadata of the tasks holds the benchmark's name and the fields that
scores are split by, and of the rest of a row only a system prompt and GSM8K's solution.
"""

from __future__ import annotations

import base64
import binascii
import difflib
import logging
import re
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from importlib.metadata import entry_points
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import replace

from agentenv.config import build_config, read_toml
from agentenv.data_files import Row, find_files
from agentenv.dataset import Paths, load_tasks
from agentenv.envs.grading.verdict import last_boxed
from agentenv.errors import ConfigError, DataError, ForeignError
from agentenv.rows import ANSWERS, QUESTIONS, ColumnsConfig, RowsConfig, look_up
from agentenv.types import SYSTEM_KEY, Task
from agentenv.untrusted import decode_python

BenchmarkKind = Literal["math", "qa", "deep_search"]
Metric = Literal["math", "f1", "judge"]

# How every question of the papers is asked, of whichever kind: MAX_*_TIMES and PROMPT_TYPE =
# "code_search" of evaluation/infer_local_sds.sh (RUC-NLPIR/ARPO at a95cd08), for all its sets.
ENV_ID = "agentenv/DeepSearch-v0"
MAX_CALLS = {"search": 10, "python": 5}
PRESET = "search+python"
SPARE_TURNS = 5  # for the answer, and calls that are answered with "no more calls"


class Benchmark(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One benchmark. `kind` groups questions in reports, `metric` is what the papers report:
    mathematical equivalence (backed by a judge), token F1, or an LLM judge.

    `hub` is its id on huggingface.co, `part` what of it is evaluated, `note` what has to be known
    or done before; `columns` are those of the published file. `num_questions` are asked unless
    more are wanted; 0 is all. `group_by` maps the fields that scores are split by to their
    columns; a dot goes into an object. A row with something in `attachment` cannot be asked as
    text and is left out. `aliases` is a column of further golds, `solution` one whose last box is
    the gold where no answer stands beside it, `literal` one that holds an object as text. With
    `encrypted`, question and answer may be base64 of the text XORed with the row's canary.
    With `ordered` the official scorer compares the items of a list one by one.
    `private` is what stands for an answer that is not published. `prompt` is a system prompt other
    than that of the rest, `also` other names, in small letters and digits.
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
    prompt: str = ""
    also: tuple[str, ...] = ()

    @property
    def preset(self) -> str:
        """The system prompt, a preset of `agentenv.renderer`."""
        return self.prompt or PRESET

    def usual_keys(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """How the benchmark is asked where the configuration does not say: env and its tools with
        the calls that the papers allow, the answer alone as reward, and the prompt.

        `given` are the keys that stand above. Of an environment or grader of another kind none of
        its keys are given here, since they would not be read.
        """
        env: Mapping[str, Any] = given.get("env") or {}
        grader: Mapping[str, Any] = given.get("grader") or {}
        keys: dict[str, Any] = {"prompt": {"template": self.preset}, "grader": {}}
        if env.get("id", ENV_ID) == ENV_ID:
            tools = [{"name": name, "max_calls": calls} for name, calls in MAX_CALLS.items()]
            num_calls = sum(MAX_CALLS.values())
            keys["env"] = {"id": ENV_ID, "tools": tools}
            keys["limits"] = {
                "max_tool_calls": num_calls,
                "max_turns": num_calls + SPARE_TURNS,
                "on_limit": "result",
            }
        if not grader.get("path") and grader.get("kind") != "custom":
            keys["grader"] = {"reward": "answer"}
            if not grader.get("judge"):
                keys["grader"]["kind"] = "layered"
            is_ours = not grader.get("own") and not grader.get("combined")
            if self.ordered and is_ours and grader.get("kind") in (None, "layered", "judge"):
                keys["grader"]["ordered"] = True
        return keys

    @property
    def how_to_get(self) -> str:
        """One sentence on where the file comes from."""
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
    """The tables [benchmarks.NAME] of a TOML file by name, `prefix` before each name. Raises
    ConfigError with file and key."""
    found = {}
    for name, table in read_toml(path).get("benchmarks", {}).items():
        one = build_config(Benchmark, table, f"{path}: benchmarks.{name}")
        found[prefix + name] = replace(one, name=prefix + name)
    return found


BENCHMARKS = read_benchmarks(Path(__file__).with_name(FILE))


@cache
def known_benchmarks() -> dict[str, Benchmark]:
    """Ours, and those of installed packages; read once a process. Raises ConfigError for a name
    that two of them have."""
    known = dict(BENCHMARKS)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        with resources.as_file(resources.files(point.module) / FILE) as path:
            found = read_benchmarks(path)
        if twice := found.keys() & known.keys():
            raise ConfigError(f"{point.module}: the benchmark {min(twice)!r} already exists")
        known |= found
    return known


def benchmark(name: str) -> Benchmark:
    """The benchmark of a name, whatever its case and hyphens; "FILE.toml:NAME" is one of a file.
    Raises ConfigError with the nearest names for an unknown one."""
    file, _, own = name.rpartition(":")
    benchmarks = read_benchmarks(Path(file), f"{file}:") if file else known_benchmarks()
    plain = _plain(own)
    for known, one in benchmarks.items():
        if plain in (_plain(known.removeprefix(f"{file}:")), *one.also):
            return one
    near = difflib.get_close_matches(plain, [_plain(known) for known in benchmarks], n=2)
    meant = [known for known in benchmarks if _plain(known) in near]
    hint = f"did you mean {' or '.join(meant)}?" if meant else f"known: {', '.join(benchmarks)}"
    raise ConfigError(f"benchmark {name!r}: unknown; {hint}")


def benchmark_of(metadata: Mapping[str, Any]) -> Benchmark | None:
    """The benchmark that a task or stored row with this metadata is of; None for another dataset,
    and for a benchmark whose file or package no longer exists."""
    name = str(metadata.get(BENCHMARK_KEY, ""))
    try:
        return benchmark(name) if ":" in name else known_benchmarks().get(name)
    except ConfigError:
        return None


def groups(metadata: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The fields that the benchmark of a task is split by, and its values: [("level", "2")]."""
    found = benchmark_of(metadata)
    fields = found.group_by if found is not None else {}
    return [(field, str(metadata[field])) for field in fields if field in metadata]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


# Rows of a benchmark's file, published or reduced, into the one form that tasks are made of.

BENCHMARK_KEY = "benchmark"  # of Task.metadata and EvalRow.metadata: the benchmark's name
CANARY = "canary"


class BenchmarkRows:
    """Called with each row, gives the row with question, answer, id, kind and the fields that
    scores are split by, or None for one that cannot be asked as text, counted in `num_left_out`.

    Columns are found whatever their case; `columns` names those of a file with other names.
    """

    def __init__(self, benchmark: Benchmark, columns: ColumnsConfig, key: str) -> None:
        self.benchmark = benchmark
        self.key = key
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
        return {**row, column: decode_python(text)}
    except ForeignError as error:
        raise DataError(f"column {column!r}: not a readable object: {text!r:.80}") from error


def _first(row: Row, columns: tuple[str, ...]) -> Any:
    return next((value for name in columns if (value := _get(row, name)) is not None), None)


def _get(row: Row, column: str) -> Any:
    """The value of a column whatever its case, or None."""
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
    say: Callable[[str], None] = logger.warning,
    key: str = "sets.NAME",
) -> list[Task]:
    """Tasks of the benchmark in the order of its file: as many as the papers ask, the first `n`,
    or, for 0, all.

    `env_id` is the environment of rows that choose none; empty: deep search. `rows` are keys
    as for any dataset, `ends` and `key` are as in `load_tasks`. `say` gets a line for skipped rows
    and where groups have no column. Raises ConfigError for an unknown name, DataError for a missing
    file, with where to get it, or a bad row.
    """
    spec, config = benchmark(name), rows or RowsConfig()
    if not path:
        raise DataError(f"{spec.name}: no file given; {spec.how_to_get}")
    try:
        files = find_files([path] if isinstance(path, str | Path) else path)
        absent = [str(file) for file in files if not file.exists()]
    except DataError as error:
        raise DataError(f"{spec.name}: {error}; {spec.how_to_get}") from None
    if absent:
        raise DataError(f"{spec.name}: missing files: {', '.join(absent)}; {spec.how_to_get}")
    adapt = BenchmarkRows(spec, config.columns, key)
    tasks = load_tasks(
        files,
        env_id or ENV_ID,
        replace(config, columns=ColumnsConfig()),
        max_samples=spec.num_questions if n is None else n,
        ends=ends,
        say=say,
        adapt=adapt,
    )
    if adapt.num_left_out:
        say(
            f"{spec.name}: {adapt.num_left_out} questions with an attachment (column "
            f"{spec.attachment!r}) are skipped; {len(tasks)} remain"
        )
    missing = [field for field in spec.group_by if field not in adapt.fields_seen]
    if missing and len(missing) == len(spec.group_by) and spec.kind == "deep_search":
        columns = [spec.group_by[field] for field in missing]
        say(f"{spec.name}: no row has {', '.join(columns)}; scores by that column are omitted")
    return tasks
