"""How every command ends: its exit code, and what the user is told."""

from __future__ import annotations

from collections.abc import Callable

from agentenv.errors import AgentEnvError, ConfigError, DataError
from launchers.rundir import explain
from launchers.view import View

EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED = 1, 2, 130


def to_its_end(
    work: Callable[[], int | None], view: View, *, writing: str, interrupted: str = ""
) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted.

    `writing` is said of a failure of files that names none, `interrupted` after Ctrl-C. Whatever
    has no reason for the user is a bug and is raised.
    """
    try:
        return work() or 0
    except KeyboardInterrupt:
        view.end()
        if interrupted:
            view.say(interrupted)
        return EXIT_INTERRUPTED
    except OSError as error:
        view.fail(f"{error.filename or writing}: {explain(error)}")
        return EXIT_FAILED
    except (AgentEnvError, ExceptionGroup) as error:
        reason = first_reason(error)
        if reason is None:
            raise
        view.fail(str(reason))
        return EXIT_BAD_INPUT if isinstance(reason, ConfigError | DataError) else EXIT_FAILED
    finally:
        view.close()


def first_reason(error: BaseException) -> AgentEnvError | OSError | None:
    """The first failure with a reason for the user; None if there is a bug among the errors."""
    if not isinstance(error, BaseExceptionGroup):
        return error if isinstance(error, AgentEnvError | OSError) else None
    reasons = [first_reason(part) for part in error.exceptions]
    return None if None in reasons else reasons[0]
