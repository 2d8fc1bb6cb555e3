"""Steps over fixed rows, whatever is learned from them: order, schedule, evaluation, checkpoints.

each epoch has an order of its own, fixed by the seed; step n takes the next rows of it, so a
run that resumes after step n goes on with the same rows, to the bit
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Protocol

from msgspec import Struct

from agentenv.config import changes, to_plain
from launchers.rundir import CONFIG_FILE, RunDirectory, load_state, save_state
from launchers.supervised.loss_plot import plot_losses
from launchers.supervised.sft_config import LoopConfig, SavingConfig
from launchers.view import View
from learners.learner import Learner, LearnerConfig, Metrics
from learners.optimizer_config import lr_factor


class SupervisedState(Struct):
    """What a checkpoint remembers beside the learner's own state."""

    step: int = 0
    num_tokens: int = 0
    num_skipped: int = 0
    best: float | None = None
    first_eval: Metrics = {}
    last_eval: Metrics = {}
    wall_s: float = 0.0


class Lessons(Protocol):
    """What is learned. `name` begins the keys of its metrics, `plotted` are keys of its plot."""

    name: str
    plotted: tuple[str, ...]
    num_rows: int

    async def step(self, rows: Sequence[int], lr_scale: float) -> Metrics:
        """One optimizer step on these rows."""
        ...

    async def measure(self) -> Metrics:
        """Figures of the held-out rows, "loss" among them; empty if there are none."""
        ...


class Rows:
    """Which rows a step takes."""

    def __init__(self, num_rows: int, rows_per_step: int, seed: int) -> None:
        self.num_rows = num_rows
        self.rows_per_step = rows_per_step
        self.steps_per_epoch = -(-num_rows // rows_per_step)
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []

    def of_step(self, step: int) -> list[int]:
        """Rows of step `step`, counted from 0; the last step of an epoch may have fewer."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            self._order = list(range(self.num_rows))
            Random(f"{self._seed}/order/{epoch}").shuffle(self._order)
            self._epoch = epoch
        return self._order[place * self.rows_per_step :][: self.rows_per_step]


class Supervised:
    """One run over `lessons`. With a checkpoint the learner's state is loaded from it."""

    def __init__(
        self,
        config: Struct,
        loop: LoopConfig,
        saving: SavingConfig,
        schedule: LearnerConfig,
        seed: int,
        run: RunDirectory,
        view: View,
        learner: Learner,
        lessons: Lessons,
        checkpoint: Path | None,
    ) -> None:
        self.config = config
        self.loop = loop
        self.saving = saving
        self.schedule = schedule
        self.run = run
        self.view = view
        self.learner = learner
        self.lessons = lessons
        self.checkpoint = checkpoint
        self.state = SupervisedState()
        if checkpoint is not None:
            self.state = load_state(checkpoint, SupervisedState)
        self.rows = Rows(lessons.num_rows, loop.rows_per_step, seed)
        self.num_steps = loop.count_steps(lessons.num_rows)

    async def run_all(self) -> None:
        """All steps; cancelling it leaves a checkpoint."""
        self._announce()
        if self.checkpoint is not None:
            await self.learner.load(self.checkpoint / "trainer")
        elif not self.state.step:
            await self._measure()
        self.view.begin(self.lessons.name, self.num_steps, self.state.step)
        try:
            while self.state.step < self.num_steps:
                work = asyncio.ensure_future(self._step())
                try:
                    await asyncio.shield(work)
                except asyncio.CancelledError:
                    await asyncio.wait({work})
                    await self._save()
                    raise
        finally:
            self.view.end()
        await self._save()
        self._finish()

    def _announce(self) -> None:
        loop, name = self.loop, self.lessons.name
        if self.checkpoint is None:
            self.run.write_json(CONFIG_FILE, to_plain(self.config))
        else:
            self.run.forget_metrics_after(self.state.step)
            self.view.say(f"resuming {self.run.path} after step {self.state.step}")
            for path in self.run.checkpoints.set_aside_after(self.state.step):
                self.view.say(f"a newer checkpoint is moved to {path}")
            saved = json.loads((self.run.path / CONFIG_FILE).read_text(encoding="utf-8"))
            for change in changes(saved, json.loads(json.dumps(to_plain(self.config)))):
                self.view.say(f"changed since the start: {change}")
        self.view.say(
            f"{name}: {self.rows.num_rows} rows, {self.num_steps} steps, "
            f"{self.num_steps / self.rows.steps_per_epoch:.2f} epochs; a step takes "
            f"{loop.batch_size} x {loop.gradient_accumulation} = {loop.rows_per_step} rows"
        )

    async def _step(self) -> None:
        """One optimizer step and what is due after it."""
        state, start = self.state, time.monotonic()
        scale = lr_factor(self.schedule, state.step, self.num_steps)
        metrics = await self.lessons.step(self.rows.of_step(state.step), scale)
        state.step += 1
        state.num_tokens += int(metrics["num_tokens"])
        state.num_skipped += int(metrics["num_skipped"])
        row = {
            "step": state.step,
            "epoch": state.step / self.rows.steps_per_epoch,
            "learning_rate": self.schedule.learning_rate * scale,
            **{f"{self.lessons.name}/{name}": value for name, value in metrics.items()},
        }
        self.run.log_metrics(row)
        shown = " ".join(f"{key} {metrics[key]:.4f}" for key in self.lessons.plotted)
        self.view.say(
            f"step {state.step:>4}/{self.num_steps} {shown} lr {row['learning_rate']:.2e}"
        )
        self.view.advance(state.step)
        last = state.step == self.num_steps
        if last or (self.loop.eval_every and state.step % self.loop.eval_every == 0):
            await self._measure()
        state.wall_s += time.monotonic() - start
        if self.saving.every and state.step % self.saving.every == 0:
            await self._save()

    async def _measure(self) -> None:
        metrics = await self.lessons.measure()
        if not metrics:
            return
        state = self.state
        state.first_eval = state.first_eval or metrics
        state.last_eval = metrics
        self.run.log_metrics(
            {"step": state.step, **{f"eval/{name}": value for name, value in metrics.items()}}
        )
        shown = " ".join(f"{name} {value:.4f}" for name, value in metrics.items())
        self.view.say(f"held out after step {state.step}: {shown}")
        if self.saving.keep_best and (state.best is None or metrics["loss"] < state.best):
            state.best = metrics["loss"]
            if state.step:
                await self._save()
                await asyncio.to_thread(self.run.checkpoints.keep_best, state.step)

    async def _save(self) -> None:
        checkpoints, step = self.run.checkpoints, self.state.step
        if checkpoints.path(step) in checkpoints.finished():
            return
        partial = await asyncio.to_thread(checkpoints.begin, step)
        await self.learner.export(partial)
        await self.learner.save(partial / "trainer")
        save_state(partial, self.state)
        await asyncio.to_thread(checkpoints.complete, partial)
        await asyncio.to_thread(checkpoints.prune, self.saving.keep_last)

    def _finish(self) -> None:
        state = self.state
        self.run.write_json(
            "summary.json",
            {
                "num_rows": self.rows.num_rows,
                "num_steps": state.step,
                "num_skipped": state.num_skipped,
                "num_tokens": state.num_tokens,
                "before": state.first_eval,
                "after": state.last_eval,
                "wall_s": round(state.wall_s, 2),
            },
        )
        plot_losses(self.run.path, self.lessons.name, self.lessons.plotted)
        self.view.say(
            f"written to {self.run.path}: summary.json, loss.png, metrics.jsonl, "
            f"checkpoints/{self.run.checkpoints.path(state.step).name}"
        )
