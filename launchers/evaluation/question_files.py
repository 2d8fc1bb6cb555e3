"""The questions of a set, read from its files."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from agentenv.types import Task
from launchers.data import load_set, said
from launchers.evaluation.benchmarks import load_benchmark
from launchers.evaluation.run_config import QuestionSet, settings

Say = Callable[[str], None]


async def read_questions(
    name: str, one: QuestionSet, resolve: Callable[[str], Path], say: Say
) -> list[Task]:
    """Tasks with names of their own. Raises DataError."""
    key, env_id = f"sets.{name}", settings(one).env.id
    if one.benchmark:
        paths = [
            resolve(path)
            for path in ([one.path] if isinstance(one.path, str) else one.path)
            if path  # without any, load_benchmark says where to get it
        ]
        tasks = await asyncio.to_thread(
            load_benchmark, one.benchmark, paths, one.max_tasks, env_id=env_id, rows=one,
            say=said(say, key),
        )  # fmt: skip
    else:
        tasks = await load_set(one.path, env_id, one, resolve, say, key, one.max_tasks or 0)
    return _with_own_names(tasks, said(say, key))


def _with_own_names(tasks: Sequence[Task], say: Say) -> list[Task]:
    """The tasks; a name that returns gets a number, since rows are kept by name."""
    seen: Counter[str] = Counter()
    named = []
    for task in tasks:
        seen[task.id] += 1
        again = seen[task.id] > 1
        named.append(replace(task, id=f"{task.id}#{seen[task.id]}") if again else task)
    twice = sum(count - 1 for count in seen.values())
    if twice:
        say(f"{twice} questions have the name of an earlier one; they are told apart by a number")
    return named
