"""Weights & Biases as a monitor.

A file in the run's folder names the tracker's run, so that a resumed run continues it. A step that
a resumed run repeats has two points.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta, Struct, field

from agentenv.assembly.reports.records import readable
from agentenv.base.config import ESSENTIAL
from agentenv.base.disk import write_whole
from agentenv.base.errors import ConfigError, ForeignError
from agentenv.base.untrusted import decode
from agentenv.data.data_files import Row

MODE = "WANDB_MODE"
INIT_TIMEOUT_S = 90.0
COLUMNS = ("step", "kind", "question", "answers", "trajectory", "reward", "success", "tool calls")


class Axis(NamedTuple):
    """The position of a row: the key of the step counter, and its value."""

    key: str
    step: int


def wandb_mode(chosen: str) -> Literal["online", "offline", "disabled"]:
    """The mode: that of WANDB_MODE if it is set, else `chosen`, that of the configuration."""
    named = os.environ.get(MODE, "").strip().lower() or chosen
    match named:
        case "online" | "offline" | "disabled" as mode:
            return mode
    raise ConfigError(f"{MODE} = {named!r}: expected online, offline or disabled")


class WandbConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights & Biases. The API key comes from the environment (WANDB_API_KEY) or from `wandb
    login`, never from the configuration; WANDB_MODE overrides `mode`."""

    project: Annotated[str, Meta(description="project of the run", extra=ESSENTIAL)] = "agentenv"
    name: Annotated[str, Meta(description="display name; empty: that of the run")] = ""
    group: Annotated[str, Meta(description="group of runs, such as the seeds of one setting")] = ""
    entity: Annotated[str, Meta(description="user or team; empty: the default")] = ""
    tags: Annotated[list[str], Meta(description="tags of the run")] = field(default_factory=list)
    mode: Annotated[
        Literal["online", "offline"],
        Meta(
            description="offline: write to the run's folder, for `wandb sync` later; the "
            "environment variable WANDB_MODE takes precedence"
        ),
    ] = "online"

    def check_login(self) -> None:
        """Raises ConfigError if the package finds no key of an online run."""
        if wandb_mode(self.mode) != "online":
            return
        import wandb

        wandb.setup(wandb.Settings(silent=True))  # else the login asks the server for a name
        if not wandb.login(prompt=False, verify=False):
            raise ConfigError(
                "monitor.wandb: Weights & Biases has no key; set WANDB_API_KEY, run `wandb login`, "
                'or write to the run\'s folder with monitor.wandb.mode = "offline"'
            )


def sample_cells(rows: Sequence[Row], axis: Axis) -> list[list[Any]]:
    """The cells of a table of trajectories, below COLUMNS."""
    return [
        [
            *(axis.step, row["kind"], row["question"], " | ".join(row["answers"])),
            *(readable(row), row["reward"], row["success"], len(row["tool_calls"])),
        ]
        for row in rows
    ]


class WandbMonitor:
    """Weights & Biases. A file keeps the id of the tracker's run and its number of rows. Curves use
    the step of the run as their x-axis, not the number of the row; those of a cold start (sft/...)
    its own steps."""

    def __init__(self, config: WandbConfig, run: Path, settings: dict[str, Any]) -> None:
        """`settings`: the whole configuration of the run, which the tracker shows."""
        self.config, self.run, self.settings = config, run, settings
        self._path = run / "wandb.json"
        self._tracker: Any = None
        self._axes: set[str] = set()
        try:
            self._saved = decode(self._path.read_bytes(), dict[str, Any])
        except (OSError, ForeignError):
            self._saved = {}
        self._saved = self._saved or {"id": os.urandom(6).hex(), "num_rows": 0}

    def trajectories(self, name: str, rows: Sequence[Row], axis: Axis) -> None:
        import wandb

        table = wandb.Table(columns=list(COLUMNS), data=sample_cells(rows, axis))
        self.log({f"trajectories/{name}": table}, axis)

    def finish(self, exit_code: int) -> None:
        if self._tracker is not None:
            self._tracker.finish(exit_code=exit_code)

    def _begin(self) -> Any:
        import wandb

        config, mode = self.config, wandb_mode(self.config.mode)
        return wandb.init(
            project=config.project,
            name=config.name or self.run.name,
            entity=config.entity or None,
            group=config.group or None,
            tags=config.tags,
            mode=mode,
            dir=str(self.run),
            id=self._saved["id"],
            resume="allow" if mode == "online" else None,
            config=self.settings,
            settings=wandb.Settings(
                silent=True, console="off", init_timeout=INIT_TIMEOUT_S, x_disable_stats=True
            ),
        )

    def log(self, row: Row, axis: Axis) -> None:
        """Log figures or a table at a step."""
        if self._tracker is None:
            self._tracker = self._begin()
        if axis.key not in self._axes:
            self._axes.add(axis.key)
            shown = "*" if axis.key == "step" else f"{axis.key.partition('/')[0]}/*"
            self._tracker.define_metric(shown, step_metric=axis.key)
        self._tracker.log({**row, axis.key: axis.step}, step=self._saved["num_rows"])
        self._saved["num_rows"] += 1
        write_whole(self._path, json.dumps(self._saved) + "\n")
