"""An engine server that a test starts: its log, readiness, its end, also when pytest is killed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from launchers.serving.servers import GUARD

# PYTHONPATH of a server, so that its processes are forked
FORKING = os.pathsep.join(
    filter(
        None,
        (
            str(Path(__file__).resolve().parents[1] / "support" / "forking"),
            os.environ.get("PYTHONPATH"),
        ),
    )
)
GUARD_S = 10.0  # for the guard itself, beyond what it gives the server


class ServerProcess:
    """Runs `command` with a free port; it is up when `url + ready` answers within `start_s`. Its
    guard is our child and ends it with all its processes, however this process ends."""

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        environment: Mapping[str, str],
        *,
        ready: str,
        start_s: float,
        stop_s: float,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        self._ready, self._start_s, self._stop_s = ready, start_s, stop_s
        guard = [sys.executable, "-I", "-S", str(GUARD), str(stop_s)]
        with log.open("wb") as output:
            self._guard = subprocess.Popen(
                [*guard, "nice", *command, "--port", str(port)],
                cwd=log.parent,
                env={**os.environ, **environment},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Fails with the end of the log if it does not come up."""
        end = time.monotonic() + self._start_s
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
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(self._stop_s + GUARD_S)
        except subprocess.TimeoutExpired:
            left = self.processes()
            self._guard.kill()
            for process in left:
                process.kill()
            raise

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{self._ready}", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False
