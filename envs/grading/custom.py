"""Custom graders: a function in a file, run in killable workers.

def compute_score(data_source, solution_str, ground_truth, extra_info=None): ...   # verl's
async def grade(task, written, calls): ...                                         # ours

Of verl's arguments a function may leave out data_source and extra_info, as published ones do. The
ground truth is the row's own, of the type that it has there. Either may be sync or async and
returns a number, a dict with "score" (its other numbers become metrics), or a Grade.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from agentenv.base.errors import ConfigError, GraderError, InfraError, reported_as
from agentenv.base.types import SYSTEM_KEY, Message, Task
from agentenv.contract.env import Grade
from agentenv.data.file_formats import literal
from agentenv.data.rows import GOLD_KEY, look_up
from agentenv.envs.grading.keys import SolutionStr
from agentenv.envs.grading.verdict import STOPPED, GraderDownError
from agentenv.processes.worker_pool import JobDiedError, JobRaisedError, JobStoppedError, WorkerPool

NUM_WORKERS = 2


class CustomGrader:
    """The grader of `kind = "custom"`. The function decides by "success", "correct" or "acc"
    whether an answer is right; without these it is right from the score `success_at` on.

    An answer on which the function computes or sleeps for over `timeout_s`, or its process dies,
    scores 0 and has the part "stopped"; waiting for a core of a busy machine does not count.
    """

    def __init__(
        self,
        path: str,
        name: str = "compute_score",
        *,
        timeout_s: float = 10.0,
        success_at: float = 1.0,
        solution_str: SolutionStr = "response",
    ) -> None:
        file = Path(path).resolve()
        if not file.is_file():
            raise ConfigError(
                f"grader.path = {path!r}: no such file; expected a Python file that defines "
                f"{name!r}"
            )
        self.path, self.name = str(file), name
        self.timeout_s = timeout_s
        self.success_at = success_at
        self._pool = WorkerPool(
            "agentenv.envs.grading.custom:CustomFunction",
            name="custom",
            arguments={"path": self.path, "name": name, "solution_str": solution_str},
            max_jobs=NUM_WORKERS,
            max_asleep_s=timeout_s,
        )

    async def start(self) -> None:
        """Import the user's file; a ConfigError names its fault."""
        who = f"grader.path = {self.path!r}, grader.name = {self.name!r}"
        with reported_as(ConfigError, who, ConfigError):
            await self._pool.start()

    async def grade(
        self, task: Task, written: Sequence[Message], calls: Mapping[str, int]
    ) -> Grade:
        """Raises GraderError when the function raises, GraderDownError when no process is
        available."""
        payload = pickle.dumps((task, list(written), dict(calls)))  # values keep their types
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
        """Numbers of calls of the function, and of those that were stopped."""
        return self._pool.stats()

    def close(self) -> None:
        """Kill the workers."""
        self._pool.close()


# A grader of the user's in a worker: load the function, call it, check its result.

VERL = ("data_source", "solution_str", "ground_truth", "extra_info")
NEEDED = {"solution_str", "ground_truth"}
OURS = ("task", "written", "calls")


class CustomFunction:
    """Callable with a pickled task, the messages and the calls: {"score", "success" or None,
    "parts", "reason"}.

    Made in the process that forks, so the user's module is imported once.
    """

    def __init__(self, path: str, name: str, solution_str: SolutionStr = "response") -> None:
        sys.path.insert(0, str(Path(path).parent))  # so that it may import its neighbors
        spec = importlib.util.spec_from_file_location(Path(path).stem, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        found: Any = getattr(module, name, None)
        if found is None:
            raise AttributeError(f"{path} defines no {name!r}")
        if inspect.isclass(found):
            found = getattr(found(), "grade", None)
        self._function: Callable[..., Any] = found
        self._taken = _taken(found, name)
        self._solution_str = solution_str

    def __call__(self, payload: bytes) -> dict[str, Any]:
        """Raises the error of the user's function, and TypeError for a result of another kind."""
        task, written, calls = pickle.loads(payload)
        if self._taken:
            given = verl_arguments(task, written, self._solution_str)
            outcome = self._function(**{key: given[key] for key in self._taken})
        else:
            outcome = self._function(task, written, calls)
        if inspect.iscoroutine(outcome):
            outcome = asyncio.run(outcome)
        return checked(outcome)


def verl_arguments(
    task: Task, written: list[Message], solution_str: SolutionStr = "response"
) -> dict[str, Any]:
    """The arguments that verl passes: the text of the policy, and the values of the row unchanged.

    With `solution_str` "sequence" the text begins with the prompt, in the chat format of Qwen, as
    from the reward managers of Search-R1 and TinyZero, whose functions search it for the turn.
    """
    row = task.metadata
    response = "\n".join(message.content for message in written if message.role == "assistant")
    extra = row.get("extra_info")
    if isinstance(extra, str):
        found = literal(extra)  # of a table without types
        extra = found if isinstance(found, dict) else extra
    if extra is None or isinstance(extra, dict):
        extra = {"question": task.question, **(extra or {})}
    return {
        "data_source": str(row.get("data_source", task.kind)),
        "solution_str": response if solution_str == "response" else _prompt(task) + response,
        "ground_truth": ground_truth(task),
        "extra_info": extra,
    }


def ground_truth(task: Task) -> Any:
    """The value of the row, of its own type; else the gold, or the list of several."""
    for column in ("reward_model.ground_truth", GOLD_KEY):
        found = look_up(task.metadata, column)[1]
        if found is not None:
            return found
    return task.answers[0] if len(task.answers) == 1 else list(task.answers)


def _prompt(task: Task) -> str:
    """The chat of the row, else its system prompt and question, up to the turn of the policy."""
    chat = task.metadata.get("prompt")
    if not isinstance(chat, list):
        system = task.metadata.get(SYSTEM_KEY)
        chat = [{"role": "system", "content": system}] if system else []
        chat.append({"role": "user", "content": task.question})
    turns = [f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in chat]
    return "".join((*turns, "<|im_start|>assistant\n"))


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
        raise TypeError(f"expected a number or a dict with 'score', got {value!r:.200}")
    if not math.isfinite(float(value)):
        raise ValueError(f"the score is {value!r}; expected a finite number")
    return float(value)


def _taken(function: Callable[..., Any], name: str) -> tuple[str, ...]:
    """The arguments of verl that the function takes; none for a function of our form."""
    if not callable(function):
        raise TypeError(f"{name!r} is not a function")
    signature = inspect.signature(function)
    parameters = signature.parameters
    if parameters.keys() >= NEEDED:
        takes_all = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        taken = tuple(key for key in VERL if takes_all or key in parameters)
        with suppress(TypeError):  # it needs more
            signature.bind(**dict.fromkeys(taken))
            return taken
    elif tuple(parameters)[:3] == OURS:
        return ()
    raise TypeError(
        f"{name}({', '.join(parameters)}): expected the parameters (task, written, calls), or "
        "verl's (data_source, solution_str, ground_truth, extra_info), of which data_source and "
        "extra_info may be missing"
    )
