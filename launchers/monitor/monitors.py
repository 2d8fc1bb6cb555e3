"""Runs the monitors of a run in a thread of their own, so that nothing waits for them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launchers.monitor.base import Axis, Monitor, Row, axis_of, figures
from launchers.monitor.config import MonitorConfig, RolloutMonitorConfig
from launchers.monitor.tensorboard import TensorBoardMonitor
from launchers.monitor.wandb import WandbMonitor

FINISH_TIMEOUT_S = 60.0
MAX_WAITING = 10_000  # calls; a monitor that hangs must not fill the memory

logger = logging.getLogger(__name__)


class Monitors:
    """Hands rows to monitors in order. `settings` is the configuration of the run."""

    def __init__(self, config: MonitorConfig, run: Path, settings: dict[str, Any]) -> None:
        self._config = config
        self._axis = Axis("step", 0)
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._thread: threading.Thread | None = None
        self._dropped = 0
        self._working: dict[str, Monitor] = {}
        if config.tensorboard:
            self.add("TensorBoard", TensorBoardMonitor(run / "tensorboard"))
        if config.wandb is not None:
            self.add("Weights & Biases", WandbMonitor(config.wandb, run, settings))

    def add(self, name: str, monitor: Monitor) -> None:
        """One more monitor; `name` stands in warnings."""
        self._working[name] = monitor

    def log(self, row: Row) -> None:
        """A row of metrics.jsonl."""
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
        """A sample of the trajectories of "step-N" or "eval-SET-WHEN"."""
        title = "train" if name.startswith("step-") else name.partition("-")[2].partition("-")[0]
        for shown, monitor in self._working.items():
            self._hand(shown, partial(monitor.trajectories, title, rows, self._axis))

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
