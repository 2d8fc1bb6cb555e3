"""Datasets: rows to tasks, in an order that a seed determines and a position resumes.

`agentenv/data/data_files.py` reads the files, `agentenv/data/rows.py` converts the rows.
`agentenv/text/prompt_fitting.py` finds prompts that are too long before a run starts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm
from pathlib import Path
from random import Random

from msgspec.structs import replace

from agentenv.base.errors import ConfigError, DataError
from agentenv.base.types import Task
from agentenv.data import data_files
from agentenv.data.curriculum import Curriculum
from agentenv.data.file_formats import RawRow
from agentenv.data.rows import MixPart, RowReader, RowsConfig

MAX_LISTED = 50  # invalid rows that are listed individually
MAX_PERIOD = 10_000  # questions after which the order of a mix's parts repeats

Paths = str | Path | Sequence[str | Path]
Adapt = Callable[[data_files.Row], data_files.Row | None]
logger = logging.getLogger(__name__)


def load_tasks(
    paths: Paths,
    env_id: str,
    config: RowsConfig | None = None,
    *,
    max_samples: int = 0,
    ends: int = 0,
    report: Callable[[str], None] = logger.warning,
    adapt: Adapt | None = None,
    held_out: bool = False,
    key: str = "data",
) -> list[Task]:
    """Tasks of the rows of a file, a folder, a pattern, or a list of them, in order.

    `env_id` is the environment of rows that name none; `max_samples` takes the first n (0: all);
    `ends` reads only that many rows at each end of a file (0: all). `report` reports rows that
    `config.skip_bad_rows` skips. `adapt` converts a row to a known schema, or returns None to skip
    it. Generated rows are those of training unless `held_out`. `key` is the prefix of the keys of
    `config` in messages. Raises DataError with file, row, key and expectation, also if there are no
    rows, and ConfigError for an environment of `config.env_by` that no row selects.
    """
    reader = RowReader(config or RowsConfig(), env_id, keep_golds=adapt is None, key=key)
    tasks = _read(reader, _listed(paths), max_samples, report, adapt, ends, held_out=held_out)
    if not (max_samples or ends):
        _check_env_by([reader])
    return tasks


def load_mix(
    parts: Sequence[MixPart],
    env_id: str,
    config: RowsConfig,
    resolve: Callable[[str], Path] = Path,
    *,
    ends: int = 0,
    report: Callable[[str], None] = logger.warning,
) -> TaskMix:
    """The parts of a weighted mix, each loaded like `load_tasks`; `resolve` converts its paths."""
    readers, loaded = [], []
    for number, part in enumerate(parts):
        columns, source = part.columns or config.columns, part.source or config.source
        own = replace(config, columns=columns, source=source)
        key = f"data.mix[{number}]" if part.columns else "data"
        reader = RowReader(own, part.env_id or env_id, key=key)
        paths = [resolve(str(path)) for path in _listed(part.path)]
        loaded.append(_read(reader, paths, part.max_samples, report, ends=ends))
        readers.append(reader)
    if not (ends or any(part.max_samples for part in parts)):
        _check_env_by(readers)
    return TaskMix(loaded, [part.weight for part in parts])


class TaskMix(list[Task]):
    """Tasks in weighted parts; as a list, all of them, part by part.

    `pattern` is one period of part numbers: after every position, the number of draws of each part
    is proportional to its weight, to within one task. Weights have a resolution of 1 in 10,000.
    """

    def __init__(self, parts: Sequence[Sequence[Task]], weights: Sequence[float]) -> None:
        super().__init__(task for part in parts for task in part)
        self.parts = [list(part) for part in parts]
        self.weights = list(weights)
        self.pattern = _interleave(_whole(self.weights))


@dataclass(eq=False)
class TaskStream:
    """Endless epochs over `tasks`; the seed determines a separate order for each epoch.

    The parts of a `TaskMix` have separate epochs and alternate by weight; a curriculum, if any,
    draws the task of each position. `position` counts returned tasks; a stream created with the
    position of another one continues it exactly.
    """

    tasks: Sequence[Task]
    seed: int
    position: int = 0
    curriculum: Curriculum | None = None

    def __post_init__(self) -> None:
        self._pattern = self.tasks.pattern if isinstance(self.tasks, TaskMix) else [0]
        self._parts = parts_of(self.tasks)
        periods, place = divmod(self.position, len(self._pattern))
        self._drawn = [  # tasks of each part
            periods * self._pattern.count(number) + self._pattern[:place].count(number)
            for number in range(len(self._parts))
        ]

    def next(self, drawn: str = "") -> Task:
        """The task at `position`, which advances. `drawn` is the id of the task that the curriculum
        of an earlier process drew for this position, if any."""
        number = self._pattern[self.position % len(self._pattern)]
        self.position += 1
        if self.curriculum is not None:
            return self.curriculum.draw(self.position - 1, number, drawn)
        part = self._parts[number]
        epoch, place = divmod(self._drawn[number], len(part))
        self._drawn[number] += 1
        key = f"{self.seed}/part/{number}" if number else str(self.seed)
        return part[shuffled(f"{key}/epoch/{epoch}", len(part))[place]]


def parts_of(tasks: Sequence[Task]) -> Sequence[Sequence[Task]]:
    """The parts of a mix, or all tasks as the only one."""
    return tasks.parts if isinstance(tasks, TaskMix) else [tasks]


@lru_cache(64)
def shuffled(key: str, size: int) -> list[int]:
    """The numbers below `size` in the order of an epoch, which `key` names."""
    order = list(range(size))
    Random(key).shuffle(order)
    return order


def _listed(paths: Paths) -> list[str | Path]:
    return [paths] if isinstance(paths, str | Path) else list(paths)


def _read(
    reader: RowReader,
    paths: Iterable[str | Path],
    max_samples: int,
    report: Callable[[str], None],
    adapt: Adapt | None = None,
    ends: int = 0,
    *,
    held_out: bool = False,
) -> list[Task]:
    files, source = data_files.find_files(paths), reader.config.source
    if source and not any(map(data_files.is_generated, files)):
        raise ConfigError(
            f"source = {source} is for generated rows ({', '.join(data_files.GENERATORS)}:NAME), "
            f"and {files[0]} is a file; remove it"
        )
    tasks: list[Task] = []
    bad: list[str] = []
    rows = (
        data_files.generated_rows(path, source, held_out=held_out, most=ends or max_samples)
        if data_files.is_generated(path)
        else data_files.read_rows(path, ends)
        for path in files
    )
    for read in (raw for some in rows for raw in some):
        raw = read if adapt is None else _adapted(read, adapt)
        if raw is None:
            continue
        try:
            tasks.append(reader.task(raw))
        except DataError as error:
            if not reader.config.skip_bad_rows:
                raise
            bad.append(str(error))
        if max_samples and len(tasks) == max_samples:
            break
    names = ", ".join(map(str, files[:3])) + (" and others" if len(files) > 3 else "")
    if not tasks:
        why = f"; all {len(bad)} rows are invalid, the first: {bad[0]}" if bad else ""
        raise DataError(f"{names}: the dataset is empty; expected a question in each row{why}")
    for path, found in reader.doubts.items():
        for what, (number, first) in found.items():
            report(f"{path}: {number} {what}; the first: {first}")
    if bad:
        more = f"\n  and {len(bad) - MAX_LISTED} more" if len(bad) > MAX_LISTED else ""
        listed = "".join(f"\n  {text}" for text in bad[:MAX_LISTED])
        report(
            f"{names}: {len(bad)} invalid rows are skipped, {len(tasks)} are used:{listed}{more}"
        )
    return tasks


def _adapted(raw: RawRow, adapt: Adapt) -> RawRow | None:
    if raw.problem:
        return raw
    try:
        row = adapt(raw.row)
    except DataError as error:
        return raw._replace(problem=str(error))
    return None if row is None else raw._replace(row=row)


def _check_env_by(readers: Sequence[RowReader]) -> None:
    """Reject a key of env_by that selects no row; a misspelled one would go unnoticed."""
    used = {value for reader in readers for value in reader.env_by_used}
    seen = {value for reader in readers for value in reader.env_by_seen}
    for value in readers[0].config.env_by:
        if value not in used:
            raise ConfigError(
                f"env_by: {value!r} selects no row's environment; values of data_source and "
                f"ability in the rows: {sorted(seen)[:20]}"
            )


def _whole(weights: Sequence[float]) -> list[int]:
    """Weights as whole numbers whose sum, the period of the mix, is at most about 10,000."""
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(share.denominator for share in exact))
    whole = [int(share * scale) for share in exact]
    whole = [number // gcd(*whole) for number in whole]
    if sum(whole) > MAX_PERIOD:
        total = sum(whole)
        whole = [max(1, round(number * MAX_PERIOD / total)) for number in whole]
    return whole


def _interleave(weights: Sequence[int]) -> list[int]:
    """One period of part numbers: each position goes to the part furthest below its share."""
    total = sum(weights)
    behind = [0] * len(weights)
    pattern = []
    for _ in range(total):
        behind = [debt + weight for debt, weight in zip(behind, weights, strict=True)]
        number = max(range(len(weights)), key=behind.__getitem__)
        behind[number] -= total
        pattern.append(number)
    return pattern
