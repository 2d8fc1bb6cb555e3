"""What a run writes while it goes on: metrics, trajectories, evaluations, checkpoints."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from agentenv.evaluate import Report, evaluate, make_report
from agentenv.tree import TrajectoryTree
from launchers.config import TrainConfig
from launchers.phases import PhaseClock
from launchers.rl import report
from launchers.rl.entropy_plot import entropy_line, write_entropy
from launchers.rl.parts import Parts
from launchers.rl.plots import write_plots
from launchers.rl.state import RunState
from launchers.rundir import RunDirectory, save_state
from launchers.view import View

logger = logging.getLogger(__name__)


class Recorder:
    """Evaluates and writes at the cadences of the configuration."""

    def __init__(
        self,
        config: TrainConfig,
        run: RunDirectory,
        view: View,
        state: RunState,
        clock: PhaseClock,
        parts: Parts,
    ) -> None:
        self.config = config
        self.run = run
        self.view = view
        self.state = state
        self.clock = clock
        self.parts = parts
        self.report_set = config.eval.report or next(iter(config.eval.sets), "")

    def log(self, row: dict[str, Any]) -> None:
        self.run.log_metrics(row)

    async def evaluate_phase(self, phase: str) -> None:
        """Evaluate the sets that are reported around the phases of the run."""
        names = [name for name, chosen in self.config.eval.sets.items() if chosen.phases]
        self.state.reports[phase] = {name: await self.evaluate(name, phase) for name in names}

    async def after_step(self) -> None:
        """The evaluations and the checkpoint that are due after this step."""
        step = self.state.step
        for name, chosen in self.config.eval.sets.items():
            if chosen.every and step % chosen.every == 0:
                await self._consider_best(await self.evaluate(name, f"step-{step:06d}"))
        every = self.config.checkpoint.every
        if every and step % every == 0:
            await self.save_checkpoint()

    async def evaluate(self, name: str, when: str) -> Report:
        """Evaluate one set. No weights are published meanwhile, so one policy version is seen."""
        with self.clock.phase("eval"):
            trees = await evaluate(
                self.parts.eval_actor,
                self.parts.eval_tasks[name],
                num_samples=self.config.eval.sets[name].num_samples,
                concurrency=self.config.eval.concurrency,
            )
            result = make_report(name, trees)
            await self.write_trajectories(f"eval-{name}-{when}", trees)
        self.log({"step": self.state.step, "phase": when, **report.report_metrics(result)})
        self.view.say(report.report_line(result, when))
        if when in report.PHASES and name == self.report_set:
            path, append = self.run.path / "samples.txt", when != "before_sft"
            report.write_samples(path, when, trees, self.parts.tokenizer, append=append)
        return result

    async def save_checkpoint(self) -> None:
        """Model, learner state and our own, written beside its name and renamed when whole."""
        checkpoints, step = self.run.checkpoints, self.state.step
        if checkpoints.path(step) in checkpoints.finished():
            return
        partial = await asyncio.to_thread(checkpoints.begin, step)
        await self.parts.learner.export(partial)
        await self.parts.learner.save(partial / "trainer")
        save_state(partial, self.state.settled())
        await asyncio.to_thread(checkpoints.complete, partial)
        await asyncio.to_thread(checkpoints.prune, self.config.checkpoint.keep_last)

    def finish(self, *, in_flight: int, loop_lag_ms: float) -> None:
        """Summary, table, curves; the wall time of phases is complete by now."""
        config, state = self.config, self.state
        summary = report.summarize(
            state,
            name=self.report_set,
            seed=config.run.seed,
            algorithm=config.algorithm_name,
            policy_version=self.parts.learner.policy_version,
            in_flight=in_flight,
            loop_lag_ms=loop_lag_ms,
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
            f"metrics.jsonl, trajectories/, checkpoints/{last}"
        )

    def draw(self) -> list[str]:
        """The pictures of the run so far; returns their names."""
        folder = self.run.path
        write_entropy(self.state.entropy, folder, folder.name)
        return [*write_plots(folder / "metrics.jsonl", folder, folder.name), "entropy.png"]

    async def write_trajectories(self, name: str, trees: list[TrajectoryTree]) -> None:
        """Every trajectory as a readable row, until the size limit; a sample to the monitors."""
        log = self.config.log
        await asyncio.to_thread(self.run.show_trajectories, name, trees, self.parts.tokenizer)
        if not log.trajectories:
            return
        limit = log.max_trajectory_mb * 1e6
        if not await asyncio.to_thread(
            self.run.write_trajectories, name, trees, self.parts.tokenizer, limit
        ):
            logger.warning("log.max_trajectory_mb is reached: no more trajectories are written")

    async def _consider_best(self, result: Report) -> None:
        """Keep the checkpoint of the best value of checkpoint.best_metric."""
        name, _, figure = self.config.checkpoint.best_metric.partition("/")
        if result.name != name:
            return
        value: float = getattr(result.overall, figure)
        if self.state.best is None or value > self.state.best:
            self.state.best = value
            await self.save_checkpoint()
            await asyncio.to_thread(self.run.checkpoints.keep_best, self.state.step)
