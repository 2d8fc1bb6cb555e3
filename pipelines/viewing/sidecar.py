"""The viewer of a run that has just been started, in a process of its own beside it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentenv.guard import guarded
from agentenv.pipelines.viewing.api import TOKEN_VARIABLE, address_of
from agentenv.ports import hold_port, port_of

COMMAND = ("-m", "agentenv.launchers.view")
GRACE_S = 1.0
END_S = 5.0


@contextmanager
def viewed(run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """The run can be looked at inside; says where. The process ends with this one, however that
    comes about; when it fails, the run goes on without."""
    token = secrets.token_urlsafe(24)
    with hold_port() as held:
        command = [sys.executable, *COMMAND, str(run.resolve()), "--awaited"]
        process = subprocess.Popen(
            guarded([*command, "--port", str(port_of(held))], GRACE_S),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {TOKEN_VARIABLE: token},
            start_new_session=True,
        )
        say(f"to look at it: {address_of(port_of(held), token)}")
        try:
            yield
        finally:
            if process.stdin is not None:
                process.stdin.close()  # which ends it
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=END_S)
            say(f"to look at it again: agentenv view {run}")
