"""The errors of the project, one class per kind of failure.

    AgentEnvError
    +-- ConfigError    a key of the configuration is wrong; refused before anything starts
    |   +-- MissingError   a package that the chosen parts need is not installed here
    +-- DataError      a file, a dataset row or a model directory is wrong
    +-- ToolError      the tool call is at fault; its text is what the policy reads
    +-- InfraError     machinery of a tool or a grader is down; retried, never shown to the policy
    +-- EnvError       an environment could not go on; the leaf is marked failed
    |   +-- OutageError   what it needs was gone for longer than is waited for
    |   +-- CrashError    a tool, an environment or a grader has a bug (`guarded`)
    +-- TooManyFailuresError   so many rollouts failed that the run ends
    +-- EngineError    an engine could not generate or load weights
    |   +-- EngineDeadError   no engine is left; the run ends with the reason
    +-- GraderError    a grader could not give a verdict
    +-- GivenUpError   a person has given the rollout up
    +-- LearnerError   the learner process failed or died
    +-- WorkerError    no rollout worker is left, or one cannot start; the run ends with the reason
    +-- StallError     a disk, or what else a thread waits for, gave no answer
    +-- ForeignError   untrusted input that cannot be decoded; its reader raises another error

What a user's tool, environment or grader raises beside these fails its rollout, as a CrashError.
Anything else that is not an AgentEnvError is a bug of the core: it stops the run with its
traceback.

    await guarded(env.step(action), "the environment's step")   a CrashError says what it raised
    install_hint("train")        how to add an extra to this installation: no index has the package
"""

from __future__ import annotations

import asyncio
import copy
import json
import shlex
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

SHOWN = {"shown": True}  # `extra` of a warning in the log that people are to see at once


class AgentEnvError(Exception):
    """Base of all errors this project raises on purpose; the text is meant for the user. It may
    quote what others wrote, so halves of characters, which no file takes, become "?"."""

    def __init__(self, *args: Any) -> None:
        super().__init__(
            *(
                one.encode("utf-8", "replace").decode() if isinstance(one, str) else one
                for one in args
            )
        )


class ConfigError(AgentEnvError):
    """A configuration key is unknown, ill-typed, out of range, or not read by the chosen parts."""


class MissingError(ConfigError):
    """A package that the chosen parts need is not installed here; the text has the command that
    installs it. A dry run, which may be one for another machine, lists it and goes on."""


class DataError(AgentEnvError):
    """A dataset, a row of it, or a model directory cannot be used; the text names file and row."""


class ToolError(AgentEnvError):
    """The call itself is wrong (bad arguments, code that raises); the policy reads the text, and
    `info` holds facts for the record of the call."""

    def __init__(self, text: str = "", info: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.info = info or {}


class InfraError(AgentEnvError):
    """The tool's machinery failed (time-out, connection, worker died); retried, never shown.
    `retry_after_s`: for how long it asks not to be called again, 0 where it does not say."""

    def __init__(self, text: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class EnvError(AgentEnvError):
    """An environment cannot go on; its leaf ends as failed and never counts as reward 0."""


class OutageError(EnvError):
    """An outage of a service that an environment needs lasted beyond its deadline: another try of
    the same step would wait as long again, so the trajectory begins afresh."""


class CrashError(EnvError):
    """A tool, an environment or a grader raised or returned what it should not. Taking the step
    again would meet the bug again, so the trajectory fails at once. `said` is the text without the
    arguments of the call, equal for calls that meet the same bug; empty: the text is. `place` is
    that of the user's code, if no traceback leads there."""

    said = ""
    place = ""


class TooManyFailuresError(AgentEnvError):
    """Too large a share of the rollouts failed; the run ends with the most frequent reasons.
    `is_of_engine`: all of them are those of an engine."""

    is_of_engine = False


class EngineError(AgentEnvError):
    """An engine refused a request, failed, or died. `is_final`: asking again would not help, since
    the request is refused as such or has been sent as often as it may."""

    is_final = False


class EngineDeadError(EngineError):
    """The engine is gone for good: no request can succeed any more, so the run ends."""


class GraderError(AgentEnvError):
    """A grader could not reach a verdict; the leaf ends as failed."""


class GivenUpError(AgentEnvError):
    """A person has given the rollout up; its tree is in no group, whatever else ended well."""


class LearnerError(AgentEnvError):
    """The learner reported a failure or its process is gone."""


class WorkerError(AgentEnvError):
    """A rollout worker does not start, or none is left that grows trees."""


class StallError(AgentEnvError):
    """A blocking call of a thread, usually on a disk, did not finish within a generous time."""


class ForeignError(AgentEnvError):
    """Untrusted input does not have the expected form; see agentenv/untrusted.py."""


PACKAGES = Path(__file__).resolve().parent.parent  # a clone, or the folder of installed packages
DISTRIBUTION = "agentenv-rl"
TRAIN = ("torch", "transformers", "deepspeed", "safetensors", "tokenizers", "matplotlib")


def install_hint(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to this installation."""
    if (PACKAGES / "pyproject.toml").is_file():
        place = "." if Path.cwd() == PACKAGES else str(PACKAGES)
        return f"pip install -e {shlex.quote(f'{place}[{extra}]')}"
    origin = _origin()
    return f"pip install '{DISTRIBUTION}[{extra}]{origin and f' @ {origin}'}'"


def _origin() -> str:
    """The address that pip installed this package from; empty: an index, or unknown."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        found = json.loads(text or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    url, vcs = str(found.get("url", "")), found.get("vcs_info")
    return f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url


def require_train(*modules: str) -> None:
    """Raises MissingError if one of these modules of the extra `train` is missing; loads none."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingError(needs_train(", ".join(missing)))


def needs_train(missing: str) -> str:
    """The error for a missing module of the extra `train`."""
    return f"this requires {missing}, which is not installed: {install_hint('train')}"


T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound="AgentEnvError")

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


def named(who: str, error: ErrorT) -> ErrorT:
    """A copy of the error whose text begins with the part that failed, unless it names it."""
    found, text = copy.copy(error), str(error)
    found.args = (text if who in text else f"{who}: {text}",)
    return found


async def at_start(work: Awaitable[T], what: str) -> T:
    """Like `guarded`, before a run starts: a bug is then a mistake to mend first. Raises
    ConfigError."""
    try:
        return await guarded(work, what)
    except CrashError as error:
        raise ConfigError(str(error)) from error


def not_a_text(name: str, found: Any, function: Any) -> CrashError:
    """The error of a tool whose function or method returned something else than a text."""
    code = getattr(function, "__code__", None)
    place = f"{Path(code.co_filename).name}, line {code.co_firstlineno}" if code else ""
    kind = "None" if found is None else f"a value of type {type(found).__name__}"
    crash = CrashError(
        f"the tool {name!r}{place and f' ({place})'} returned {kind}; expected the text for the "
        "policy (str, or json.dumps), or a ToolResult"
    )
    crash.place = place
    return crash


OURS = "agentenv"  # the package whose lines say nothing about a bug of a user, but for these parts
NAMED = ("agentenv.envs.", "agentenv.learners.", "agentenv.reference.")


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
        if isinstance(cause, CrashError) and cause.place:
            return cause.place
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
