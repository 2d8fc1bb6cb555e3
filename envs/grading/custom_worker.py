"""A grader of the user's in a worker: load the function, call it, check its result."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from agentenv.types import Message, Task

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
