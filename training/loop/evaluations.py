"""Evaluations of a training run: between phases, and after steps.

RUN/eval/step-000040/           a complete evaluation, for `evaluate report`, `compare`, `regrade`
RUN/eval/step-000040.partial/   an evaluation that is in progress, or was interrupted

They use the sampling and storage of `agentenv evaluate`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec import to_builtins

from agentenv.assembly.keys.evaluation import EvaluateConfig, resolve_sets
from agentenv.assembly.reports.records import FAILED, EvalRow, Wanted
from agentenv.assembly.run.kept import keep_best
from agentenv.assembly.run.terminal import Pulse
from agentenv.base.config import to_plain
from agentenv.base.deadline import uncancelled
from agentenv.base.disk import PARTIAL, replace_folder
from agentenv.base.errors import SHOWN, DataError
from agentenv.base.offload import in_thread
from agentenv.base.tree import CANCELLED
from agentenv.evaluation.figures import figures_of, questions_of
from agentenv.evaluation.run import broken, named_causes, sample_into
from agentenv.evaluation.store import Saved, Store, identity, load_saved, read_rows
from agentenv.evaluation.subject import evaluation_of
from agentenv.rollout.metrics import PADDED
from agentenv.training.loop.brief_reports import EVALUATIONS, PHASES, BriefFigures, BriefReport
from agentenv.training.loop.clocks import PhaseClock
from agentenv.training.loop.parts import Parts
from agentenv.training.loop.recorder import Recorder
from agentenv.training.loop.state import Evaluating, RunSaver

logger = logging.getLogger(__name__)

SET_KEYS = ("max_tasks", "num_samples")
BEFORE_TRAINING = ("before_sft", "after_sft", "before_rl")  # phases
MAX_FAILED = 0.2  # share of failed trajectories from which such an evaluation ends the run


@dataclass(eq=False)
class RunEvaluator:
    """Evaluates the policy of a run, while no weights are published."""

    parts: Parts
    recorder: Recorder
    saver: RunSaver
    clock: PhaseClock

    def __post_init__(self) -> None:
        self.config, self.state = self.recorder.config, self.recorder.state
        self._run, self._padded = self.recorder.run.path, set[str]()
        self._folder = self._run / EVALUATIONS

    def due(self, step: int) -> list[str]:
        """The sets to evaluate after this step."""
        sets = self.config.eval.sets
        return [name for name, one in sets.items() if one.every and step % one.every == 0]

    async def around(self, phase: str) -> None:
        """Evaluate the sets of the report before or after a phase, and store their reports under
        the name of the phase."""
        names = [name for name, chosen in self.config.eval.sets.items() if chosen.phases]
        self.state.reports[phase] = await self.evaluate(names, phase)

    async def evaluate(self, names: list[str], when: str = "") -> dict[str, BriefReport]:
        """Evaluate these sets. `when`: the phase; empty: after a step. No weights are published
        meanwhile, so that all rows have one policy version."""
        if not names:
            return {}
        self.state.evaluating = what = self._now(names, when)
        with self.clock.phase("eval"):
            found = await self._in_time(what)
        self.state.evaluating = None
        return found

    async def after_step(self, names: list[str]) -> None:
        """Evaluate these sets after a step, and update the best checkpoint."""
        for report in (await self.evaluate(names)).values():
            await consider_best(self.saver, report, self.config.checkpoint.best_metric)

    async def resume(self, due: list[str]) -> None:
        """Resume the evaluation after a step that was interrupted, or run that of the sets `due`
        after the last step, if the interruption came before it."""
        what = self.state.evaluating or self._now(due)
        if what.when or not what.sets:
            return
        if not self._has_sets(what):
            self._warn_of_gap(what, "eval.sets no longer has them")
        elif await in_thread(self.is_done, what):
            await self._consider_again(what)
        else:
            await self.after_step(what.sets)
        self.state.evaluating = None

    async def _consider_again(self, what: Evaluating) -> None:
        """Update the best checkpoint, in case the interruption came before that."""
        if not (metric := self.config.checkpoint.best_metric):
            return
        rows = await in_thread(read_rows, self._folder / what.phase)
        for name in what.sets:
            of_set = [row for row in rows if row.dataset == name]
            report = await in_thread(brief_report, name, of_set)
            await consider_best(self.saver, report, metric)

    def _has_sets(self, what: Evaluating) -> bool:
        """Whether the configuration still has all sets of the evaluation."""
        return self.config.eval.sets.keys() >= set(what.sets)

    def is_recorded(self, phase: str) -> bool:
        """Whether the metrics of this evaluation are complete, and will not be written again."""
        if phase in PHASES:
            return phase in self.state.reports
        pending = self.state.evaluating
        if pending is not None and pending.phase == phase and self._has_sets(pending):
            return self.is_done(pending)
        return not (self._folder / f"{phase}{PARTIAL}").is_dir()

    # inner workings

    def _now(self, names: list[str], when: str = "") -> Evaluating:
        state, version = self.state, self.parts.learner.policy_version
        return Evaluating(state.step, version, names, state.line, when)

    async def _in_time(self, what: Evaluating) -> dict[str, BriefReport]:
        """The result, or an empty one, with a warning, after `eval.timeout_s`."""
        limit_s = self.config.eval.timeout_s
        deadline = asyncio.timeout(limit_s)
        try:
            async with deadline:
                return await self._evaluate(what)
        except TimeoutError:
            if not deadline.expired():
                raise
        self._warn_of_gap(what, f"it took longer than {limit_s:g} s (eval.timeout_s)")
        return {}

    def _warn_of_gap(self, what: Evaluating, reason: str) -> None:
        logger.warning("the evaluation %s is missing: %s", what.phase, reason, extra=SHOWN)

    async def _evaluate(self, what: Evaluating) -> dict[str, BriefReport]:
        """Evaluate and record the sets. RUN/eval/PHASE is complete at the end. An interrupted
        evaluation of the same weights is resumed; that of other weights is removed."""
        config = await in_thread(self._configuration, what.sets)
        saved = self._saved(what, config)
        folder = self._folder / what.phase
        unfinished = folder.with_name(folder.name + PARTIAL)
        opened: list[Store] = []  # filled by a thread, even if the caller is cancelled

        def open_store() -> None:
            if is_of(folder, saved):  # it was done, but its figures were not recorded yet
                shutil.rmtree(unfinished, ignore_errors=True)
                folder.rename(unfinished)
            elif not is_of(unfinished, saved):
                shutil.rmtree(unfinished, ignore_errors=True)
            opened.append(Store(unfinished, saved))

        found = {}
        try:
            await uncancelled(in_thread(open_store))
            for name in what.sets:
                rows = await self._sample(opened[0], config, name)
                refuse_failed(name, rows, is_before=what.when in BEFORE_TRAINING)
                found[name] = await in_thread(brief_report, name, rows)
                await self.recorder.record_evaluation(found[name], rows, what.step, what.phase)
        finally:
            for store in opened:
                store.close()
        await in_thread(replace_folder, unfinished, folder)
        return found

    def is_done(self, what: Evaluating) -> bool:
        """Whether the evaluation is stored and complete."""
        saved = self._saved(what, self._configuration(what.sets))
        return is_of(self._folder / what.phase, saved)

    def _saved(self, what: Evaluating, config: EvaluateConfig) -> Saved:
        subject = {
            "name": self._run.name,
            "step": what.step,
            "policy_version": what.policy_version,
            "incarnation": what.incarnation,
        }
        return Saved(subject=subject, run=str(self._run.absolute()), config=to_plain(config))

    async def _sample(self, store: Store, config: EvaluateConfig, name: str) -> list[EvalRow]:
        """All rows of a set, in the order of its questions; samples only the missing ones. Uses the
        seed of the set, as `agentenv evaluate` does: equal seeds give equal samples."""
        own = config.sets[name]
        number = config.seed if own.sampling.seed is None else own.sampling.seed
        seeded = copy.copy(self.parts.eval_actor)
        seeded.seed = f"{number}/eval/{name}"
        tasks, samples = self.parts.eval_tasks[name], range(own.num_samples)
        wanted = [Wanted(name, task, sample) for task in tasks for sample in samples]
        missing, many = store.missing(wanted), self.config.eval.concurrency
        view, title = self.recorder.view, f"evaluation of {name}"
        shows = view.is_idle  # else beside the training, whose bar it is
        if shows:
            view.begin(title, len(missing))
        update = view.advance if shows else Pulse(view, title, len(missing)).update
        actors = {name: seeded}
        try:
            await sample_into(store, missing, actors, lambda _: number, update, concurrency=many)
        finally:
            if shows:
                view.end()
        rows = [store.rows[one.key] for one in wanted]
        if (padded := sum(row.padded_tokens for row in rows)) and name not in self._padded:
            self._padded.add(name)
            logger.warning("%s: %d %s", title, padded, PADDED, extra=SHOWN)
        return rows

    def _configuration(self, names: Sequence[str]) -> EvaluateConfig:
        """That of the run, as `agentenv evaluate RUN` has it."""
        config = self.config
        plain = json.loads(json.dumps(to_builtins(config)))
        raw = evaluation_of(plain, names, SET_KEYS)
        raw["concurrency"] = config.eval.concurrency
        return resolve_sets(raw, "eval")


def brief_report(name: str, rows: Sequence[EvalRow]) -> BriefReport:
    """The figures of the rows of one set."""
    kinds = sorted({row.kind for row in rows})
    versions = [version for row in rows for version in row.policy_versions]
    return BriefReport(
        name=name,
        policy_versions=(min(versions, default=0), max(versions, default=0)),
        overall=_figures(rows),
        by_kind={kind: _figures([row for row in rows if row.kind == kind]) for kind in kinds},
    )


def _figures(rows: Sequence[EvalRow]) -> BriefFigures:
    """Those that `agentenv evaluate report` computes of the same rows."""
    found = figures_of(questions_of(rows), ())
    means = {name: one.value for name, one in found.estimates.items()}
    success = found.estimates.get("success")
    return BriefFigures(
        num_trajectories=found.num_trajectories,
        num_failed=found.num_failed,
        success=means.get("success"),
        interval=(0.0, 1.0) if success is None else (success.low or 0.0, success.high or 0.0),
        success_if_failed_wrong=found.success_if_failed_wrong,
        reward=means.get("reward"),
        tool_calls=means.get("tool_calls"),
        action_tokens=means.get("action_tokens"),
        parts=found.parts,
    )


async def consider_best(saver: RunSaver, report: BriefReport, metric: str) -> None:
    """Make the checkpoint of the last step the best one if `report` has the best value so far of
    `metric`, SET/FIGURE."""
    name, _, figure = metric.partition("/")
    if report.name != name:
        return
    value: float | None = getattr(report.overall, figure)
    if value is None or (saver.state.best is not None and value <= saver.state.best):
        return
    cancelled = None
    if not await in_thread(saver.has, saver.state.step):
        try:
            await saver.save()
        except asyncio.CancelledError as error:  # the checkpoint is saved nevertheless
            cancelled = error
    await uncancelled(_keep_best(saver, value))
    if cancelled is not None:
        raise cancelled


async def _keep_best(saver: RunSaver, value: float) -> None:
    """Record a new best value, only with an existing checkpoint; see RunEvaluator.resume."""
    await in_thread(keep_best, saver.checkpoints, saver.state.step)
    saver.state.best = value
    await saver.amend()


def refuse_failed(name: str, rows: Sequence[EvalRow], *, is_before: bool = False) -> None:
    """Raises the error of `broken` if every trajectory of an evaluation failed, or with `is_before`
    (training) if MAX_FAILED of them did: training would have the same problem, and learn from a
    biased rest."""
    errors = [row.error or "" for row in rows if row.end == FAILED]
    errors = [one for one in errors if not one.startswith(f"{CANCELLED}:")]
    if not errors or len(errors) < len(rows) * (MAX_FAILED if is_before else 1):
        return
    named = named_causes(errors)
    number = f"all {len(rows)}" if len(errors) == len(rows) else f"{len(errors)} of {len(rows)}"
    raise broken(errors)(
        f"{number} trajectories of the evaluation of eval.sets.{name} failed"
        f"{f' before training, {MAX_FAILED:.0%} or more' if is_before else ''}: {named}; fix it "
        "and continue with --resume, which retries them"
    )


def is_of(path: Path, saved: Saved) -> bool:
    """Whether the folder contains this evaluation."""
    try:
        return bool(identity(load_saved(path)) == json.loads(json.dumps(identity(saved))))
    except DataError:
        return False
