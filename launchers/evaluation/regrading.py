"""Grades stored trajectories again, by the graders that a configuration gives; asks no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from agentenv.errors import ConfigError, GraderError
from agentenv.grader import Grade, Grader, start_grader
from agentenv.types import Message, Task
from launchers.env_config import EnvConfig
from launchers.environments import EnvMaker, Resolve
from launchers.evaluation.rows import EvalRow
from launchers.evaluation.run_config import EvaluateConfig
from launchers.evaluation.transcript import calls_that_ran, prediction, written

CONCURRENCY = 64
NUM_TRIES = 2
RETRY_DELAY_S = 0.5
MAX_FAILED_AT_FIRST = 20  # rows; when none before could be graded, the grader is not there
GRADER_FAILED = "GraderError:"


class Change(NamedTuple):
    """A row before and after."""

    before: EvalRow
    after: EvalRow

    @property
    def flipped(self) -> bool:
        """Whether the verdict is another; a failed row has none."""
        return self._verdict(self.before) != self._verdict(self.after)

    @staticmethod
    def _verdict(row: EvalRow) -> bool | None:
        return None if row.end == "failed" else row.success


class Graders:
    """The grader of each row's environment, which is made without its tools and never reset."""

    def __init__(self, config: EvaluateConfig, resolve: Resolve) -> None:
        self._makers: dict[str, EnvMaker] = {}
        self._env_ids: dict[str, str] = {}
        self._started: set[int] = set()
        for name, one in config.sets.items():
            assert one.env is not None, "filled when the sets were resolved"
            tables = {"grader": one.grader}
            limits, prompt = one.limits or config.limits, one.prompt or config.prompt
            own = _without_tools(one.env)
            self._makers[name] = EnvMaker(own, tables, resolve, limits, prompt)
            self._env_ids[name] = one.env.id

    def check(self, rows: Sequence[EvalRow]) -> None:
        """Refuse sets that the configuration lacks, and grader keys that no environment reads.
        Raises ConfigError."""
        tasks: dict[str, list[Task]] = {}
        for row in rows:
            if row.dataset not in self._makers:
                raise ConfigError(
                    f"config.json: the rows are of the set {row.dataset!r}, it has "
                    f"{sorted(self._makers)}"
                )
            tasks.setdefault(row.dataset, []).append(self._task(row))
        for name, own in tasks.items():
            self._makers[name].check_read(own)

    async def of(self, row: EvalRow) -> tuple[Task, Grader]:
        """The task of a row and its grader, started. Raises ConfigError where there is none."""
        task = self._task(row)
        grader: Grader | None = getattr(self._makers[row.dataset](task), "grader", None)
        if grader is None:
            raise ConfigError(
                f"{task.env_id} has no grader, so its trajectories cannot be graded again"
            )
        if id(grader) not in self._started:
            await start_grader(grader)
            self._started.add(id(grader))
        return task, grader

    def _task(self, row: EvalRow) -> Task:
        env_id, answers = row.env_id or self._env_ids[row.dataset], tuple(row.answers)
        return Task(row.task, env_id, row.question, answers, row.kind, dict(row.metadata))


def _without_tools(env: EnvConfig) -> EnvConfig:
    variants = {
        name: replace(one, tools=[], python=None, search=None) for name, one in env.variants.items()
    }
    return replace(env, tools=[], variants=variants)


async def regrade_rows(rows: Sequence[EvalRow], graders: Graders) -> list[Change]:
    """Grade all rows that ended, and those whose grader failed. A row whose grader fails now is
    failed, with the reason; the other figures of a row stay.

    Raises ConfigError for graders that cannot be made or keys that none reads, GraderError when
    the grader gives no verdict at all.
    """
    graders.check(rows)
    slots = asyncio.Semaphore(CONCURRENCY)
    counts = {"graded": 0, "failed": 0}

    async def one(row: EvalRow) -> Change:
        if not may_be_graded(row):
            return Change(row, row)
        async with slots:
            after = await _regrade(row, graders)
        counts["failed" if after.end == "failed" else "graded"] += 1
        if not counts["graded"] and counts["failed"] >= MAX_FAILED_AT_FIRST:
            raise GraderError(f"nothing is changed; no row could be graded: {after.error}")
        return Change(row, after)

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(row)) for row in rows]
    return [task.result() for task in running]


def may_be_graded(row: EvalRow) -> bool:
    """Whether a row ended with something to grade: an infrastructure failure did not, a grader's
    did."""
    return row.end != "failed" or (row.error or "").startswith(GRADER_FAILED)


async def _regrade(row: EvalRow, graders: Graders) -> EvalRow:
    task, grader = await graders.of(row)
    messages = written(row)
    try:
        grade = await _patiently(grader, task, messages, calls_that_ran(row))
    except GraderError as error:
        return replace(
            row, end="failed", error=f"GraderError: {error}", success=False, reward=0.0,
            reason="", parts={}, scores={}, same_as=None,
        )  # fmt: skip
    return replace(
        row,
        prediction=prediction(messages),
        end=row.end if row.end != "failed" else "truncated" if row.limit else "terminated",
        error=None,
        reward=grade.reward,
        success=grade.success,
        reason=grade.reason,
        parts=dict(grade.parts),
        scores={},
        same_as=None,
    )


async def _patiently(
    grader: Grader, task: Task, messages: Sequence[Message], calls: Mapping[str, int]
) -> Grade:
    for _ in range(NUM_TRIES - 1):
        try:
            return await grader.grade(task, messages, calls)
        except GraderError:
            await asyncio.sleep(RETRY_DELAY_S)
    return await grader.grade(task, messages, calls)


def resolver(run: str) -> Resolve:
    """Paths of a configuration, "{run}" being this directory."""
    return lambda text: Path(text.replace("{run}", run))
