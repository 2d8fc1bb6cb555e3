"""A server limited by its CPU is named, and no other."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentenv.assembly.serving import watch
from agentenv.assembly.serving.watch import ProcessorWatch, gpu_use
from tests.support.sandboxes import until

SPIN = "while True: pass"
REST = "import time\ntime.sleep(1000)"
RUN = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
ENGINE = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {SPIN!r}])"


@pytest.fixture
def _driver(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An nvidia-smi that prints the parameter."""
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{request.param}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.fixture
def guard(request: pytest.FixtureRequest) -> Iterator[int]:
    """The pid of a process with one child, which runs the code."""
    process = subprocess.Popen([sys.executable, "-c", RUN, request.param])
    try:
        yield process.pid
    finally:
        for child in psutil.Process(process.pid).children(recursive=True):
            child.kill()
        process.kill()
        process.wait(10)


@pytest.mark.parametrize(
    ("guard", "_driver", "is_told"),
    [
        (SPIN, r"6\n10\n", True),
        (ENGINE, r"6\n10\n", True),
        (SPIN, r"80\n", False),
        (REST, r"6\n", False),
    ],
    indirect=["guard", "_driver"],
)
@pytest.mark.usefixtures("_driver")
async def test_a_busy_process_with_an_idle_gpu_is_reported_once(
    guard: int,
    is_told: bool,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    num_processes = 1 + (request.node.callspec.params["guard"] == ENGINE)
    children = psutil.Process(guard).children
    await until(lambda: len(children(recursive=True)) == num_processes)
    monkeypatch.setattr(watch, "BUSY", 0.2)  # of a machine that others use too
    looks = ProcessorWatch("vllm-0", lambda: guard, ["0", "1"])
    for _ in range(2 * watch.NUM_LOOKS):
        assert looks.look()
        await asyncio.sleep(0.1)
    assert len(caplog.messages) == is_told
    if is_told:
        assert "vllm-0 is CPU-bound" in caplog.text
        assert "its GPU 8 %" in caplog.text
        assert "servers_per_gpu" in caplog.text


async def test_without_a_driver_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert gpu_use(["0"]) is None
    await ProcessorWatch("vllm-0", lambda: 0, ["0"]).run()
