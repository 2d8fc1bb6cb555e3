"""An engine server that a test starts: a process group of its own, its log, readiness, its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest


class ServerProcess:
    """Runs `command` with a free port; it is up when `url + ready` answers within `start_s`."""

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
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                ["nice", *command, "--port", str(port)],
                cwd=log.parent,
                env={**os.environ, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Fails with the end of the log if it does not come up."""
        end = time.monotonic() + self._start_s
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                pytest.fail(f"the server did not come up:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)

    def kill(self) -> None:
        """kill -9 of the whole group. Idempotent."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ends it in a friendly way, and otherwise."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(self._stop_s)
        self.kill()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}{self._ready}", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False
