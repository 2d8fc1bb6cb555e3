"""The contract of what receives the records of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


class Monitoring:
    """Ignores the records of a run; `assembly/reports/monitors.py` passes them on."""

    def log(self, row: Row) -> None:
        """Receive a row of metrics.jsonl."""

    def num_wanted(self, name: str) -> int:
        """Number of trajectories of "step-N" or "eval-SET-WHEN" to show."""
        return 0

    def trajectories(self, name: str, rows: Sequence[Row]) -> None:
        """Receive a sample of the trajectories of "step-N" or "eval-SET-WHEN"."""

    def finish(self, exit_code: int) -> None:
        """Flush."""
