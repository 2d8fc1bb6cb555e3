"""Runs an evaluation into its directory: what is stored is not asked again."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from agentenv.actor import Actor
from agentenv.config import to_plain
from agentenv.evaluate import Answer, Question, ask
from launchers.evaluation.parts import Builder, Questions
from launchers.evaluation.progress import Progress
from launchers.evaluation.rows import EvalRow, Wanted
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
        wanted = [one for name, questions in sets.items() for one in _wanted(name, questions)]
        missing = store.missing(wanted)
        if len(missing) < len(wanted):
            view.say(f"{out} holds {len(wanted) - len(missing)} of {len(wanted)} trajectories")
        if not missing:
            return 0
        engine = await builder.engine()
        actors = {name: builder.actor(name, one, engine) for name, one in sets.items()}
        stored = [row for row in store.rows.values() if row.end != FAILED]
        progress = Progress(view, engine, len(missing) + len(stored), stored)
        stack.push_async_callback(progress.close)

        def make_row(name: str, answer: Answer) -> EvalRow:
            return row_of(name, answer, builder.seed(sets[name].config))

        await ask_into(
            store, missing, actors, make_row, progress.add, concurrency=config.concurrency
        )
        return progress.num_failed


async def ask_into(
    store: Store,
    missing: Sequence[Wanted],
    actors: Mapping[str, Actor],
    make_row: Callable[[str, Answer], EvalRow],
    on_row: Callable[[EvalRow], None] = lambda row: None,
    *,
    concurrency: int,
) -> None:
    """Ask what `store` lacks, each set by its actor, and store each row as its trajectory ends.
    `make_row` makes it of the set's name and the answer, `on_row` sees it."""
    names = {id(actor): name for name, actor in actors.items()}

    def keep(answer: Answer) -> None:
        row = make_row(names[id(answer.question.actor)], answer)
        store.add(row)
        on_row(row)

    asked = (Question(actors[one.dataset], one.task, one.sample) for one in missing)
    await ask(asked, keep, concurrency=concurrency)


def _wanted(name: str, one: Questions) -> Iterator[Wanted]:
    for task in one.tasks:
        for sample in range(one.config.num_samples or 1):
            yield Wanted(name, task, sample)


def saved_of(config: EvaluateConfig, subject: Subject, builder: Builder) -> Saved:
    """What is stored of an evaluation beside its rows."""
    told: dict[str, Any] = {"name": subject.name}
    if subject.model is not None:
        told |= {"path": str(subject.model), "weights": weights_digest(subject.model)}
    if builder.endpoint is not None:
        endpoint = builder.endpoint.endpoint
        told |= {"name": endpoint.model, "model": endpoint.model, "root": endpoint.served_from}
    return Saved(subject=told, run=str(subject.run.absolute()), config=to_plain(config))
