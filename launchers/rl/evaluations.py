"""Evaluations of a run, as `launchers/evaluate.py` asks and stores them.

RUN/eval/step-000040/           a whole evaluation, for `evaluate.py report`, `compare`, `regrade`
RUN/eval/step-000040.partial/   one that goes on, or was cut off
"""

from __future__ import annotations

import asyncio
import copy
import json
import shutil
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from agentenv.actor import Actor
from agentenv.config import to_plain
from agentenv.errors import DataError
from agentenv.evaluate import Answer
from agentenv.types import Task
from launchers.config import TrainConfig
from launchers.evaluation.rows import EvalRow, Wanted
from launchers.evaluation.run import ask_into
from launchers.evaluation.run_config import EvaluateConfig, resolve_sets
from launchers.evaluation.store import Saved, Store, identity, load_saved
from launchers.evaluation.subject import evaluation_of
from launchers.evaluation.trajectory import row_of
from launchers.rl.state import Evaluating

FOLDER, PARTIAL = "eval", ".partial"
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
        await asyncio.to_thread(_replace, partial, folder)

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


def _replace(partial: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
