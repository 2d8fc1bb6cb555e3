"""A real SGLang server on the CPU for tests, in the environment that `.ci/engine-sglang` makes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
STAMP = ROOT / ".venv-sglang" / ".complete"
START_S = 400.0  # mostly imports in four processes; 30 s on an idle machine
STOP_S = 5.0
ARGUMENTS = (
    *("--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--enable-metrics"),
    *("--max-total-tokens", "8192", "--max-running-requests", "64"),
    *("--load-snapshot-publish-interval", "1"),  # else its load figures lag by 15 steps
)
ENVIRONMENT = {"SGLANG_PLATFORM": "plaincpu", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def require_sglang() -> None:
    """Skips the test where there is no environment for SGLang."""
    if not STAMP.is_file():
        pytest.skip("no SGLang here: make it with `sh .ci/engine-sglang` (3 GB)")


class SGLangProcess:
    """A server in a process group of its own, with its log in `log`."""

    def __init__(self, model_path: Path, log: Path, arguments: Sequence[str] = ()) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        command = ["nice", str(PYTHON), "-m", "sglang.launch_server", *ARGUMENTS]
        command += ["--port", str(port), "--model-path", str(model_path), *arguments]
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=log.parent,
                env=os.environ | ENVIRONMENT,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Fails with the end of the log if it does not come up."""
        end = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.kill()
                pytest.fail(f"SGLang did not come up:\n{self.log.read_text()[-4000:]}")
            time.sleep(0.2)

    def kill(self) -> None:
        """kill -9 of the whole group. Idempotent."""
        self._signal(signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """Ends it in a friendly way, and otherwise."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_S)
        self.kill()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/v1/loads", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False
