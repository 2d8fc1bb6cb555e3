"""Datasets: JSONL rows into tasks, in an order that a seed fixes and a position resumes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

from agentenv.errors import DataError
from agentenv.types import Task

RESERVED = ("id", "env_id", "question", "answer", "kind")


def load_tasks(path: Path, env_id: str) -> list[Task]:
    """Read one JSONL file. Each row needs `question` and `answer` (a text, a number or a list).

    `id`, `kind` and `env_id` are optional, any other key goes to `Task.metadata`. Raises
    DataError with file and row for anything else, and for an empty file.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such dataset file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    tasks = [
        _task(line, f"{path}, row {number}", f"{path.stem}-{number}", env_id)
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not tasks:
        raise DataError(f"{path}: the dataset is empty; expected one JSON object a line")
    return tasks


class TaskStream:
    """Endless epochs over `tasks`; each epoch in an order of its own, fixed by the seed.

    `position` counts tasks handed out; a stream made with the position of another one continues
    it exactly.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, position: int = 0) -> None:
        self.tasks = tasks
        self.seed = seed
        self.position = position

    def __iter__(self) -> Iterator[tuple[int, Task]]:
        """Yields (position of the task, task)."""
        while True:
            epoch, start = divmod(self.position, len(self.tasks))
            order = list(range(len(self.tasks)))
            Random(f"{self.seed}/epoch/{epoch}").shuffle(order)
            for number in order[start:]:
                position = self.position
                self.position += 1
                yield position, self.tasks[number]


def _task(line: str, where: str, default_id: str, env_id: str) -> Task:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(row).__name__}")
    question = row.get("question")
    if not isinstance(question, str) or not question.strip():
        raise DataError(f"{where}: key 'question' must be a text that is not empty")
    return Task(
        id=str(row.get("id", default_id)),
        env_id=str(row.get("env_id", env_id)),
        question=question,
        answers=_answers(row.get("answer"), where),
        kind=str(row.get("kind", "all")),
        metadata={key: value for key, value in row.items() if key not in RESERVED},
    )


def _answers(answer: Any, where: str) -> tuple[str, ...]:
    golds = answer if isinstance(answer, list) else [answer]
    if not golds or not all(
        isinstance(gold, str | int | float) and str(gold).strip() for gold in golds
    ):
        raise DataError(
            f"{where}: key 'answer' must be a text, a number, or a list of them that is not empty"
        )
    return tuple(str(gold) for gold in golds)
