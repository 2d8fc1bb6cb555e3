"""Graders of the user's own: a function in a file, run in killable workers.

def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...   # verl's
async def grade(task, written, calls): ...                                         # ours

Either may be sync or async and returns a number, a dict with "score" (its other numbers become
metrics), or a Grade.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentenv.errors import ConfigError, GraderError, InfraError
from agentenv.tool_env import Grade
from agentenv.types import Message, Task
from envs.grading.verdict import GraderDownError
from envs.workers import JobDiedError, JobRaisedError, JobStoppedError, WorkerPool

STOPPED = "stopped"  # the part of a grade that says that the function gave none


class CustomGrader:
    """The grader of `kind = "custom"`. An answer counts as right when the function says so by
    "success", "correct" or "acc", else from the score `success_at` on.

    An answer on which the function computes or sleeps for over `timeout_s`, or its process dies,
    scores 0 and has the part "stopped"; waiting for a core of a busy machine does not count.
    """

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
            "envs.grading.custom:CustomFunction",
            name="custom",
            arguments={"path": self.path, "name": name},
            max_jobs=num_workers,
            max_asleep_s=timeout_s,
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
        """Raises GraderError when the function raises, GraderDownError when no process can be
        had."""
        payload = {
            "task": msgspec.to_builtins(task),
            "written": msgspec.to_builtins(list(written)),
            "calls": dict(calls),
        }
        where = f"task {task.id}: {self.name} of {self.path}"
        try:
            await self.start()
            found = await self._pool.run(payload, self.timeout_s)
        except (JobStoppedError, JobDiedError) as error:
            return Grade(0.0, False, {STOPPED: 1.0}, f"{self.name} of {self.path}: {error}")
        except JobRaisedError as error:
            raise GraderError(f"{where}: {error}") from None
        except InfraError as error:
            raise GraderDownError(f"{where}: {error}") from None
        success = found["success"]
        if success is None:
            success = found["score"] >= self.success_at
        parts = {"score": found["score"], **found["parts"]}
        return Grade(found["score"], success, parts, found["reason"] or f"by {self.name}")

    def stats(self) -> dict[str, float]:
        """Calls of the function, and those that were stopped."""
        return self._pool.stats()

    def close(self) -> None:
        """Kill the workers."""
        self._pool.close()


# A grader of the user's in a worker: load the function, call it, check its result.

VERL = ("data_source", "solution_str", "ground_truth")
OURS = ("task", "written", "calls")


class CustomFunction:
    """Callable with {"task", "written", "calls"}: {"score", "success" or None, "parts", "reason"}.

    Made in the process that forks, so the user's module is imported once.
    """

    def __init__(self, path: str, name: str) -> None:
        sys.path.insert(0, str(Path(path).parent))  # so that it may import its neighbours
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        found = getattr(module, name, None)
        if found is None:
            raise AttributeError(f"{path} defines no {name!r}")
        self._function: Callable[..., Any] = _function(found)
        self._verl = _is_verl(self._function, name)

    def __call__(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Raises what the user's function raises, and TypeError for a result of another kind."""
        task = msgspec.convert(payload["task"], Task)
        written = msgspec.convert(payload["written"], list[Message])
        if self._verl:
            outcome = self._function(**verl_arguments(task, written))
        else:
            outcome = self._function(task, written, payload["calls"])
        if inspect.isawaitable(outcome):
            outcome = asyncio.run(_awaited(outcome))
        return checked(outcome)


def verl_arguments(task: Task, written: list[Message]) -> dict[str, Any]:
    """What verl passes: the policy's own text, and what the row says."""
    golds = list(task.answers)
    extra = task.metadata.get("extra_info")
    return {
        "data_source": str(task.metadata.get("data_source", task.kind)),
        "solution_str": "\n".join(m.content for m in written if m.role == "assistant"),
        "ground_truth": golds[0] if len(golds) == 1 else golds,
        "extra_info": {"question": task.question, **(extra if isinstance(extra, dict) else {})},
    }


def checked(outcome: Any) -> dict[str, Any]:
    """A float, a dict with "score" or "reward", or a Grade, as one kind of dict."""
    if hasattr(outcome, "reward") and hasattr(outcome, "success"):
        return {
            "score": number(outcome.reward),
            "success": bool(outcome.success),
            "parts": {key: number(value) for key, value in outcome.parts.items()},
            "reason": str(outcome.reason),
        }
    if not isinstance(outcome, dict):
        return {"score": number(outcome), "success": None, "parts": {}, "reason": ""}
    names = [key for key in ("score", "reward") if key in outcome]
    if not names:
        raise TypeError(f"the dict {sorted(map(str, outcome))} has neither 'score' nor 'reward'")
    flags = [outcome[key] for key in ("success", "correct", "acc") if key in outcome]
    parts = {
        str(key): float(value)
        for key, value in outcome.items()
        if key != names[0] and hasattr(value, "__float__") and math.isfinite(float(value))
    }
    return {
        "score": number(outcome[names[0]]),
        "success": bool(flags[0]) if flags else None,
        "parts": parts,
        "reason": str(outcome.get("reason", "")),
    }


def number(value: Any) -> float:
    """A finite float; numpy and torch scalars count."""
    if isinstance(value, str) or not hasattr(value, "__float__"):
        raise TypeError(f"expected a number or a dict with 'score', found {value!r:.200}")
    if not math.isfinite(float(value)):
        raise ValueError(f"the score is {value!r}; expected a finite number")
    return float(value)


def _function(found: Any) -> Callable[..., Any]:
    """The user's function; of a class, the `grade` of an instance."""
    if inspect.isclass(found):
        found = getattr(found(), "grade", None)
    return found  # type: ignore[no-any-return]


def _is_verl(function: Callable[..., Any], name: str) -> bool:
    if not callable(function):
        raise TypeError(f"{name!r} is not a function")
    parameters = inspect.signature(function).parameters
    if all(key in parameters for key in VERL):
        return True
    if tuple(parameters)[:3] == OURS:
        return False
    raise TypeError(
        f"{name}({', '.join(parameters)}): expected the parameters (task, written, calls), or "
        "verl's (data_source, solution_str, ground_truth, extra_info)"
    )


async def _awaited(outcome: Any) -> Any:
    return await outcome
