"""Runs an evaluation into its directory: what is stored is not asked again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agentenv.actor import Actor
from agentenv.config import to_plain
from agentenv.evaluate import Answer, Question, ask
from agentenv.types import Task
from launchers.evaluation.parts import Builder, Questions
from launchers.evaluation.progress import Progress
from launchers.evaluation.run_config import EvaluateConfig
from launchers.evaluation.store import FAILED, Saved, Store
from launchers.evaluation.subject import Subject, weights_digest
from launchers.evaluation.trajectory import row_of
from launchers.view import View


async def run_evaluation(config: EvaluateConfig, subject: Subject, out: Path, view: View) -> int:
    """Ask what `out` does not hold yet; how many trajectories failed. Cancelled by SIGTERM as by
    Ctrl-C."""
    this = asyncio.current_task()
    assert this is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    async with AsyncExitStack() as stack:
        builder = Builder(config, subject, stack, view.say)
        await builder.start()
        sets = await builder.questions()
        store = Store(out, saved_of(config, subject, builder))
        stack.callback(store.close)
        wanted = [key for name, one in sets.items() for key in _keys(name, one)]
        for name, task, sample in wanted:
            store.check_question((name, task.id, sample), task.question)
        missing = [key for key in wanted if not store.has((key[0], key[1].id, key[2]))]
        if len(missing) < len(wanted):
            view.say(f"{out} holds {len(wanted) - len(missing)} of {len(wanted)} trajectories")
        if not missing:
            return 0
        engine = await builder.engine()
        actors = {name: builder.actor(name, one, engine) for name, one in sets.items()}
        names = {id(actor): name for name, actor in actors.items()}
        stored = [row for row in store.rows.values() if row.end != FAILED]
        progress = Progress(view, engine, len(missing) + len(stored), stored)
        stack.push_async_callback(progress.close)

        def keep(answer: Answer) -> None:
            name = names[id(answer.question.actor)]
            row = row_of(name, answer, builder.seed(sets[name].config))
            store.add(row)
            progress.add(row)

        await ask(_asked(missing, actors), keep, concurrency=config.concurrency)
        return progress.num_failed


def _keys(name: str, one: Questions) -> Iterator[tuple[str, Task, int]]:
    for task in one.tasks:
        for sample in range(one.config.num_samples or 1):
            yield name, task, sample


def _asked(missing: list[tuple[str, Task, int]], actors: dict[str, Actor]) -> Iterator[Question]:
    for name, task, sample in missing:
        yield Question(actors[name], task, sample)


def saved_of(config: EvaluateConfig, subject: Subject, builder: Builder) -> Saved:
    """What is stored of an evaluation beside its rows."""
    told: dict[str, Any] = {"name": subject.name}
    if subject.model is not None:
        told |= {"path": str(subject.model), "weights": weights_digest(subject.model)}
    if builder.endpoint is not None:
        endpoint = builder.endpoint.endpoint
        told |= {"name": endpoint.model, "model": endpoint.model, "root": endpoint.served_from}
    return Saved(subject=told, run=str(subject.run.absolute()), config=to_plain(config))
