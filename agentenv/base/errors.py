"""The errors of the project, one class per kind of failure.

    AgentEnvError
    +-- ConfigError    a key of the configuration is wrong; refused before anything starts
    |   +-- MissingError   a required package is not installed
    +-- DataError      a file, a dataset row or a model directory is wrong
    +-- ToolError      the tool call is at fault; its text is what the policy reads
    +-- InfraError     infrastructure of a tool or a grader is down; retried, hidden from the policy
    +-- EnvError       an environment could not continue; the leaf is marked failed
    |   +-- OutageError   an outage lasted longer than its deadline
    |   +-- CrashError    a tool, an environment or a grader has a bug (`guarded`)
    +-- TooManyFailuresError   so many rollouts failed that the run ends
    +-- EngineError    an engine could not generate or load weights
    |   +-- EngineDeadError   no engine is left; the run ends with the reason
    +-- GraderError    a grader could not grade the episode
    +-- CancelledRolloutError   a person cancelled the rollout
    +-- LearnerError   the learner process failed or died
    +-- WorkerError    no rollout worker is left, or one cannot start; the run ends with the reason
    +-- StallError     a blocking call, such as a disk access, did not return in time
    +-- ForeignError   untrusted input that cannot be decoded; its reader raises another error

Any other exception of a user's tool, environment or grader fails its rollout, as a CrashError. Any
other exception of the core is a bug of this project: it ends the run with its traceback.

    await guarded(env.step(action), "the environment's step")   converts exceptions to CrashError
    install_hint("train")        the command that adds an extra to this installation
"""

from __future__ import annotations

import asyncio
import copy
import json
import shlex
import sys
import tomllib
import traceback
from collections.abc import Awaitable, Callable, Iterator
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

SHOWN = {"shown": True}  # `extra` of a log warning that also appears on the terminal


class AgentEnvError(Exception):
    """Base of all errors that this project raises on purpose; the text is for the user. Lone
    surrogates, which quoted text may contain and files cannot, become "?"."""

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
    """A required package is not installed; the text has the command that installs it. A dry run,
    which may be for another machine, lists it and continues."""


class DataError(AgentEnvError):
    """A dataset, a row of it, or a model directory cannot be used; the text names file and row."""


