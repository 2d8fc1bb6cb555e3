"""The records of a run: metrics, trajectories, evaluations, and the final report."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from agentenv.assembly.keys.rl import MAX_TRAJECTORY_BYTES, TrainConfig
from agentenv.assembly.reports.pictures import write_curve, write_entropy
from agentenv.assembly.reports.records import EvalRow, write_rows
from agentenv.assembly.run.rundir import LOG_FILE, RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.deadline import uncancelled
from agentenv.base.errors import ConfigError, InfraError
from agentenv.base.offload import in_thread, poll_pause
from agentenv.base.tree import TrajectoryTree, to_frame
from agentenv.contract.engine import Engine
from agentenv.data.data_files import Row
from agentenv.processes.worker_pool import JobError, WorkerPool
from agentenv.rollout.archive import ARCHIVE, Archive, Credit, KeptTree, StepHeader
from agentenv.rollout.metrics import Throughput
from agentenv.rollout.queue import ReplayQueue
from agentenv.text.encoder import decoder
from agentenv.training.loop.batching import Settled, StepBatch
from agentenv.training.loop.brief_reports import EVALUATIONS, PHASES, BriefReport, phase_title
from agentenv.training.loop.recorder import Recorder
from agentenv.training.loop.state import RunState
from agentenv.training.reports import texts


def kept_tree(settled: Settled) -> KeptTree:
    """The archive's record of a tree."""
    tree, credit, fate, why = settled
    figures = None
    if credit is not None:
        figures = Credit(*(getattr(credit, name).tolist() for name in Credit.__struct_fields__))
    return KeptTree(tree, fate, why, figures)


