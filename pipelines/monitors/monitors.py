"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, Trackio, OpenTelemetry, or
a monitor of your own.

A monitor is a class with the three methods of `Monitor`; `make_monitors` makes those that the
table [monitor] asks for. `Monitors` runs them in a thread of its own, so that nothing waits for
them, and takes secrets out of what they are given.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Sequence
from configparser import ConfigParser
from configparser import Error as ConfigParserError
from contextlib import suppress
from functools import partial
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Protocol
from urllib.parse import urlsplit

from msgspec import Meta, Struct, field

from agentenv.config import ESSENTIAL
from agentenv.data_files import Row
from agentenv.disk import write_whole
from agentenv.errors import ConfigError
from agentenv.install import install_hint
from agentenv.pipelines.monitors.otel import OtelConfig, OtelMonitor
from agentenv.pipelines.monitors.trackio_runs import TrackioConfig, TrackioMonitor
from agentenv.pipelines.records.trajectories import readable
from agentenv.redact import Redactor
from agentenv.registry import Registry

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


API_KEY, MODE = "WANDB_API_KEY", "WANDB_MODE"
KEY_FILES = ("WANDB_API_KEY_FILE", "WANDB_IDENTITY_TOKEN_FILE")  # variables that name a file
MODES = {"run": "online", "dryrun": "offline"}  # earlier names


def wandb_mode(chosen: str) -> Literal["online", "offline", "disabled"]:
    """Of WANDB_MODE where that is set, else the one that the configuration chose."""
    named = os.environ.get(MODE, "").strip().lower() or chosen
    match MODES.get(named, named):
        case "online" | "offline" | "disabled" as mode:
            return mode
    raise ConfigError(f"{MODE} = {named!r}: expected online, offline or disabled")


def is_logged_in() -> bool:
    """Whether Weights & Biases finds a key: in the environment, or where `wandb login` puts it."""
    if any(os.environ.get(name) for name in (API_KEY, *KEY_FILES)):
        return True
    host = urlsplit(_wandb_url()).netloc
    paths = [Path(os.environ["NETRC"])] if os.environ.get("NETRC") else []
    paths += [Path.home() / name for name in (".netrc", "_netrc")]
    path = next((one.expanduser() for one in paths if one.expanduser().is_file()), None)
    if path is None:
        return False
    try:
        found = netrc(path).authenticators(host)
    except (NetrcParseError, OSError) as error:
        raise ConfigError(
            f"monitor.wandb: {path} cannot be read: {error}; set {API_KEY}"
        ) from error
    return found is not None and bool(found[2])


def _wandb_url() -> str:
    """The server: of the environment, or of the last `wandb login --host`."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    parser = ConfigParser(interpolation=None)
    with suppress(ConfigParserError, OSError, UnicodeDecodeError):
        parser.read(Path(folder).expanduser() / "settings")
    return parser.get("default", "base_url", fallback="https://api.wandb.ai")


class WandbConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights & Biases. Its key comes from the environment (WANDB_API_KEY) or from `wandb login`,
    never from the configuration; WANDB_MODE comes before `mode`."""

    project: Annotated[str, Meta(description="project of the run", extra=ESSENTIAL)] = "agentenv"
    name: Annotated[str, Meta(description="name shown; empty: that of the run")] = ""
    entity: Annotated[str, Meta(description="user or team; empty: the default one")] = ""
    group: Annotated[str, Meta(description="group of runs, such as the seeds of one setting")] = ""
    tags: Annotated[list[str], Meta(description="tags of the run")] = field(default_factory=list)
    mode: Annotated[
        Literal["online", "offline"],
        Meta(
            description="offline: written to the run's folder, for `wandb sync` later; the "
            "environment variable WANDB_MODE comes before it"
        ),
    ] = "online"

    def __post_init__(self) -> None:
        if wandb_mode(self.mode) == "online" and not is_logged_in():
            raise ConfigError(
                f"monitor.wandb: the environment variable {API_KEY} is not set, and no netrc file "
                f"has a key for {urlsplit(_wandb_url()).netloc}; set it or run `wandb login`, or "
                'write to the run\'s folder with monitor.wandb.mode = "offline"'
            )


class MonitorPart(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="name"):
    """Base of the keys of a monitor from elsewhere, an entry of [[monitor.own]]."""

    def build(self, run: Path, settings: dict[str, Any]) -> Monitor:
        """The monitor of the run in this folder; `settings` is the run's configuration."""
        raise NotImplementedError


MONITORS = Registry("monitor", "agentenv.monitors", MonitorPart, {})

if TYPE_CHECKING:
    AnyMonitor = MonitorPart
else:
    AnyMonitor = MONITORS.key


class MonitorConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where metrics go beside metrics.jsonl."""

    tensorboard: Annotated[bool, Meta(description="write RUN/tensorboard", extra=ESSENTIAL)] = False
    wandb: Annotated[WandbConfig | None, Meta(description="log to Weights & Biases")] = None
    trackio: Annotated[TrackioConfig | None, Meta(description="log to Trackio, locally")] = None
    otel: Annotated[
        OtelConfig | None, Meta(description="send spans and metrics by OpenTelemetry")
    ] = None
    own: Annotated[
        list[AnyMonitor],
        Meta(
            description="[[monitor.own]]: monitors from elsewhere and their keys; name is "
            "'module:Class', or the entry point of an installed package in agentenv.monitors"
        ),
    ] = field(default_factory=list)

    def __post_init__(self) -> None:
        for key, package, extra, asked in (
            ("tensorboard", "tensorboard", "monitor", self.tensorboard),
            ("wandb", "wandb", "monitor", self.wandb),
            ("trackio", "trackio", "trackio", self.trackio),
            ("otel", "opentelemetry.exporter.otlp.proto.http", "otel", self.otel),
        ):
            if asked and not _is_installed(package):
                raise ConfigError(
                    f"monitor.{key}: the package {package} is not installed; "
                    f"`{install_hint(extra)}` brings it"
                )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # what it is a part of is not there
        return False


class RolloutMonitorConfig(MonitorConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The same for a run with rollouts, of which it shows samples."""

    num_trajectories: Annotated[
        int, Meta(ge=0, description="sample trajectories of each evaluation, and of steps; 0: none")
    ] = 8
    trajectories_every: Annotated[
        int, Meta(ge=0, description="steps between samples of training; 0: evaluations only")
    ] = 10


