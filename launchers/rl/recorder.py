"""What a run measures of itself and writes: seconds, metrics, trajectories, evaluations, and the
report at its end."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import islice
from typing import Any

import msgspec
import psutil

from agentenv.tree import TrajectoryTree
from launchers.config import TrainConfig
from launchers.evaluation.store import EvalRow
from launchers.rl import report
from launchers.rl.report import entropy_line, write_entropy, write_plots
from launchers.rl.state import BriefReport, RunState
from launchers.rundir import RunDirectory
from launchers.terminal import View
from launchers.trajectories import trajectory_row


def cpu_seconds() -> float:
    """CPU time of this process and of all below it, ended ones included."""
    total = 0.0
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


@contextmanager
def adding(seconds: dict[str, float], name: str, clock: Callable[[], float]) -> Iterator[None]:
    """Adds to seconds[name] what passes on the clock inside."""
    start = clock()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + clock() - start


class Stopwatch:
    """Wall seconds of named parts since they were taken last."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def part(self, name: str) -> AbstractContextManager[None]:
        """To be entered around a part."""
        return adding(self._seconds, name, time.monotonic)

    def take(self) -> dict[str, float]:
        """The seconds as metrics, time/NAME_s; the parts begin anew."""
        taken, self._seconds = self._seconds, {}
        return {f"time/{name}_s": seconds for name, seconds in taken.items()}


class PhaseClock:
    """Adds up seconds by phase; a phase may be entered many times, also from a resumed run."""

    def __init__(self, wall_s: dict[str, float], cpu_s: dict[str, float]) -> None:
        self.wall_s = wall_s
        self.cpu_s = cpu_s

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        wall, cpu = adding(self.wall_s, name, time.monotonic), adding(self.cpu_s, name, cpu_seconds)
        with wall, cpu:
            yield


EVALUATIONS = "eval"  # folder of a run

logger = logging.getLogger(__name__)


class Recorder:
    """Writes what happens in a run: rows of metrics, trajectories, evaluations, and the report at
    the end. `report_set` is the evaluation set that the report is about, the first."""

    def __init__(
        self, config: TrainConfig, run: RunDirectory, view: View, state: RunState, tokenizer: Any
    ) -> None:
        self.config = config
        self.run = run
        self.view = view
        self.state = state
        self.tokenizer = tokenizer
        self._num_bytes = 0  # of trajectories that are written
        self.report_set = next(iter(config.eval.sets), "")

    def log(self, row: dict[str, Any]) -> None:
        """A row of metrics.jsonl, and of the monitors."""
        self.run.log_metrics(row)

    def tell(self, result: BriefReport, rows: list[EvalRow], step: int, when: str) -> None:
        """An evaluation of one set after `step`: metrics, a line, samples for monitors and, of
        the set that is reported, for samples.txt."""
        name = f"eval-{result.name}-{when}"
        done = [row for row in rows if row.end != "failed"]
        if shown := done[: self.run.monitors.num_wanted(name)]:
            self.run.monitors.trajectories(name, [msgspec.structs.asdict(row) for row in shown])
        self.log({"step": step, "phase": when, **report.report_metrics(result)})
        self.view.say(report.report_line(result, when))
        if when in report.PHASES and result.name == self.report_set:
            path, append = self.run.path / "samples.txt", when != "before_sft"
            report.write_samples(path, when, done, append=append)

    def finish(self, *, policy_version: int, in_flight: int, event_loop: dict[str, float]) -> None:
        """Summary, table, curves; the wall time of phases is complete by now."""
        config, state = self.config, self.state
        summary = report.summarize(
            state,
            name=self.report_set,
            seed=config.run.seed,
            algorithm=config.algorithm_name,
            policy_version=policy_version,
            in_flight=in_flight,
            event_loop=event_loop,
        )
        self.run.write_json("summary.json", summary)
        if self.report_set:
            self.view.show(report.final_table(state, self.report_set))
        pictures = ", ".join(self.draw())
        if line := entropy_line(state.entropy):
            self.view.say(line)
        for clock, seconds in (("wall", summary["wall_s"]), ("CPU", summary["cpu_s"])):
            times = "  ".join(f"{name} {value:.0f}" for name, value in seconds.items())
            self.view.say(f"{clock} seconds: {times}")
        last = self.run.checkpoints.path(state.step).name
        self.view.say(
            f"written to {self.run.path}: summary.json, {pictures}, entropy.csv, samples.txt, "
            f"metrics.jsonl, trajectories/, {EVALUATIONS}/, checkpoints/{last}"
        )

    def draw(self) -> list[str]:
        """The pictures of the run so far; returns their names."""
        folder = self.run.path
        write_entropy(self.state.entropy, folder, folder.name)
        return [*write_plots(folder / "metrics.jsonl", folder, folder.name), "entropy.png"]

    async def write_trajectories(self, name: str, trees: list[TrajectoryTree]) -> None:
        """Every trajectory as a readable row, until the size limit; a sample to the monitors."""
        await asyncio.to_thread(self._write_trajectories, name, trees)

    def _write_trajectories(self, name: str, trees: list[TrajectoryTree]) -> None:
        log, monitors = self.config.log, self.run.monitors
        wanted, is_full = monitors.num_wanted(name), self._num_bytes > log.max_trajectory_mb * 1e6
        is_written = log.trajectories and not is_full
        every = ((tree, one) for tree in trees for one in tree.trajectories())
        chosen = islice(every, None if is_written else wanted)
        rows = [trajectory_row(tree, one, self.tokenizer) for tree, one in chosen]
        if shown := rows[:wanted]:
            monitors.trajectories(name, shown)
        if is_written:
            folder = self.run.path / "trajectories"
            folder.mkdir(exist_ok=True)
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
            self._num_bytes += len(text)
        elif log.trajectories:
            logger.warning("log.max_trajectory_mb is reached: no more trajectories are written")
