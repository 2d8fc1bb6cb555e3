"""Benchmarks by name, from files that the user has: `load_benchmark("gaia", "metadata.jsonl")`.

The metadata of its tasks holds the benchmark's name and the fields that scores are split by, and
of the rest of a row only a system prompt and GSM8K's solution.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from agentenv.data_config import ColumnsConfig, RowsConfig
from agentenv.data_files import find_files
from agentenv.dataset import Paths, load_tasks
from agentenv.errors import ConfigError, DataError
from agentenv.types import Task
from launchers.evaluation.benchmark_rows import BENCHMARK_KEY, BenchmarkRows
from launchers.evaluation.benchmark_specs import SPECS
from launchers.evaluation.benchmark_types import Benchmark
from launchers.evaluation.rows import EvalRow

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