class ToolError(AgentEnvError):
    """The call itself is wrong (bad arguments, code that raises); the policy reads the text, and
    `info` holds facts for the record of the call."""

    def __init__(self, text: str = "", info: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.info = info or {}


class InfraError(AgentEnvError):
    """The tool's infrastructure failed (time-out, connection, dead worker). The call is retried,
    and the policy is not informed. `retry_after_s`: the delay that the server requests, or 0."""

    def __init__(self, text: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class EnvError(AgentEnvError):
    """An environment cannot continue; its leaf ends as failed and never counts as reward 0."""


class OutageError(EnvError):
    """An outage of a service that an environment needs lasted beyond its deadline. A retry of the
    same step would wait as long again, so the trajectory restarts instead."""


class CrashError(EnvError):
    """A tool, an environment or a grader raised an unexpected exception or returned an invalid
    result. A retry would meet the same bug, so the trajectory fails at once. `summary` is the text
    without the arguments of the call, equal for calls with the same bug; empty: use the text.
    `place` is the location in the user's code, if there is no traceback."""

    summary = ""
    place = ""


class TooManyFailuresError(AgentEnvError):
    """Too large a share of the rollouts failed; the run ends with the most frequent reasons.
    `is_of_engine`: all of them are those of an engine."""

    is_of_engine = False


class EngineError(AgentEnvError):
    """An engine rejected a request, failed, or died. `is_final`: do not retry, since the request is
    invalid or its retries are exhausted."""

    is_final = False


class EngineDeadError(EngineError):
    """The engine is gone for good: no request can succeed any more, so the run ends."""


class GraderError(AgentEnvError):
    """A grader could not grade the episode; the leaf ends as failed."""


class CancelledRolloutError(AgentEnvError):
    """A person cancelled the rollout; its tree is excluded from training, even if some of its
    trajectories ended well."""


class LearnerError(AgentEnvError):
    """The learner reported a failure or its process is gone."""


class WorkerError(AgentEnvError):
    """A rollout worker does not start, or no worker is left."""


class StallError(AgentEnvError):
    """A blocking call of a thread, usually on a disk, did not finish within a generous time."""


class ForeignError(AgentEnvError):
    """Untrusted input does not have the expected form; see agentenv/base/untrusted.py."""


PACKAGES = Path(__file__).resolve().parents[2]  # a clone, or the folder of installed packages
CLONE = PACKAGES / "pyproject.toml"  # only a clone has it
DISTRIBUTION = "agentenv-rl"
TRAIN = ("torch", "transformers", "deepspeed", "safetensors", "tokenizers", "matplotlib")


def package_folders() -> dict[str, Path]:
    """The folders that hold this project's packages: one, or in a clone one per top folder."""
    if not CLONE.is_file():
        return {"agentenv": PACKAGES / "agentenv"}
    tool = tomllib.loads(CLONE.read_text(encoding="utf-8"))["tool"]["setuptools"]
    return {name: PACKAGES / folder for name, folder in tool["package-dir"].items()}


def install_hint(extra: str) -> str:
    """The command that adds an extra of pyproject.toml to this installation."""
    if CLONE.is_file():
        place = "." if Path.cwd() == PACKAGES else str(PACKAGES)
        return f"pip install -e {shlex.quote(f'{place}[{extra}]')}"
    origin = _origin()
    return f"pip install '{DISTRIBUTION}[{extra}]{origin and f' @ {origin}'}'"


def _origin() -> str:
    """The URL that pip installed this package from; empty: an index, or unknown."""
    try:
        text = metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
        found = json.loads(text or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        return ""
    url, vcs = str(found.get("url", "")), found.get("vcs_info")
    return f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url


def needed(module: str, extra: str, what: str, *, package: str = "") -> Any:
    """Import a module of an extra. Raises MissingError with the part that needs it (`what`), and
    the install command."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingError(
            f"{what} requires the package {package or module!r} ({error}); install it with: "
            f"{install_hint(extra)}"
        ) from error


def require_train(*modules: str) -> None:
    """Raises MissingError if one of these modules of the extra `train` is missing; imports none."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise MissingError(needs_train(", ".join(missing)))


def needs_train(missing: str) -> str:
    """The error for a missing module of the extra `train`."""
    return f"this requires {missing}, which is not installed: {install_hint('train')}"


T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound="AgentEnvError")

MAX_SHOWN = 500  # characters of a description of a call and its arguments


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
    summary = f"raised {type(error).__name__}: {error}{place_of(error)}"
    crash = CrashError(f"{text} {summary}")
    crash.summary = f"{text.partition(', called with')[0]} {summary}"
    return crash


def named(who: str, error: ErrorT) -> ErrorT:
    """A copy of the error with the failed part `who` before its text, unless the text has it."""
    found, text = copy.copy(error), str(error)
    found.args = (text if who in text else f"{who}: {text}",)
    return found


async def at_start(work: Awaitable[T], what: str) -> T:
    """As `guarded`, before a run starts, when a bug must be fixed first: raises ConfigError."""
    try:
        return await guarded(work, what)
    except CrashError as error:
        raise ConfigError(str(error)) from error


def not_a_text(name: str, found: Any, function: Any) -> CrashError:
    """The error of a tool whose function or method did not return a text."""
    code = getattr(function, "__code__", None)
    place = f"{Path(code.co_filename).name}, line {code.co_firstlineno}" if code else ""
    kind = "None" if found is None else f"a value of type {type(found).__name__}"
    crash = CrashError(
        f"the tool {name!r}{place and f' ({place})'} returned {kind}; expected the text for the "
        "policy (str, or json.dumps), or a ToolResult"
    )
    crash.place = place
    return crash


OURS = "agentenv"  # the package whose lines do not locate a user's bug, except in these parts
NAMED = ("agentenv.envs.", "agentenv.learners.", "agentenv.reference.")


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
