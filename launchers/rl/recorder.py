"""What a run writes while it goes on: metrics, trajectories, evaluations, checkpoints."""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import shutil
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil

from agentenv.actor import Actor
from agentenv.config import to_plain
from agentenv.disk import PARTIAL, replace_folder
from agentenv.errors import DataError
from agentenv.evaluate import Answer
from agentenv.tree import TrajectoryTree
from agentenv.types import Task
from launchers.config import TrainConfig
from launchers.evaluation.config import EvaluateConfig, resolve_sets
from launchers.evaluation.figures import Report, brief_report
from launchers.evaluation.run import ask_into, row_of
from launchers.evaluation.store import EvalRow, Saved, Store, Wanted, identity, load_saved
from launchers.evaluation.subject import evaluation_of
from launchers.rl import report
from launchers.rl.parts import Parts
from launchers.rl.report import entropy_line, write_entropy, write_plots
from launchers.rl.state import Evaluating, RunState
from launchers.rundir import RunDirectory, save_state
from launchers.terminal import View

# Wall and CPU seconds of the phases of a run, all its processes counted.


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


class Stopwatch:
    """Wall seconds of named parts since they were taken last."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

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
        wall, cpu = time.monotonic(), cpu_seconds()
        try:
            yield
        finally:
            self.wall_s[name] = self.wall_s.get(name, 0.0) + time.monotonic() - wall
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + cpu_seconds() - cpu


# Evaluations of a run, as `launchers/evaluate.py` asks and stores them.
#
# RUN/eval/step-000040/           a whole evaluation, for `evaluate.py report`, `compare`, `regrade`
# RUN/eval/step-000040.partial/   one that goes on, or was cut off

FOLDER = "eval"
SET_KEYS = ("max_tasks", "num_samples")


class Evaluation:
    """One that goes on: the sets are asked one after the other."""

    def __init__(
        self, store: Store, config: EvaluateConfig, tasks: Mapping[str, Sequence[Task]]
    ) -> None:
        self._store, self._config, self._tasks = store, config, tasks

    async def ask(self, actor: Actor, name: str) -> list[EvalRow]:
        """All rows of a set, in the order of its questions; those that are stored are not asked.
        The seed is that of the set, as in `launchers/evaluate.py`: equal seeds, equal samples."""
        config, own = self._config, self._config.sets[name]
        seed = own.sampling.seed if own.sampling is not None else None
        number = config.seed if seed is None else seed
        asking = copy.copy(actor)
        asking.seed = f"{number}/eval/{name}"

        def make_row(name: str, answer: Answer) -> EvalRow:
            return row_of(name, answer, number)

        samples = range(own.num_samples or 1)
        wanted = [Wanted(name, task, sample) for task in self._tasks[name] for sample in samples]
        missing, many = self._store.missing(wanted), config.concurrency
        await ask_into(self._store, missing, {name: asking}, make_row, concurrency=many)
        return [self._store.rows[one.key] for one in wanted]


class Evaluations:
    """Begins the evaluations of the run in the folder `run`."""

    def __init__(self, config: TrainConfig, run: Path, tasks: Mapping[str, Sequence[Task]]) -> None:
        self._config, self._run, self._tasks = config, run, tasks

    @asynccontextmanager
    async def begin(self, what: Evaluating, when: str) -> AsyncIterator[Evaluation]:
        """The evaluation of a policy in RUN/eval/WHEN, whole when the context ends well. One of
        the same weights that was cut off is taken up; another one in its place is removed."""
        config = self._configuration(what.sets)
        subject = {
            "name": self._run.name,
            "step": what.step,
            "policy_version": what.policy_version,
            "incarnation": what.incarnation,
        }
        saved = Saved(subject=subject, run=str(self._run.absolute()), config=to_plain(config))
        folder = self._run / FOLDER / when
        partial = folder.with_name(folder.name + PARTIAL)
        store = await asyncio.to_thread(_take_up, partial, saved)
        try:
            yield Evaluation(store, config, self._tasks)
        finally:
            store.close()
        await asyncio.to_thread(replace_folder, partial, folder)

    def _configuration(self, names: Sequence[str]) -> EvaluateConfig:
        """That of the run, as `launchers/evaluate.py RUN` has it."""
        config = self._config
        plain = json.loads(json.dumps(to_plain(config)))
        raw = evaluation_of(plain, names, SET_KEYS)
        raw["concurrency"] = config.eval.concurrency
        raw["engine"] = plain["eval"]["engine"] or raw["engine"]
        return resolve_sets(raw, "eval")


def _take_up(path: Path, saved: Saved) -> Store:
    try:
        is_same = identity(load_saved(path)) == json.loads(json.dumps(identity(saved)))
    except DataError:
        is_same = False
    if not is_same:
        shutil.rmtree(path, ignore_errors=True)
    return Store(path, saved)


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
        self._overlapping: asyncio.Task[None] | None = None
        self._weights = run.path / "evaluating"
        self._evaluations = Evaluations(config, run.path, parts.eval_tasks)
        self.report_set = config.eval.report or next(iter(config.eval.sets), "")

    def log(self, row: dict[str, Any]) -> None:
        self.run.log_metrics(row)

    async def evaluate_phase(self, phase: str) -> None:
        """Evaluate the sets that are reported around the phases of the run."""
        names = [name for name, chosen in self.config.eval.sets.items() if chosen.phases]
        self.state.reports[phase] = await self.evaluate(names, phase)

    async def after_step(self) -> None:
        """The evaluations and the checkpoint that are due after this step."""
        step = self.state.step
        sets = self.config.eval.sets
        due = [name for name, one in sets.items() if one.every and step % one.every == 0]
        if due and self.parts.overlapping is not None:
            await self._overlap(step, due)
        else:
            for result in (await self.evaluate(due, f"step-{step:06d}")).values():
                await self._consider_best(step, result)
        every = self.config.checkpoint.every
        if every and step % every == 0:
            await self.save_checkpoint()

    async def evaluate(self, names: list[str], when: str) -> dict[str, Report]:
        """Evaluate these sets. No weights are published meanwhile, so one policy version is
        seen."""
        with self.clock.phase("eval"):
            return await self._evaluate(self.parts.eval_actor, self._evaluating(names), when)

    def _evaluating(self, names: list[str]) -> Evaluating:
        state = self.state
        return Evaluating(state.step, self.parts.learner.policy_version, names, state.incarnation)

    # evaluations that overlap the training, one at a time

    async def resume_overlapping(self) -> None:
        """Begin again what an interruption cut off."""
        pending, sets = self.state.evaluating, self.config.eval.sets.keys()
        if pending is None or not sets >= set(pending.sets):
            return
        if self._weights.is_dir() and self.parts.overlapping is not None:
            await self._begin_overlapping(pending)

    async def finish_overlapping(self) -> None:
        """Wait for the evaluation that goes on beside the training."""
        if self._overlapping is not None:
            await self._overlapping
            self._overlapping = None

    def cancel_overlapping(self) -> None:
        """Stop it; the state still says that it is due."""
        if self._overlapping is not None:
            self._overlapping.cancel()

    async def _overlap(self, step: int, names: list[str]) -> None:
        learner = self.parts.learner
        with self.clock.phase("eval"):
            await self.finish_overlapping()
            await asyncio.to_thread(shutil.rmtree, self._weights, ignore_errors=True)
            await learner.export(self._weights)
        self.state.evaluating = self._evaluating(names)
        if self.config.checkpoint.best_metric.partition("/")[0] in names:
            await self.save_checkpoint()  # of these weights, should they be the best
        await self._begin_overlapping(self.state.evaluating)

    async def _begin_overlapping(self, what: Evaluating) -> None:
        """On an engine that has the weights of that step, until the next such evaluation."""
        actor = self.parts.overlapping
        assert actor is not None
        if actor.engine.policy_version != what.policy_version:
            await actor.engine.load_weights(self._weights, what.policy_version)
        self._overlapping = asyncio.create_task(self._evaluate_beside(actor, what))

    async def _evaluate_beside(self, actor: Actor, what: Evaluating) -> None:
        found = await self._evaluate(actor, what, f"step-{what.step:06d}")
        for result in found.values():
            await self._consider_best(what.step, result)
        self.state.evaluating = None
        await asyncio.to_thread(shutil.rmtree, self._weights, ignore_errors=True)

    async def _evaluate(self, actor: Actor, what: Evaluating, when: str) -> dict[str, Report]:
        if not what.sets:
            return {}
        found = {}
        async with self._evaluations.begin(what, when) as evaluation:
            for name in what.sets:
                rows = await evaluation.ask(actor, name)
                found[name] = brief_report(name, rows)
                self._tell(found[name], rows, what.step, when)
        return found

    def _tell(self, result: Report, rows: list[EvalRow], step: int, when: str) -> None:
        name = f"eval-{result.name}-{when}"
        done = [row for row in rows if row.end != "failed"]
        if shown := done[: self.run.monitors.num_wanted(name)]:
            self.run.monitors.trajectories(name, [msgspec.structs.asdict(row) for row in shown])
        self.log({"step": step, "phase": when, **report.report_metrics(result)})
        self.view.say(report.report_line(result, when))
        if when in report.PHASES and result.name == self.report_set:
            path, append = self.run.path / "samples.txt", when != "before_sft"
            report.write_samples(path, when, done, append=append)

    # checkpoints and the end

    async def save_checkpoint(self) -> None:
        """Model, learner state and our own, written beside its name and renamed when whole."""
        checkpoints, step = self.run.checkpoints, self.state.step
        if checkpoints.path(step) in checkpoints.finished():
            return
        partial = await asyncio.to_thread(checkpoints.begin, step)
        async with self.parts.learner_turn():
            await self.parts.learner.export(partial)
            await self.parts.learner.save(partial / "trainer")
        save_state(partial, self.state.settled())
        await asyncio.to_thread(checkpoints.complete, partial)
        pending = self.state.evaluating
        needed = [pending.step] if pending is not None else []
        await asyncio.to_thread(checkpoints.prune, self.config.checkpoint.keep_last, needed)

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
            f"metrics.jsonl, trajectories/, {FOLDER}/, checkpoints/{last}"
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

    async def _consider_best(self, step: int, result: Report) -> None:
        """Keep the checkpoint of the best value of checkpoint.best_metric."""
        name, _, figure = self.config.checkpoint.best_metric.partition("/")
        if result.name != name:
            return
        value: float = getattr(result.overall, figure)
        if self.state.best is None or value > self.state.best:
            self.state.best = value
            if step == self.state.step:
                await self.save_checkpoint()
            await asyncio.to_thread(self.run.checkpoints.keep_best, step)
