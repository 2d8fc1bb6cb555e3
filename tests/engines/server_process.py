"""An engine server that a test starts: its log, readiness, its end, also when pytest is killed."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from agentenv.base.ports import hold_port, port_of
from agentenv.processes.guard import GUARD
from tests.support.forkserver import Forked, fork_server

# PYTHONPATH of a server, so that its processes are forked
_OURS = str(Path(__file__).resolve().parents[1] / "support" / "forking")
FORKING = os.pathsep.join(filter(None, (_OURS, os.environ.get("PYTHONPATH"))))
GUARD_S = 10.0  # for the guard itself, in addition to the grace of the server


class ServerProcess:
    """Runs `command`, a Python and its arguments, with a free port; it is up when `url + ready`
    answers within `start_s`. It is a fork of a process that has imported `modules`, one for all
    servers of a kind. Its guard ends it with all its processes, however this process ends."""

    modules: Sequence[str] = ()
    ready, start_s, stop_s = "/health", 600.0, 30.0

    def __init__(self, command: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
        self._held = hold_port()
        port = port_of(self._held)
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        end, life = os.pipe()
        self._life: int | None = life
        with log.open("wb") as output, os.fdopen(end) as stdin:
            self._guard = Forked(
                fork_server(command[0], self.modules, os.environ | environment).fork(
                    [*command[1:], "--port", str(port)],
                    environment=os.environ | environment,
                    folder=log.parent,
                    output=output.fileno(),
                    guard=(str(GUARD), str(self.stop_s)),
                    stdin=stdin.fileno(),
                )
            )

    def wait_ready(self) -> None:
        """Fails with the end of the log if it does not start."""
        end = time.monotonic() + self.start_s
        while not self._answers():
            if self._guard.poll() is not None or time.monotonic() > end:
                self.kill()
                pytest.fail(f"the server did not come up:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)

    def processes(self) -> list[psutil.Process]:
        """Those of the server, parents first; none when it has ended."""
        try:
            return psutil.Process(self._guard.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """kill -9 of all its processes. Idempotent."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.stop()

    def stop(self) -> None:
        """Ends it in a friendly way, and otherwise. Idempotent."""
        if self._life is not None:
            os.close(self._life)
            self._life = None
        try:
            self._guard.wait(self.stop_s + GUARD_S)
        except subprocess.TimeoutExpired:
            left = self.processes()
            self._guard.kill()
            for process in left:
                process.kill()
            raise
        finally:
            self._held.close()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{self.ready}", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False
