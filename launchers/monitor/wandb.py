"""Weights & Biases."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from launchers.monitor.base import Axis, Row
from launchers.monitor.config import WandbConfig
from launchers.trajectories import readable

ID_FILE = "wandb.json"
INIT_TIMEOUT_S = 90.0
COLUMNS = ("step", "kind", "question", "answers", "trajectory", "reward", "success", "tool calls")


class WandbMonitor:
    """One run there for one run here: its id and how many rows it has are kept in the run's
    folder, so that a resumed run goes on under it. Curves are over the step of the run, whatever
    the number of the row; a step that a resumed run repeats has two points."""

    def __init__(self, config: WandbConfig, run: Path, settings: dict[str, Any]) -> None:
        """`settings` is the whole configuration of the run, shown beside it."""
        self._config = config
        self._run = run
        self._settings = settings
        self._there: Any = None
        self._axes: set[str] = set()
        self._id, self._num_rows = self._continued()

    def log(self, metrics: dict[str, float], axis: Axis) -> None:
        there = self._begin()
        if axis.key not in self._axes:
            self._axes.add(axis.key)
            shown = "*" if axis.key == "step" else f"{axis.key.partition('/')[0]}/*"
            there.define_metric(shown, step_metric=axis.key)
        self._log({**metrics, axis.key: axis.step})

    def trajectories(self, name: str, rows: Sequence[Row], axis: Axis) -> None:
        import wandb

        self._begin()
        table = wandb.Table(columns=list(COLUMNS))
        for row in rows:
            table.add_data(
                axis.step,
                row["kind"],
                row["question"],
                " | ".join(row["answers"]),
                readable(row),
                row["reward"],
                row["success"],
                len(row["tool_calls"]),
            )
        self._log({f"trajectories/{name}": table, axis.key: axis.step})

    def finish(self, exit_code: int) -> None:
        if self._there is not None:
            self._there.finish(exit_code=exit_code)

    def _log(self, row: Row) -> None:
        self._there.log(row, step=self._num_rows)
        self._num_rows += 1
        self._save()

    def _begin(self) -> Any:
        if self._there is None:
            import wandb

            config = self._config
            self._there = wandb.init(
                project=config.project,
                name=config.name or self._run.name,
                entity=config.entity or None,
                group=config.group or None,
                tags=config.tags,
                mode=config.mode,
                dir=str(self._run),
                id=self._id,
                resume="allow" if config.mode == "online" else None,
                config=self._settings,
                settings=wandb.Settings(
                    silent=True, console="off", init_timeout=INIT_TIMEOUT_S, x_disable_stats=True
                ),
            )
            self._save()
        return self._there

    def _continued(self) -> tuple[str, int]:
        """Id and number of rows of the earlier part of this run, or a fresh id."""
        path = self._run / ID_FILE
        if path.is_file():
            saved = json.loads(path.read_text(encoding="utf-8"))
            return str(saved["id"]), int(saved["num_rows"])
        return os.urandom(6).hex(), 0

    def _save(self) -> None:
        path = self._run / ID_FILE
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps({"id": self._id, "num_rows": self._num_rows}) + "\n")
        partial.replace(path)
