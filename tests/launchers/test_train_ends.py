"""How a training run ends before its time: interruption, and goes on; death of a part."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentenv.engines.scripted import ScriptedEngine
from agentenv.errors import EngineDeadError, EnvError
from agentenv.tool_env import ToolEnv
from launchers import train
from tests.support.runs import trees_of
from tests.support.warehouse import ROOT

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("here")]


@contextmanager
def started(
    warehouse: Path, name: str, *overrides: str
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run in a process of its own whose first step is done."""
    environment = {**os.environ, "PYTHONPATH": f"{warehouse.parent}:{ROOT}"}
    process = subprocess.Popen(
        [sys.executable, "launchers/train.py", str(warehouse), f"run.name={name}", *overrides],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    run = warehouse.parent / "runs" / name
    try:
        while not (run / "trajectories" / "step-000001.jsonl").exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        yield process, run
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_ctrl_c_stops_with_a_checkpoint_and_resume_goes_on(warehouse: Path) -> None:
    endless = ("train.num_steps=100000", "engine.latency_s=0.05")
    with started(warehouse, "interrupted", *endless) as (process, run):
        learner = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130, err
    assert "--resume" in out
    assert "Traceback" not in err
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    steps = int(checkpoints[-1].name.removeprefix("step-"))
    assert steps >= 1
    assert not any(psutil.pid_exists(pid) for pid in learner)
    resumed = [str(warehouse), "run.name=interrupted", f"train.num_steps={steps + 1}", "--resume"]
    assert train.main(resumed) == 0
    assert trees_of(run, steps + 1) == [2 * steps, 2 * steps + 1]


@pytest.mark.slow
def test_a_killed_learner_ends_the_run_with_the_reason(warehouse: Path) -> None:
    endless = ("train.num_steps=100000", "engine.latency_s=0.05")
    with started(warehouse, "killed", *endless) as (process, _):
        children = psutil.Process(process.pid).children(recursive=True)
        victims = [child for child in children if "learners" in " ".join(child.cmdline())]
        assert victims
        victims[0].kill()
        _, err = process.communicate()
    assert process.returncode == 1
    assert "the learner was killed by SIGKILL" in err.replace("\n", " ")
    assert "Traceback (most recent call last)" not in err


def test_a_dead_engine_ends_the_run_with_the_reason(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    generate = ScriptedEngine.generate

    async def dying(self: ScriptedEngine, *args: Any, **kwargs: Any) -> Any:
        if self.stats()["requests"] >= 20:
            raise EngineDeadError("the engine thread died: out of memory")
        return await generate(self, *args, **kwargs)

    monkeypatch.setattr(ScriptedEngine, "generate", dying)
    assert train.main([str(warehouse), "run.name=dead-engine"]) == 1
    assert "the engine thread died: out of memory" in capsys.readouterr().err


@pytest.mark.slow
def test_a_step_without_any_trajectory_ends_the_run(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def broken(*_: Any) -> Any:
        raise EnvError("the index is gone")

    monkeypatch.setattr(ToolEnv, "step", broken)
    assert train.main([str(warehouse), "run.name=broken-env"]) == 1
    assert "EnvError: the index is gone" in capsys.readouterr().err
