"""What the code of users raises that it should not: it fails a rollout, not the run.

    await guarded(env.step(action), "the environment's step")   a CrashError says what it raised
    crashes.add(error, task_id)                                 counts, as each rollout ends
    loaded("my_env:ShopEnv"), await at_start(...)               before a run: a ConfigError says it

A tool, an environment and a grader are somebody else's code, and have bugs. One rollout in a
thousand that meets one is a rollout lost; one in twenty is a run that learns something else than
its task, and ends.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import sys
import traceback
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from agentenv.errors import AgentEnvError, ConfigError, CrashError, TooManyCrashesError

T = TypeVar("T")

WINDOW = 200  # rollouts among which crashes are counted
MAX_SHOWN = 500  # characters of what was called with which arguments

logger = logging.getLogger(__name__)


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
    return CrashError(f"{text} raised {type(error).__name__}: {error}{place_of(error)}")


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
        found = importlib.import_module(module)
        return getattr(found, name) if name else found
    except (AgentEnvError, ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{error}{place_of(error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{type(error).__name__}: {error}{place_of(error)}") from error


OURS = ("agentenv", "launchers")  # packages whose lines say nothing about a bug of a user


def place_of(error: BaseException) -> str:
    """The last line of a user's code that an error went through, as " (my_env.py, line 12)"; empty
    where there is none."""
    place = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        file, package = frame.f_code.co_filename, str(frame.f_globals.get("__name__"))
        package = package.partition(".")[0]
        if package not in (*OURS, *sys.stdlib_module_names) and "site-packages" not in file:
            place = f" ({Path(file).name}, line {line})"
    return place


class Crashes:
    """Counts the crashed ones among the last WINDOW rollouts. The first crash is told, with its
    traceback in the log."""

    def __init__(self, max_share: float, *, strict: bool) -> None:
        self.num = 0
        self._max = 0.0 if strict else max_share * WINDOW
        self._recent: deque[str | None] = deque(maxlen=WINDOW)  # tasks of those that crashed

    def add(self, error: BaseException | None, task_id: str) -> None:
        """A rollout has ended, with a failure or without. Raises TooManyCrashesError."""
        crashed = isinstance(error, CrashError)
        self._recent.append(task_id if crashed else None)
        if not crashed:
            return
        self.num += 1
        text = f"task {task_id}: {error}"
        if self.num == 1:
            logger.error("%s; its rollout fails", text, exc_info=error)
        tasks = [task for task in self._recent if task is not None]
        num_recent = len(tasks)
        if num_recent > self._max:
            raise TooManyCrashesError(
                f"{num_recent} of the last {len(self._recent)} rollouts ended in a bug of their "
                f"tool, environment or grader, more than {self._max:g} "
                f"(limits.max_crashed_share of {WINDOW}, limits.strict), in {len(set(tasks))} "
                f"different tasks; mend it and go on with --resume; the last: {text}"
            ) from error
