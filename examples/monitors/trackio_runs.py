"""Trackio as a monitor: nothing leaves the machine unless its environment variables name a Space
or a server (TRACKIO_SPACE_ID, TRACKIO_SERVER_URL). Tested with 0.43.0."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from agentenv.assembly.reports.monitors import COLUMNS, Axis, MonitorPart, sample_cells
from agentenv.base.disk import write_whole
from agentenv.base.errors import ForeignError, MissingError
from agentenv.base.untrusted import decode
from agentenv.data.data_files import Row


class TrackioConfig(MonitorPart, frozen=True, kw_only=True, tag="trackio"):
    """Trackio, with a local database: TRACKIO_DIR, by default in the cache of the hub."""

    project: Annotated[str, Meta(description="project of the run")] = "agentenv"
    display_name: Annotated[str, Meta(description="name of the run; empty: its folder's")] = ""
    group: Annotated[str, Meta(description="group of runs, such as the seeds of one setting")] = ""

    def __post_init__(self) -> None:
        if importlib.util.find_spec("trackio") is None:
            raise MissingError("the monitor trackio: `pip install trackio` installs its package")

    def build(self, run: Path, settings: dict[str, Any]) -> TrackioMonitor:
        return TrackioMonitor(self, run, settings)


class TrackioMonitor:
    """A file in the run's folder keeps the name of Trackio's run, which a resumed run continues."""

    def __init__(self, config: TrackioConfig, run: Path, settings: dict[str, Any]) -> None:
        self._config, self._run, self._settings = config, run, settings
        self._path = run / "trackio.json"
        self._tracker: Any = None

    def log(self, metrics: dict[str, float], axis: Axis) -> None:
        self._begun().log(metrics, step=axis.step)

    def trajectories(self, name: str, rows: Sequence[Row], axis: Axis) -> None:
        import trackio

        table = trackio.Table(columns=list(COLUMNS), data=sample_cells(rows, axis))
        self._begun().log({f"trajectories/{name}": table}, step=axis.step)

    def finish(self, exit_code: int) -> None:
        if self._tracker is not None:
            self._tracker.finish()

    def _begun(self) -> Any:
        if self._tracker is None:
            import trackio

            try:
                known = decode(self._path.read_bytes(), dict[str, str]).get("name")
            except (OSError, ForeignError):
                known = None
            self._tracker = trackio.init(
                project=self._config.project,
                name=known or self._config.display_name or self._run.resolve().name,
                group=self._config.group or None,
                config=self._settings,
                resume="allow" if known else "never",
                **{"embed": False, "auto_log_gpu": False, "auto_log_cpu": False},
            )
            found = {"name": str(self._tracker.name)}  # another one if that was in use
            write_whole(self._path, json.dumps(found) + "\n")
        return self._tracker
