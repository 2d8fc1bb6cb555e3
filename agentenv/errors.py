"""Every failure has one vocabulary.

    AgentEnvError
    +-- ConfigError    a key of the configuration is wrong; refused before anything starts
    +-- DataError      a file, a dataset row or a model directory is wrong
    +-- ToolError      the tool call is at fault; its text is what the policy reads
    +-- InfraError     machinery of a tool or a grader is down; retried, never shown to the policy
    +-- EnvError       an environment could not go on; the leaf is marked failed
    |   +-- OutageError   what it needs was gone for longer than is waited for
    |   +-- CrashError    a tool, an environment or a grader has a bug; see agentenv/crashes.py
    +-- TooManyFailuresError   so many rollouts failed that the run ends
    +-- EngineError    an engine could not generate or load weights
    |   +-- EngineDeadError   no engine is left; the run ends with the reason
    +-- GraderError    a grader could not give a verdict
    +-- GivenUpError   a person has given the rollout up
    +-- LearnerError   the learner process failed or died
    +-- WorkerError    no rollout worker is left, or one cannot start; the run ends with the reason
    +-- StallError     a disk, or what else a thread waits for, gave no answer
    +-- ForeignError   what we did not write cannot be read; whoever asked for it raises another

What a user's tool, environment or grader raises beside these fails its rollout, as a CrashError.
Anything else that is not an AgentEnvError is a bug of the core: it stops the run with its
traceback.
"""

from typing import Any

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
    """What an environment needs stayed away for longer than it is waited for: trying the same step
    again would wait as long again, so the trajectory begins afresh."""


class CrashError(EnvError):
    """A tool, an environment or a grader raised or returned what it should not. Taking the step
    again would meet the bug again, so the trajectory fails at once. `said` is the text without the
    arguments of the call, equal for calls that meet the same bug; empty: the text is."""

    said = ""


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
    """What a thread waits for, a disk most often, gave no answer within a time that is far longer
    than it needs."""


class ForeignError(AgentEnvError):
    """What others wrote is not of the form that was asked for; see agentenv/untrusted.py."""
