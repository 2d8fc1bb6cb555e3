"""The best checkpoint of a run, by checkpoint.best_metric."""

from __future__ import annotations

import asyncio

from agentenv.assembly.run.checkpoints import load_state
from agentenv.assembly.run.kept import best_checkpoint, keep_best
from agentenv.base.deadline import uncancelled
from agentenv.base.offload import in_thread
from agentenv.training.loop.brief_reports import BriefReport
from agentenv.training.loop.state import RunSaver, RunState


async def consider_best(saver: RunSaver, step: int, report: BriefReport) -> None:
    """Make the checkpoint of `step` the best one if `report` has the best value so far of
    checkpoint.best_metric."""
    name, _, figure = saver.best_metric.partition("/")
    if report.name != name:
        return
    value: float | None = getattr(report.overall, figure)
    if value is None or (saver.state.best is not None and value <= saver.state.best):
        return
    cancelled = None
    if step == saver.state.step and not await in_thread(saver.has, step):
        try:
            await saver.save()
        except asyncio.CancelledError as error:  # the checkpoint is saved nevertheless
            cancelled = error
    await uncancelled(_keep_best(saver, step, value))
    if cancelled is not None:
        raise cancelled


def _best_step(saver: RunSaver) -> int | None:
    """The step of the best checkpoint, which may be of an earlier process."""
    best = best_checkpoint(saver.checkpoints)
    return None if best is None else load_state(best, RunState).step


async def _keep_best(saver: RunSaver, step: int, value: float) -> None:
    """Record a new best value, only with an existing checkpoint; see Evaluator.resume."""
    if await in_thread(saver.has, step):
        await in_thread(keep_best, saver.checkpoints, step)
    elif await in_thread(_best_step, saver) != step:
        return
    saver.state.best = value
    await saver.amend()
