"""Trackio as a monitor: the rows of a run in its local database, for `trackio show`.

Nothing is sent anywhere, unless Trackio's own variables of the environment name a Space or a
server. Tried with 0.43.0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from agentenv.data_files import Row
from agentenv.disk import write_whole
from agentenv.errors import ForeignError
from agentenv.pipelines.records.trajectories import readable
from agentenv.untrusted import decode

if TYPE_CHECKING:
    from agentenv.pipelines.monitors.monitors import Axis

NAME_FILE = "trackio.json"
COLUMNS = ("kind", "question", "answers", "trajectory", "reward", "success", "tool calls")


class TrackioConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Trackio, in this machine's database: TRACKIO_DIR, by default in the cache of the hub."""

    project: Annotated[str, Meta(description="project of the run")] = "agentenv"
    name: Annotated[str, Meta(description="name shown; empty: that of the run")] = ""
    group: Annotated[str, Meta(description="group of runs, such as the seeds of one setting")] = ""


class TrackioMonitor:
    """One run there for one run here: its name there is kept in RUN/trackio.json, so that a
    resumed run goes on under it. A step that a resumed run repeats has two points. Where the cold
    start counts its own steps, its figures (sft/...) stand at these."""

    def __init__(self, config: TrackioConfig, run: Path, settings: dict[str, Any]) -> None:
        """`settings` is the whole configuration of the run, shown beside it."""
        self._config = config
        self._path = run / NAME_FILE
        self._name = config.name or run.resolve().name
        self._settings = settings
        self._there: Any = None

    def log(self, metrics: dict[str, float], axis: Axis) -> None:
        self._begin().log(metrics, step=axis.step)

    def trajectories(self, name: str, rows: Sequence[Row], axis: Axis) -> None:
        import trackio

        there = self._begin()
        cells = [
            [
                *(row["kind"], row["question"], " | ".join(row["answers"]), readable(row)),
                *(row["reward"], row["success"], len(row["tool_calls"])),
            ]
            for row in rows
        ]
        table = trackio.Table(columns=list(COLUMNS), data=cells)
        there.log({f"trajectories/{name}": table}, step=axis.step)

    def finish(self, exit_code: int) -> None:
        if self._there is not None:
            self._there.finish()

    def _begin(self) -> Any:
        if self._there is None:
            import trackio

            known = self._continued()
            self._there = trackio.init(
                project=self._config.project,
                name=known or self._name,
                group=self._config.group or None,
                config=self._settings,
                resume="allow" if known else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
            write_whole(self._path, json.dumps({"name": str(self._there.name)}) + "\n")
        return self._there

    def _continued(self) -> str:
        """The name there of the earlier part of this run; "" without one."""
        try:
            return decode(self._path.read_bytes(), dict[str, str]).get("name", "")
        except (OSError, ForeignError):
            return ""
