"""A real SGLang server on the CPU for tests, in the environment that `.ci/engine-sglang` makes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.engines.server_process import FORKING, ServerProcess

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"
STAMP = ROOT / ".venv-sglang" / ".complete"
ARGUMENTS = (
    "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1",
    "--disable-overlap-schedule", "--skip-server-warmup", "--enable-metrics",
    "--incremental-streaming-output",
    "--sleep-on-idle",  # else it takes a core all the time
    "--max-total-tokens", "8192", "--max-running-requests", "64",
    "--load-snapshot-publish-interval", "1",  # else its load figures lag by 15 steps
)  # fmt: skip
ENVIRONMENT = {
    "SGLANG_PLATFORM": "plaincpu",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": FORKING,
}
# imported before a server forks: all that one loads until its first request
MODULES = (
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.qwen3",
)


def require_sglang() -> None:
    """Skips the test where there is no environment for SGLang."""
    if not STAMP.is_file():
        pytest.skip("no SGLang here: make it with `sh .ci/engine-sglang` (3 GB)")


class SGLangProcess(ServerProcess):
    """A server of `model_path`, with its log in `log`."""

    modules, ready, stop_s = MODULES, "/v1/loads", 5.0
    start_s = 500.0  # mostly imports in four processes; 30 s on an idle machine

    def __init__(self, model_path: Path, log: Path, arguments: Sequence[str] = ()) -> None:
        command = [str(PYTHON), "-m", "sglang.launch_server", *ARGUMENTS]
        command += ["--model-path", str(model_path), *arguments]
        super().__init__(command, log, ENVIRONMENT)
