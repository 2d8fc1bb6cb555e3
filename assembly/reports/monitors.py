"""Monitors of a run, besides metrics.jsonl: TensorBoard, Weights & Biases, or a custom one
(examples/monitors has OpenTelemetry and Trackio).

A monitor is a class with the three methods of `Monitor`; `make_monitors` creates those of the table
[monitor]. `Monitors` runs them in a separate thread, so that the run never waits for them, and
redacts secrets in the rows."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol

from msgspec import Struct

from agentenv.assembly.reports.records import readable
from agentenv.base.config import ESSENTIAL, about
from agentenv.base.disk import write_whole
from agentenv.base.errors import ConfigError, ForeignError, MissingError
from agentenv.base.installation import install_hint
from agentenv.base.registry import Registry
from agentenv.base.secrets import SECRETS
from agentenv.base.untrusted import decode
from agentenv.contract.monitoring import Monitoring
from agentenv.data.data_files import Row

# Weights & Biases as a monitor.
#
# A file in the run's folder names the tracker's run, so that a resumed run continues it. A step
# that a resumed run repeats has two points.

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

    project: Annotated[str, about("project of the run", ESSENTIAL)] = "agentenv"
    name: Annotated[str, about("display name; empty: that of the run")] = ""
    group: Annotated[str, about("group of runs, such as the seeds of one setting")] = ""
    entity: Annotated[str, about("user or team; empty: the default")] = ""
    tags: Annotated[list[str], about("tags of the run")] = []
    mode: Annotated[
        Literal["online", "offline"],
        about(
            "offline: write to the run's folder, for `wandb sync` later; the "
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
    cells = []
    for row in rows:
        question = [row["kind"], row["question"], " | ".join(row["answers"])]
        outcome = [readable(row), row["reward"], row["success"], len(row["tool_calls"])]
        cells.append([axis.step, *question, *outcome])
    return cells


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


COLD_START_STEP = "sft/step"


class Monitor(Protocol):
    """Receives the records of a run. All calls come in order from one thread, never from the event
    loop, and may block; the first call starts the monitor. The first exception is logged as a
    warning and ends the monitor; the run continues."""

    def log(self, metrics: dict[str, float], axis: Axis) -> None:
        """Log the numbers of one row of metrics.jsonl."""

    def trajectories(self, name: str, rows: Sequence[Row], axis: Axis) -> None:
        """Log a sample of trajectories, as rows of training or of an evaluation."""

    def finish(self, exit_code: int) -> None:
        """Flush; called once, even if nothing was logged."""


def figures(row: Row) -> dict[str, float]:
    """The numbers of a row, except the step counters."""
    return {
        key: float(value)
        for key, value in row.items()
        if isinstance(value, int | float) and key not in ("step", COLD_START_STEP)
    }


class MonitorPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of the keys of a custom monitor, an entry of [[monitor.own]]."""

    def build(self, run: Path, settings: dict[str, Any]) -> Monitor:
        """The monitor of the run in the folder `run`; `settings`: the run's configuration."""
        raise NotImplementedError


MONITORS = Registry("monitor", "agentenv.monitors", MonitorPart, {})

if TYPE_CHECKING:
    AnyMonitor = MonitorPart
else:
    AnyMonitor = MONITORS.key


_OWN = (
    "[[monitor.own]]: custom monitors and their keys; name is 'module:Class', or an entry point of "
    "an installed package in agentenv.monitors"
)


class MonitorConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Destinations of metrics besides metrics.jsonl."""

    tensorboard: Annotated[bool, about("write RUN/tensorboard", ESSENTIAL)] = False
    wandb: Annotated[WandbConfig | None, about("log to Weights & Biases")] = None
    own: Annotated[list[AnyMonitor], about(_OWN)] = []

    def __post_init__(self) -> None:
        for key in ("tensorboard", "wandb"):
            if getattr(self, key) and importlib.util.find_spec(key) is None:
                raise MissingError(
                    f"monitor.{key}: the package {key} is not installed; "
                    f"`{install_hint('monitor')}` installs it"
                )
        if self.wandb is not None:
            self.wandb.check_login()

    def start(self, run: Path, settings: dict[str, Any]) -> Monitors:
        """The monitors of the run in the folder `run`; `settings`: its whole configuration."""
        return Monitors(self, run, settings)


class RolloutMonitorConfig(MonitorConfig, frozen=True, kw_only=True):
    """As MonitorConfig, for a run with rollouts, of which monitors show samples."""

    num_trajectories: Annotated[
        int, about("sample trajectories per evaluation, and per sampled step; 0: none", ge=0)
    ] = 8
    trajectories_every: Annotated[
        int, about("steps between samples of training; 0: evaluations only", ge=0)
    ] = 10


class TensorBoardMonitor:
    """RUN/tensorboard: scalars by step, sample trajectories as text. A resumed run writes to the
    same folder; the reader discards earlier records from its first repeated step on. The cold
    start counts its own steps, in a subfolder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writers: dict[str, Any] = {}

    def log(self, metrics: dict[str, float], axis: Axis) -> None:
        writer = self._writer(axis)
        for key, value in metrics.items():
            writer.add_scalar(key, value, axis.step)
        writer.flush()

    def trajectories(self, name: str, rows: Sequence[Row], axis: Axis) -> None:
        text = "\n\n".join(readable(row) for row in rows)
        verbatim = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown's code block
        self._writer(axis).add_text(f"trajectories/{name}", verbatim, axis.step)

    def finish(self, exit_code: int) -> None:
        for writer in self._writers.values():
            writer.close()

    def _writer(self, axis: Axis) -> Any:
        if axis.key not in self._writers:
            from torch.utils.tensorboard import SummaryWriter

            folder = self._folder if axis.key == "step" else self._folder / "cold_start"
            self._writers[axis.key] = SummaryWriter(str(folder), purge_step=axis.step)
        return self._writers[axis.key]


