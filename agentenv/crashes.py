"""What the code of users raises that it should not: it fails a rollout, not the run.

    await guarded(env.step(action), "the environment's step")   a CrashError says what it raised
    loaded("my_env:ShopEnv"), await at_start(...)               before a run: a ConfigError says it

A tool, an environment and a grader are somebody else's code, and have bugs. How many failures a run
bears: agentenv/failures.py.
"""

from __future__ import annotations

import asyncio
import importlib.util
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from agentenv.errors import AgentEnvError, ConfigError, CrashError

T = TypeVar("T")

MAX_SHOWN = 500  # characters of what was called with which arguments


async def guarded(work: Awaitable[T], what: str | Callable[[], str]) -> T:
    """What `work` gives, which is code of a user. Raises CrashError for all that it raises but an
    AgentEnvError, also where it cancels or ends itself; `what` says what it was."""
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
    said = f"raised {type(error).__name__}: {error}{place_of(error)}"
    crash = CrashError(f"{text} {said}")
    crash.said = f"{text.partition(', called with')[0]} {said}"
    return crash


async def at_start(work: Awaitable[T], what: str) -> T:
    """Like `guarded`, before a run starts: a bug is then a mistake to mend first. Raises
    ConfigError."""
    try:
        return await guarded(work, what)
    except CrashError as error:
        raise ConfigError(str(error)) from error


def loaded(path: str) -> Any:
    """What 'module' or 'module:name' names, imported. Raises ConfigError with what is wrong, also
    with the module itself."""
    module, _, name = path.partition(":")
    try:
        found = _imported(module)
        return getattr(found, name) if name else found
    except (AgentEnvError, ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{error}{place_of(error)}{_renamed(error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{type(error).__name__}: {error}{place_of(error)}") from error


FORMER = {  # what modules of ours were called, in configurations that name them
    "launchers.quickstart": "agentenv.envs.quickstart_setup",
    "envs": "agentenv.envs",
    "learners": "agentenv.learners",
    "reference": "agentenv.reference",
}


def _imported(module: str) -> ModuleType:
    """The module, of the user or, where there is none, the one of ours that had this name."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        for former, name in FORMER.items():
            is_missing = error.name is not None and f"{module}.".startswith(f"{error.name}.")
            if is_missing and f"{module}.".startswith(f"{former}."):
                return importlib.import_module(name + module.removeprefix(former))
        raise


def _renamed(error: BaseException) -> str:
    """Where a user's module imports a module of ours by its former name: a hint at today's."""
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    for former, name in FORMER.items():
        if f"{missing}.".startswith(f"{former}."):
            today = name + missing.removeprefix(former)
            with suppress(ImportError):
                if importlib.util.find_spec(today) is not None:
                    return f"; that of this project is {today}"
    return ""


OURS = "agentenv"  # the package whose lines say nothing about a bug of a user, but for these parts
NAMED = ("agentenv.envs.", "agentenv.learners.", "agentenv.reference.")
PACKAGES = Path(__file__).resolve().parent.parent  # the folder that agentenv is imported from


def place_of(error: BaseException) -> str:
    """The last line of a user's code that an error went through, as " (my_env.py, line 12)"; empty
    where there is none."""
    places = [place for place, is_theirs in _places(error) if is_theirs]
    return f" ({places[-1]})" if places else ""


def origin_of(error: BaseException) -> str:
    """The line that an error comes from: the last one of a user's code that it or its cause went
    through, else the last one; empty for an error that was not raised here."""
    found: list[tuple[str, bool]] = []
    cause: BaseException | None = error
    while cause is not None:
        found += _places(cause)
        cause = cause.__cause__
    theirs = [place for place, is_theirs in found if is_theirs]
    return (theirs or [place for place, _ in found] or [""])[-1]


def _places(error: BaseException) -> Iterator[tuple[str, bool]]:
    """The lines that an error went through, and whether each is of a user's code."""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        package = module.partition(".")[0]
        is_ours = package == OURS and not module.startswith(NAMED)
        is_theirs = not (is_ours or package in sys.stdlib_module_names or "site-packages" in file)
        path = Path(file)
        is_ours = is_ours and path.is_relative_to(PACKAGES)
        yield f"{path.relative_to(PACKAGES) if is_ours else path.name}, line {line}", is_theirs
