"""What an environment may give: the rules of rollouts, which the conformance kit, demonstrations, a
cold start and a dry run ask too.

Whatever else an environment gives is a bug of it, so that all of them raise CrashError.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from typing import Any, Literal

from agentenv.env import StepResult
from agentenv.errors import CrashError
from agentenv.types import Info, Message

Protocol = Literal["tags", "native"]  # of renderers

MAX_SHOWN = 200  # characters of what came instead
ROLES: dict[Protocol, tuple[str, ...]] = {"tags": ("tool",), "native": ("tool", "user")}


def check_reset(result: tuple[list[Message], Info]) -> tuple[list[Message], Info]:
    """The result of an env's `reset`, if it is one."""
    try:
        messages, info = result
        if isinstance(info, dict) and all(map(_is_message, messages)):
            return list(messages), info
    except (TypeError, ValueError):
        pass
    raise _wrong("reset", "(messages, info)", result)


def check_finish(result: tuple[float, Info]) -> tuple[float, Info]:
    """The result of an env's `finish`, if it is one."""
    try:
        reward, info = result
        if isinstance(info, dict) and isfinite(reward):
            return float(reward), info
    except (TypeError, ValueError):
        pass
    raise _wrong("finish", "(reward, info)", result)


def check_step(result: StepResult) -> StepResult:
    """The result of an env's `step`, if it is one."""
    try:
        given, reward, terminated, truncated, info = result
        messages = list(given)
        if all(map(_is_message, messages)) and isinstance(info, dict) and isfinite(reward):
            return messages, float(reward), bool(terminated), bool(truncated), info
    except (TypeError, ValueError):
        pass
    raise _wrong("step", "(messages, reward, terminated, truncated, info)", result)


def check_observation(messages: Sequence[Message], protocol: Protocol) -> None:
    """Refuse messages of a step that the episode goes on after and that no renderer of the protocol
    renders."""
    for message in messages:
        if message.role not in ROLES[protocol]:
            raise CrashError(_refusal(message.role, protocol))


def _refusal(role: str, protocol: Protocol) -> str:
    if protocol == "native":
        return f"an observation holds tool results or user messages, not {role!r}"
    return (
        f"the tag protocol renders tool results only, the env sent {role!r}: let a tool of the "
        'policy return that text, as a Message("tool", ..) (docs/environments.md, "A simulated '
        'user")'
    )


def _is_message(one: object) -> bool:
    return isinstance(one, Message)


def _wrong(method: str, form: str, result: Any) -> CrashError:
    return CrashError(f"the environment's {method} gave no {form} but {repr(result)[:MAX_SHOWN]}")