class TensorBoardMonitor:
    """RUN/tensorboard: scalars by step, sample trajectories as text. A resumed run writes on in
    the same folder; the reader purges what an earlier part logged from the first step on that is
    repeated. The cold start counts its own steps and has a folder of its own below."""

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

            config, mode = self._config, wandb_mode(self._config.mode)
            self._there = wandb.init(
                project=config.project,
                name=config.name or self._run.name,
                entity=config.entity or None,
                group=config.group or None,
                tags=config.tags,
                mode=mode,
                dir=str(self._run),
                id=self._id,
                resume="allow" if mode == "online" else None,
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
        saved = {"id": self._id, "num_rows": self._num_rows}
        write_whole(self._run / ID_FILE, json.dumps(saved) + "\n")


FINISH_TIMEOUT_S = 60.0
MAX_WAITING = 10_000  # calls; a monitor that hangs must not fill the memory

logger = logging.getLogger(__name__)


def make_monitors(config: MonitorConfig, run: Path, settings: dict[str, Any]) -> dict[str, Monitor]:
    """The monitors that the configuration asks for, by the name that stands in warnings.
    `settings` is the whole configuration of the run."""
    found: dict[str, Monitor] = {}
    if config.tensorboard:
        found["TensorBoard"] = TensorBoardMonitor(run / "tensorboard")
    if config.wandb is not None:
        found["Weights & Biases"] = WandbMonitor(config.wandb, run, settings)
    if config.trackio is not None:
        found["Trackio"] = TrackioMonitor(config.trackio, run, settings)
    if config.otel is not None:
        found["OpenTelemetry"] = OtelMonitor(config.otel, run, settings)
    for own in config.own:
        found[str(own.__struct_config__.tag)] = own.build(run, settings)
    return found


class Monitors:
    """Hands the rows of a run to its monitors, in order, in a thread that nothing waits for."""

    def __init__(self, config: MonitorConfig, run: Path, settings: dict[str, Any]) -> None:
        self._config = config
        self._axis = Axis("step", 0)
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._redactor = Redactor(settings)
        self._working = make_monitors(config, run, self._redactor.tree(settings))

    def add(self, name: str, monitor: Monitor) -> None:
        """Add a monitor; `name` stands in warnings."""
        self._working[name] = monitor

    def log(self, row: Row) -> None:
        """Hand a row of metrics.jsonl to every monitor."""
        self._axis = axis_of(row)
        for name, monitor in self._working.items():
            self._hand(name, partial(monitor.log, figures(row), self._axis))

    def num_wanted(self, name: str) -> int:
        """How many trajectories of "step-N" or "eval-SET-WHEN" are to be shown."""
        config = self._config
        if not self._working or not isinstance(config, RolloutMonitorConfig):
            return 0
        every, training = config.trajectories_every, name.startswith("step-")
        if training and not (every and self._axis.step % every == 0):
            return 0
        return config.num_trajectories

    def trajectories(self, name: str, rows: Sequence[Row]) -> None:
        """Hand a sample of the trajectories of "step-N" or "eval-SET-WHEN" to every monitor."""
        title = "train" if name.startswith("step-") else name.partition("-")[2].partition("-")[0]
        for shown, monitor in self._working.items():
            self._hand(shown, partial(self._show, monitor, title, rows, self._axis))

    def _show(self, monitor: Monitor, title: str, rows: Sequence[Row], axis: Axis) -> None:
        monitor.trajectories(title, [self._redactor.tree(row) for row in rows], axis)

    def finish(self, exit_code: int) -> None:
        """Wait for what is left, a minute at most."""
        for name, monitor in self._working.items():
            self._hand(name, partial(monitor.finish, exit_code))
        thread, self._thread = self._thread, None
        if thread is None:
            return
        if not self._full():
            self._calls.put_nowait(None)
        thread.join(FINISH_TIMEOUT_S)
        if thread.is_alive() or self._dropped:
            logger.warning(
                "monitors: not everything was taken within %g s; metrics.jsonl has all of it",
                FINISH_TIMEOUT_S,
            )

    def _hand(self, name: str, call: Callable[[], None]) -> None:
        if self._full():
            self._dropped += 1
            return
        if self._thread is None:  # a daemon: one that hangs does not keep the process alive
            self._thread = threading.Thread(target=self._run, name="monitors", daemon=True)
            self._thread.start()
        self._calls.put_nowait(partial(self._guarded, name, call))

    def _full(self) -> bool:
        return self._calls.qsize() >= MAX_WAITING - 1

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()

    def _guarded(self, name: str, call: Callable[[], None]) -> None:
        if name not in self._working:
            return
        try:
            call()
        except Exception as error:  # whatever a third party raises; the run goes on without it
            self._working = {key: one for key, one in self._working.items() if key != name}
            logger.warning(
                "%s is not followed any more: %s: %s; metrics.jsonl has all of it",
                name,
                type(error).__name__,
                error,
            )
