"""Graders of the user's own: a function in a file, run in killable workers.

def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...   # verl's
async def grade(task, written, calls): ...                                         # ours

Either may be sync or async and returns a number, a dict with "score" (its other numbers become
metrics), or a Grade.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from agentenv.errors import ConfigError, GraderError
from agentenv.grader import Grade
from agentenv.types import Message, Task
from envs.grading.workers import JobFailedError, JobTimeoutError, WorkerPool


class CustomGrader:
    """The grader of `kind = "custom"`. An answer counts as right when the function says so by
    "success", "correct" or "acc", else from the score `success_at` on."""

    def __init__(
        self,
        path: str,
        name: str = "compute_score",
        *,
        timeout_s: float = 10.0,
        num_workers: int = 2,
        success_at: float = 1.0,
    ) -> None:
        file = Path(path).resolve()
        if not file.is_file():
            raise ConfigError(
                f"grader.path = {path!r}: there is no such file; expected a Python file that "
                f"defines {name!r}"
            )
        self.path, self.name = str(file), name
        self.timeout_s = timeout_s
        self.success_at = success_at
        self._pool = WorkerPool(
            "envs.grading.custom_worker:CustomFunction",
            arguments={"path": self.path, "name": name},
            max_jobs=num_workers,
        )

    async def start(self) -> None:
        """Import the user's file; a ConfigError says what is wrong with it."""
        try:
            await self._pool.start()
        except ConfigError as error:
            raise ConfigError(
                f"grader.path = {self.path!r}, grader.name = {self.name!r}: {error}"
            ) from None

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Raises GraderError when the function raises or takes too long."""
        payload = {
            "task": msgspec.to_builtins(task),
            "written": msgspec.to_builtins(list(written)),
            "calls": dict(calls),
        }
        await self.start()
        try:
            found = await self._pool.run(payload, self.timeout_s)
        except (JobTimeoutError, JobFailedError) as error:
            raise GraderError(f"task {task.id}: {self.name} of {self.path}: {error}") from None
        success = found["success"]
        if success is None:
            success = found["score"] >= self.success_at
        parts = {"score": found["score"], **found["parts"]}
        return Grade(found["score"], success, parts, found["reason"] or f"by {self.name}")

    def close(self) -> None:
        """Kill the workers."""
        self._pool.close()
