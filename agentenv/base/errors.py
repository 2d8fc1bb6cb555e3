"""The kinds of failure, one class each; further errors derive from these.

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
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from agentenv.base.secrets import SECRETS

SHOWN = {"shown": True}  # `extra` of a log warning that also appears on the terminal

# exit codes of the commands
EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130
EXIT_MISSING = 3  # of a dry run: no error, but something is missing


class AgentEnvError(Exception):
    """Base of all errors that this project raises on purpose; the text is for the user, without
    secrets. Lone surrogates, which quoted text may contain and files cannot, become "?"."""

    def __init__(self, *args: Any) -> None:
        clean = SECRETS.tree(args, only_known=True)
        super().__init__(
            *(x.encode("utf-8", "replace").decode() if isinstance(x, str) else x for x in clean)
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
    """An environment cannot continue; its leaf ends as failed, with `info`, and never counts as
    reward 0."""

    def __init__(self, text: str = "", info: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.info = info or {}


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
    """Too large a share of the rollouts failed; the run ends with the most frequent reasons."""


class EngineError(AgentEnvError):
    """An engine rejected a request, failed, or died. `is_final`: do not retry, since the request is
    invalid or its retries are exhausted."""

    is_final = False


class EngineDeadError(EngineError):
    """The engine is gone for good: no request can succeed any more, so the run ends."""

    is_final = True


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


ErrorT = TypeVar("ErrorT", bound="AgentEnvError")


def named(who: str, error: ErrorT) -> ErrorT:
    """A copy of the error with the failed part `who` before its text, unless the text has it."""
    found, text = copy.copy(error), str(error)
    found.args = (text if who in text else f"{who}: {text}",)
    return found


@contextmanager
def reported_as(
    kind: type[Exception], who: str, *caught: type[Exception], end: str = ""
) -> Iterator[None]:
    """Within the block, an error that is `caught` becomes one of this kind: "who: its text", or its
    text if `who` is empty, and `end`, such as the remedy."""
    try:
        yield
    except caught as error:
        raise kind(f"{f'{who}: ' if who else ''}{error}{end}") from error
