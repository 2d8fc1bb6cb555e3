"""Environments that compute run in separate processes, with the same results."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentenv.assembly.parts import env_processes
from agentenv.evaluation.store import read_rows
from agentenv.processes import supervisor as local
from agentenv.training.loop.training import Training
from tests.commands.evaluating import runner
from tests.commands.test_rollout_workers import log_of, run, start_worker, taken, trees, until
from tests.commands.test_rollout_workers import workers as processes
from tests.support.runs import rows_of
from tests.support.toy_rank import toy_ranks

# The README's environment, whose tool also computes, where it must not be.
MODULE = """
import os
import time
import agentenv
from agentenv.contract.env import shared
from my_env import WarehouseEnv

HERE = {here}

class Pids:
    def __init__(self):
        self.num = 0
    def stats(self):
        return {{f"computing/{{os.getpid()}}": self.num}}

class Computing(WarehouseEnv):
    async def step(self, action):
        if HERE is not None and os.getpid() == HERE:
            raise RuntimeError("an environment steps in the controller's process")
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
        shared("computing", Pids).num += 1
        return await super().step(action)

agentenv.register("me/Computing-v0", "computing_env:Computing")
"""
COMPUTING = ["env.id=me/Computing-v0", "env.module=computing_env", "env.workers=2"]
PLAIN = ["eval.sets={}", "queue.max_staleness=1", "train.num_steps=4"]


@pytest.fixture(autouse=True, scope="module")
def _light(warehouse: Path) -> Iterator[None]:
    (warehouse.parent / "computing_env.py").write_text(MODULE.format(here=psutil.Process().pid))
    with toy_ranks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "start_process", start_worker)
        patch.setenv("PYTHONPATH", str(warehouse.parent))
        yield


@pytest.fixture(scope="module")
def calm(warehouse: Path) -> Path:
    return run(warehouse, "envs-calm", *PLAIN)


def test_remote_environments_yield_the_trees_of_local_ones(warehouse: Path, calm: Path) -> None:
    found = run(warehouse, "envs-there", *PLAIN, *COMPUTING)
    assert taken(found) == taken(calm)
    assert trees(found) == trees(calm)
    counted = [value for key, value in rows_of(found)[-1].items() if "env/computing/" in key]
    assert len(counted) == 2
    assert min(counted) > 10
    assert not processes()


def test_killed_environment_processes_cost_no_trajectory(warehouse: Path, calm: Path) -> None:
    killed = []

    async def kill(training: Training) -> None:
        for step in (1, 2):
            await until(lambda step=step: training.state.step >= step and len(processes()) == 2)
            killed.append(processes()[step % 2])
            killed[-1].kill()

    found = run(warehouse, "envs-killed", *PLAIN, *COMPUTING, during=kill)
    assert len(killed) == 2
    assert trees(found) == trees(calm)
    assert re.search(r"env-worker-1 .*SIGKILL", log_of(found))


def test_an_evaluation_runs_its_environments_in_processes_too(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = runner(warehouse, tmp_path)
    assert evaluated("here") == 0
    capsys.readouterr()
    model = sorted((warehouse.parent / "model").iterdir())
    keys = ["--env", "me/Computing-v0", "env.module=computing_env", "env.workers=2"]
    assert evaluated("there", *keys) == 0
    said = capsys.readouterr().out
    assert re.search(r"environments: computing/\d+ \d+, computing/\d+ \d+", said)
    here, there = [answers(tmp_path / name) for name in ("here", "there")]
    assert here == there
    assert sorted((warehouse.parent / "model").iterdir()) == model  # the subject is only read
    assert not processes()


def answers(out: Path) -> dict[str, str]:
    return {row.task: row.prediction for row in read_rows(out)}


def test_an_endless_environment_is_killed_and_its_rollout_crashes(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If it is the only environment of its process; the run continues."""
    flag = warehouse.parent / "endless"
    endless = f"if not os.path.exists({str(flag)!r}):\n            open({str(flag)!r}, 'x')"
    endless += "\n            while True:\n                pass\n        end = "
    module = MODULE.format(here="None").replace("end = ", endless, 1)
    module = module.replace("me/Computing", "me/Endless").replace("computing_env", "endless_env")
    (warehouse.parent / "endless_env.py").write_text(module)
    keys = ["env.id=me/Endless-v0", "env.module=endless_env", "env.workers=1"]
    keys += ["limits.env_timeout_s=5"]
    limits = ["limits.max_failed_share=1", "algorithm.group_size=2"]
    monkeypatch.setattr(env_processes, "HELD_S", 5.0)
    found = run(warehouse, "envs-endless", *PLAIN, *keys, *limits)
    assert "heartbeat for 5" in log_of(found)
    assert len(rows_of(found)) >= 4
