"""The seam between a run and what shows it elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

Row = dict[str, Any]

COLD_START_STEP = "sft/step"


class Axis(NamedTuple):
    """Where a row stands: the key that counts, and its value."""

    key: str
    step: int


class Monitor(Protocol):
    """What follows a run. All calls come in order from one thread, never from the event loop, and
    may take their time; the first one begins it. Whatever they raise is told once as a warning,
    and the monitor is left alone from then on: the run does not depend on it."""

    def log(self, metrics: dict[str, float], axis: Axis) -> None:
        """The figures of one row of metrics.jsonl."""
        ...

    def trajectories(self, name: str, rows: Sequence[Row], axis: Axis) -> None:
        """A sample of trajectories, as rows of training or of an evaluation."""
        ...

    def finish(self, exit_code: int) -> None:
        """Write what is left; called once, also when nothing was logged."""
        ...


def axis_of(row: Row) -> Axis:
    """A cold start counts its own steps, which all lie before step 1 of the run."""
    if COLD_START_STEP in row:
        return Axis(COLD_START_STEP, int(row[COLD_START_STEP]))
    return Axis("step", int(row.get("step", 0)))


def figures(row: Row) -> dict[str, float]:
    """The numbers of a row, without the ones that count steps."""
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and key not in ("step", COLD_START_STEP)
    }
