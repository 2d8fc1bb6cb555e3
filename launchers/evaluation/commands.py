"""What the commands over stored evaluations have in common: how they end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from agentenv.errors import AgentEnvError, ConfigError, DataError
from launchers.command import EXIT_BAD_INPUT, EXIT_FAILED, EXIT_INTERRUPTED, first_reason
from launchers.rundir import explain
from launchers.view import View


def run_command(work: Callable[[], Any], view: View) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    try:
        work()
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except OSError as error:
        view.fail(f"{error.filename or 'writing'}: {explain(error)}")
        return EXIT_FAILED
    except (AgentEnvError, ExceptionGroup) as error:
        reason = first_reason(error)
        if reason is None:
            raise
        view.fail(str(reason))
        return EXIT_BAD_INPUT if isinstance(reason, ConfigError | DataError) else EXIT_FAILED
    return 0