MANY_TOKENS = 200_000  # of a step; decoding them takes a tenth of a second
WRITE_S = 3600.0  # deadline for the trajectories of a step
INTERVAL_S = 0.5  # between live figures

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class RunRecorder(Recorder):
    """Writes the records of a run: rows of metrics, trajectories, evaluations, and the final
    report. `report_set`: the evaluation set of the report, the first one."""

    config: TrainConfig
    run: RunDirectory
    view: View
    state: RunState
    tokenizer: Any

    def __post_init__(self) -> None:
        self.archive = Archive(self.run.path / ARCHIVE, self.config.archive)
        self._num_bytes = 0  # of trajectories that are written
        self._writing: asyncio.Task[None] | None = None
        self._writer: WorkerPool | None = None  # from the first step with many tokens on
        self.report_set = next(iter(self.config.eval.sets), "")
        self._row: Row = {}  # of the last step

    async def log(self, row: dict[str, Any]) -> None:
        """Write a row to metrics.jsonl and the monitors."""
        await in_thread(self.run.write_metrics, row)
        self.run.monitors.log(row)

    async def record_step(self, row: Row, num_steps: int, trees: Sequence[TrajectoryTree]) -> None:
        await self.log(row)
        self._row = row
        self.view.log(texts.step_line(row, num_steps), texts.brief_line(row, num_steps))
        self.view.advance(self.state.step)
        await self.written()
        name = f"step-{self.state.step:06d}"
        self._writing = asyncio.create_task(self.write_trajectories(name, trees))

    async def show(self, queue: ReplayQueue, engine: Engine) -> None:
        throughput = Throughput()
        while self.view.is_live:
            rate = throughput.rate(engine.stats())
            self.view.figures(texts.live_lines(self.state, queue, engine.stats(), rate, self._row))
            await poll_pause(INTERVAL_S)

    async def record_evaluation(
        self, result: BriefReport, rows: list[EvalRow], step: int, when: str
    ) -> None:
        """Record an evaluation of one set after `step`: metrics, a line on the terminal, samples
        for monitors and, of the reported set, for samples.txt."""
        name = f"eval-{result.name}-{when}"
        done = [row for row in rows if row.end != "failed"]
        if shown := done[: self.run.monitors.num_wanted(name)]:
            self.run.monitors.trajectories(name, [msgspec.structs.asdict(row) for row in shown])
        await self.log({"step": step, "phase": when, **texts.report_metrics(result)})
        title = phase_title(when, cold_start=self.config.sft is not None)
        self.view.log(texts.report_line(result, title))
        if when in PHASES and result.name == self.report_set:
            path, append = self.run.path / "samples.txt", when != "before_sft"
            await in_thread(texts.write_samples, path, title, done, append=append)

    def finish(self, in_flight: int, failures: Sequence[str], figures: dict[str, Any]) -> None:
        """Write summary, table and plots; call this after the last phase, for complete wall times.
        See Recorder."""
        config, state = self.config, self.state
        summary = {
            "seed": config.run.seed,
            "algorithm": config.algorithm_name,
            **texts.summarize(state, self.report_set, in_flight, failures),
            **figures,
        }
        self.run.write_json("summary.json", summary)
        if self.report_set:
            table = texts.final_table(state, self.report_set, cold_start=config.sft is not None)
            if len(table.columns) > 1:  # the set was evaluated around a phase
                self.view.show(table)
        self.draw()
        if line := texts.entropy_line(state.entropy):
            self.view.log(line)
        for line in figures["engine"].get("told", ()):
            self.view.log(line)
        self.view.log(texts.rollouts_line(summary))
        for clock, seconds in (("wall", summary["wall_s"]), ("CPU", summary["cpu_s"])):
            times = "  ".join(f"{name} {value:.0f}" for name, value in seconds.items())
            self.view.log(f"{clock} seconds: {times}")
        last = self.run.checkpoints.path(state.step).name
        written = ["summary.json", "curve.png", "entropy.png", "entropy.csv", "samples.txt"]
        written += ["metrics.jsonl", LOG_FILE, "trajectories/", f"{ARCHIVE}/", f"{EVALUATIONS}/"]
        existing = [name for name in written if (self.run.path / name).exists()]
        self.view.log(f"results in {self.run.path}: {', '.join(existing)}, checkpoints/{last}")

    def draw(self) -> None:
        """Draw the plots of the run so far."""
        write_entropy(self.state.entropy, self.run.path, self.run.path.name)
        write_curve(self.run.path)

    async def write_trajectories(self, name: str, trees: Sequence[TrajectoryTree]) -> None:
        """Write each trajectory as a readable row, up to the size limit of the run, and pass a
        sample to the monitors."""
        log, monitors = self.config.log, self.run.monitors
        wanted, is_full = monitors.num_wanted(name), self._num_bytes > MAX_TRAJECTORY_BYTES
        path = None
        if log.trajectories and not is_full:
            path = self.run.path / "trajectories" / f"{name}.jsonl"
            await in_thread(path.parent.mkdir, exist_ok=True)
        elif log.trajectories:
            size = MAX_TRAJECTORY_BYTES / 1e6
            logger.warning(
                "trajectories/ has reached its limit of %.0f MB: no more are written", size
            )
        if path is None and not wanted:
            return
        size, shown = await self._write_rows(trees, path, wanted)
        if shown:
            monitors.trajectories(name, shown)
        self._num_bytes += size

    async def _write_rows(
        self, trees: Sequence[TrajectoryTree], path: Path | None, wanted: int
    ) -> tuple[int, list[Row]]:
        """Write the rows, in a separate process if it takes long, else in a thread."""
        file = Path(str(getattr(self.tokenizer, "name_or_path", ""))) / "tokenizer.json"
        has_many = sum(tree.num_tokens for tree in trees) > MANY_TOKENS
        if has_many and await in_thread(file.is_file):
            if self._writer is None:
                handler = "agentenv.assembly.reports.records:TrajectoryWriter"
                arguments = {"tokenizer": str(file)}
                self._writer = WorkerPool(
                    handler, name="trajectories", arguments=arguments, max_jobs=1
                )
            frames = await in_thread(lambda: [to_frame(tree) for tree in trees])
            job = {"trees": frames, "path": str(path or ""), "wanted": wanted}
            try:
                done = await self._writer.run(job, WRITE_S)
                return done["num_bytes"], [json.loads(row) for row in done["shown"]]
            except (JobError, InfraError, ConfigError) as error:
                logger.warning("trajectories are written in the run's own process: %s", error)
        return await in_thread(write_rows, trees, decoder(self.tokenizer), path, wanted)

    async def keep_trees(self, header: StepHeader, batch: StepBatch) -> None:
        """Archive the trees of a step, in the background."""
        trees = map(kept_tree, batch.settled)
        await self.archive.write_behind(header, trees)

    async def close(self) -> None:
        """Wait for the end of all writes; their errors are ignored."""
        await self.archive.close()
        if self._writing is not None:
            await asyncio.wait({self._writing})
        if self._writer is not None:
            self._writer.close()

    async def written(self) -> None:
        """Wait until everything is written. Raises the error of a failed write."""
        writing, self._writing = self._writing, None
        if writing is not None:
            await uncancelled(writing)
