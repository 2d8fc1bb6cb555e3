"""Exceptions of a user's code, converted to CrashError with their place in it.

await guarded(env.step(action), "the environment's step")
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from agentenv.base.errors import AgentEnvError, ConfigError, CrashError, reported_as
from agentenv.base.installation import PACKAGES

P = ParamSpec("P")
T = TypeVar("T")


A_TEXT = "expected the text for the policy (str, or json.dumps), or a ToolResult"
MAX_SHOWN = 500  # characters of a description of a call and its arguments, and of an error


async def guarded(work: Awaitable[T], what: str | Callable[[], str]) -> T:
    """The result of `work`, a user's code. Converts every exception that is not an AgentEnvError to
    a CrashError, including SystemExit and a cancellation by the code itself; `what` describes the
    work."""
    try:
        return await work
    except AgentEnvError:
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise _crash(what, error) from error
    except (Exception, SystemExit) as error:
        raise _crash(what, error) from error


def _crash(what: str | Callable[[], str], error: BaseException) -> CrashError:
    text = what if isinstance(what, str) else what()
    if len(text) > MAX_SHOWN:
        text = f"{text[:MAX_SHOWN]}..."
    summary = f"raised {type(error).__name__}: {str(error)[:MAX_SHOWN]}{place_of(error)}"
    crash = CrashError(f"{text} {summary}")
    crash.summary = f"{text.partition(', called with')[0]} {summary}"
    return crash


async def at_start(work: Awaitable[T], what: str) -> T:
    """As `guarded`, before a run starts, when a bug must be fixed first: raises ConfigError."""
    with reported_as(ConfigError, "", CrashError):
        return await guarded(work, what)


def called(function: Callable[P, T], *given: P.args, **keys: P.kwargs) -> T:
    """The result of a function, or of a method of a part, that a user may have written. Converts an
    exception of a user's code to ConfigError with class, method and place."""
    try:
        return function(*given, **keys)
    except AgentEnvError:
        raise
    except Exception as error:
        name, place = name_of(function), place_of(error)
        if not place and name.startswith(f"{OURS}."):
            raise  # a bug of this project needs its traceback
        why = f"{type(error).__name__}: {error}{place or f' ({origin_of(error)})'}"
        raise ConfigError(f"{name} raised {why}") from error


def name_of(function: Callable[..., Any]) -> str:
    """The module and the name of a function or method."""
    return f"{function.__module__}:{function.__qualname__}"


def not_a_text(name: str, found: Any, function: Any) -> CrashError:
    """The error of a tool whose function or method did not return a text."""
    place, text = code_place(function), getattr(found, "text", "")
    kind = "None" if found is None else f"a value of type {type(found).__name__}"
    if not isinstance(text, str):
        kind = f"a {type(found).__name__} whose text is of type {type(text).__name__}"
    crash = CrashError(f"the tool {name!r}{place} returned {kind}; {A_TEXT}")
    crash.place = place.strip(" ()")
    return crash


def code_place(function: Any) -> str:
    """The first line of a function, as " (my_env.py, line 12)"; empty if it is not Python's."""
    code = getattr(function, "__code__", None)
    return f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else ""


OURS = "agentenv"  # the package whose lines do not locate a user's bug, except in this part
NAMED = "agentenv.envs."


def place_of(error: BaseException) -> str:
    """The last line of a user's code in the traceback, as " (my_env.py, line 12)"; empty if there
    is none."""
    places = [place for place, is_theirs in _places(error) if is_theirs]
    return f" ({places[-1]})" if places else ""


def origin_of(error: BaseException) -> str:
    """The origin of an error: the last line of a user's code in its traceback or in its cause's,
    else the last line; empty without a traceback."""
    found: list[tuple[str, bool]] = []
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, CrashError) and cause.place:
            return cause.place
        found += _places(cause)
        cause = cause.__cause__
    theirs = [place for place, is_theirs in found if is_theirs]
    return (theirs or [place for place, _ in found] or [""])[-1]


def _places(error: BaseException) -> Iterator[tuple[str, bool]]:
    """The lines of a traceback, and whether each belongs to a user's code."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        package = module.partition(".")[0]
        is_ours = package == OURS and not module.startswith(NAMED)
        is_theirs = not (is_ours or package in sys.stdlib_module_names or "site-packages" in file)
        path = Path(file)
        is_ours = is_ours and path.is_relative_to(PACKAGES)
        yield f"{path.relative_to(PACKAGES) if is_ours else path.name}, line {line}", is_theirs
