"""Demonstrations for a cold start, played in the environment itself.

    def solve(task, results):                       # the whole text of the next turn
        if not results:
            return f"<think>I look.</think><stock>{task.metadata['item']}</stock>"
        return f"<think>I know it.</think><answer>{results[-1]}</answer>"

    played = demonstrate(WarehouseEnv, rows, solve, stage="clean")
    write_rows("data/sft.jsonl", played)

What tools answer is what they really answer, and each row says what it earned.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from agentenv.backoff import backoff_s
from agentenv.data_files import RawRow, plain
from agentenv.disk import write_whole
from agentenv.env import Env, shared_apart
from agentenv.errors import (
    CrashError,
    DataError,
    EnvError,
    GraderError,
    InfraError,
    OutageError,
)
from agentenv.outcomes import check_observation, check_reset, check_step
from agentenv.rows import RowReader, RowsConfig
from agentenv.tags import tag_calls
from agentenv.types import Message, Task

Make = Callable[[Task], Env]
Turn = Callable[[Task, Sequence[str]], str]

MAX_TURNS = 100
MAX_FAILURES = 4  # of an episode, which is then played again
NUM_CONCURRENT = 16


def demonstrate(
    make: Make,
    tasks: Iterable[Task | Mapping[str, Any]],
    turn: Turn,
    *,
    stage: str = "",
    seed: int = 0,
) -> list[dict[str, Any]]:
    """A row for each task, or row of a dataset: its messages, prompt included, "kind", "stage",
    and what it earned as "reward" and "success".

    `turn` writes the next turn of the policy in the tag protocol, from the task and the texts of
    all results so far; a turn without a call ends the episode. Not to be called where an event
    loop runs; `run.setup` is called in a thread. An episode that fails is played again, as in a
    run. Raises DataError for one that does not end, CrashError for what a rollout refuses too, and
    what the environment raises for a bug and for an outage that lasts.
    """
    reader = RowReader(RowsConfig(), "demonstrated")
    read = [
        one if isinstance(one, Task) else reader.task(RawRow(Path("row"), number, plain(one)))
        for number, one in enumerate(tasks, 1)
    ]
    return asyncio.run(_demonstrate(make, read, turn, stage, seed))


async def _demonstrate(
    make: Make, tasks: Sequence[Task], turn: Turn, stage: str, seed: int
) -> list[dict[str, Any]]:
    places = asyncio.Semaphore(NUM_CONCURRENT)

    async def one(task: Task) -> dict[str, Any]:
        async with places:
            for attempt in count():
                try:
                    return await _demonstration(make, task, turn, stage, seed)
                except (OutageError, CrashError):
                    raise
                except (InfraError, EnvError, GraderError) as error:
                    if attempt == MAX_FAILURES:
                        raise
                    wanted_s = error.retry_after_s if isinstance(error, InfraError) else 0.0
                await asyncio.sleep(
                    backoff_s(attempt, task.id, first_s=0.1, max_s=10.0, at_least_s=wanted_s)
                )
        raise AssertionError

    async with shared_apart():
        return await asyncio.gather(*map(one, tasks))


async def _demonstration(
    make: Make, task: Task, turn: Turn, stage: str, seed: int
) -> dict[str, Any]:
    env = make(task)
    try:
        messages, info = check_reset(await env.reset(seed=seed))
        shown, results = list(messages), list[str]()
        for _ in range(MAX_TURNS):
            text = turn(task, results)
            action = Message("assistant", text, tag_calls(text, info.get("tools", ())))
            shown.append(Message("assistant", text))
            outcome = check_step(await env.step(action))
            found, reward, terminated, truncated, step_info = outcome
            shown += found
            results += [message.content for message in found]
            if terminated or truncated:
                break
            check_observation(found, "tags")
        else:
            raise DataError(
                f"task {task.id}: the demonstration has not ended after {MAX_TURNS} turns; a turn "
                "without a call of a tool ends it"
            )
    finally:
        await env.close()
    return {
        "stage": stage,
        "kind": task.kind,
        "reward": reward,
        "success": bool(step_info.get("success", reward > 0)),
        "messages": [{"role": one.role, "content": one.content} for one in shown],
    }


def texts_of(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """All texts of demonstrations, whose words a `tiny_model` should know."""
    return [message["content"] for row in rows for message in row["messages"]]


def write_rows(path: str | Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """A JSONL file of these rows, and the folders above it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (f"{json.dumps(plain(row), ensure_ascii=False)}\n".encode() for row in rows))
    return path
