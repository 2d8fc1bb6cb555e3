"""What the first report fills into stored rows, so that no answer is scored twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentenv.errors import ConfigError
from launchers.evaluation.lock import lock
from launchers.evaluation.rows import EvalRow
from launchers.evaluation.store import read_rows, replace_rows


def num_filled(rows: Sequence[EvalRow]) -> int:
    """Rows with scores, and rows whose answer was compared with those of other samples."""
    return sum(("em" in row.scores) + (row.same_as is not None) for row in rows)


def keep_filled(folder: Path, rows: Sequence[EvalRow]) -> None:
    """Store scores and comparisons of these rows. Rows that another command has changed since are
    left alone. Nothing is stored, and computed again next time, while one writes there or where
    nothing can be written."""
    known = {row.key: row for row in rows}
    try:
        with lock(folder):
            now = read_rows(folder)
            for row in now:
                one = known.get(row.key)
                if one is not None and _graded(one) == _graded(row):
                    row.scores, row.same_as = one.scores, one.same_as
            replace_rows(folder, now)
    except ConfigError:
        return


def _graded(row: EvalRow) -> tuple[str, str, bool]:
    return row.end, row.prediction, row.success