FINISH_TIMEOUT_S = 60.0
MAX_WAITING = 10_000  # calls; a monitor that hangs must not fill the memory

logger = logging.getLogger(__name__)


def make_monitors(config: MonitorConfig, run: Path, settings: dict[str, Any]) -> dict[str, Monitor]:
    """The configured monitors, by the name used in warnings. `settings`: the whole configuration of
    the run."""
    found: dict[str, Monitor] = {}
    if config.tensorboard:
        found["TensorBoard"] = TensorBoardMonitor(run / "tensorboard")
    if config.wandb is not None:
        found["Weights & Biases"] = WandbMonitor(config.wandb, run, settings)
    for own in config.own:
        found[str(own.__struct_config__.tag)] = own.build(run, settings)
    return found


class Monitors(Monitoring):
    """Passes the rows of a run to its monitors, in order, in a separate thread."""

    def __init__(self, config: MonitorConfig, run: Path, settings: dict[str, Any]) -> None:
        self._config = config
        self._axis = Axis("step", 0)
        self._calls: queue.Queue[tuple[str, Callable[[], None]] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self.working = make_monitors(config, run, settings)

    def log(self, row: Row) -> None:
        """Pass a row of metrics.jsonl to every monitor."""
        # a cold start counts its own steps, all before step 1 of the run
        key = COLD_START_STEP if COLD_START_STEP in row else "step"
        self._axis = Axis(key, int(row.get(key, 0)))
        for name, monitor in self.working.items():
            self._enqueue(name, partial(monitor.log, figures(row), self._axis))

    def num_wanted(self, name: str) -> int:
        """Number of trajectories of "step-N" or "eval-SET-WHEN" to show."""
        config = self._config
        if not self.working or not isinstance(config, RolloutMonitorConfig):
            return 0
        every = config.trajectories_every
        is_due = not name.startswith("step-") or (every and self._axis.step % every == 0)
        return config.num_trajectories if is_due else 0

    def trajectories(self, name: str, rows: Sequence[Row]) -> None:
        """Pass a sample of the trajectories of "step-N" or "eval-SET-WHEN" to every monitor."""
        title = "train" if name.startswith("step-") else name.partition("-")[2].partition("-")[0]
        for shown, monitor in self.working.items():
            self._enqueue(shown, partial(self._show, monitor, title, rows, self._axis))

    def _show(self, monitor: Monitor, title: str, rows: Sequence[Row], axis: Axis) -> None:
        monitor.trajectories(title, SECRETS.tree(list(rows)), axis)

    def finish(self, exit_code: int) -> None:
        """Flush, and wait at most FINISH_TIMEOUT_S for it."""
        for name, monitor in self.working.items():
            self._enqueue(name, partial(monitor.finish, exit_code))
        thread, self._thread = self._thread, None
        if thread is None:
            return
        with suppress(queue.Full):
            self._calls.put_nowait(None)
        thread.join(FINISH_TIMEOUT_S)
        if thread.is_alive() or self._dropped:
            text = (
                "monitors: some records were not delivered within %g s; metrics.jsonl has all of "
                "them"
            )
            logger.warning(text, FINISH_TIMEOUT_S)

    def _enqueue(self, name: str, call: Callable[[], None]) -> None:
        if self._thread is None:  # a daemon: a hanging monitor does not keep the process alive
            self._thread = threading.Thread(target=self._run, name="monitors", daemon=True)
            self._thread.start()
        try:
            self._calls.put_nowait((name, call))
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        while (waiting := self._calls.get()) is not None:
            name, call = waiting
            try:
                if name in self.working:
                    call()
            except Exception as error:  # of third-party code; the run continues without the monitor
                self.working = {key: one for key, one in self.working.items() if key != name}
                text = "monitor %s is switched off: %s: %s; metrics.jsonl has all records"
                logger.warning(text, name, type(error).__name__, error)
