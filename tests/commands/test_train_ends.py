"""Early ends of a training run: interruption and resume, and the death of a part."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.base.config import load_config
from agentenv.base.errors import ConfigError
from agentenv.base.installation import PACKAGES
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.contract.plan import Independent
from agentenv.launchers import train
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.algorithms.check import SIZE
from agentenv.learners.algorithms.losses import LossBatch
from agentenv.training import start
from tests.support.forks import TRAIN, Command, project
from tests.support.forkserver import Forked
from tests.support.runs import trees_of

pytestmark = pytest.mark.usefixtures("here")


@contextmanager
def started(warehouse: Path, name: str, *overrides: str) -> Iterator[tuple[Command, Path]]:
    """A run in a separate process whose first step is done."""
    command = (*TRAIN, str(warehouse), f"run.name={name}", *overrides)
    run = warehouse.parent / "runs" / name
    log = warehouse.parent / f"{name}.log"
    with Command(*command, log=log, path=[warehouse.parent]) as process:
        while not (run / "trajectories" / "step-000001.jsonl").exists():
            assert process.poll() is None, process.read_log()
            time.sleep(0.05)
        yield process, run


def test_ctrl_c_saves_a_checkpoint_that_resume_continues(warehouse: Path) -> None:
    endless = ("train.num_steps=100000", "engine.latency_s=0.05")
    with started(warehouse, "interrupted", *endless) as (process, run):
        learner = [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
        process.send_signal(signal.SIGINT)
        log = process.read_log()
    assert process.returncode == 130, log
    assert "--resume" in log
    assert "Traceback" not in log
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    steps = int(checkpoints[-1].name.removeprefix("step-"))
    assert steps >= 1
    assert not any(psutil.pid_exists(pid) for pid in learner)
    resumed = [str(warehouse), "run.name=interrupted", f"train.num_steps={steps + 1}", "--resume"]
    assert train.main(resumed) == 0
    assert trees_of(run, steps + 1) == [2 * steps, 2 * steps + 1]


def test_a_closed_terminal_does_not_harm_a_run(warehouse: Path) -> None:
    """The run ends with a checkpoint."""
    ours, theirs = os.openpty()
    command = (*TRAIN, str(warehouse), "run.name=no-terminal", "train.num_steps=8")
    folders = [str(warehouse.parent), str(PACKAGES)]
    process = Forked(
        project().fork(
            [*command, "engine.latency_s=0.05"],
            environment=os.environ | {"PYTHONPATH": os.pathsep.join(folders)},
            folder=PACKAGES,
            output=theirs,
        )
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    run = warehouse.parent / "runs" / "no-terminal"
    try:
        while not (run / "trajectories" / "step-000001.jsonl").exists():
            assert process.poll() is None
            with suppress(BlockingIOError):  # else its terminal would be full
                os.read(ours, 1 << 16)
            time.sleep(0.05)
        os.close(ours)
        process.send_signal(signal.SIGHUP)
        process.wait()
    finally:
        process.kill()
    assert process.returncode == 130
    log = (run / "run.log").read_text()
    assert "interrupted" in log
    assert "written: Input/output error" in log
    assert [*(run / "checkpoints").glob("step-*[0-9]")]
    assert "Traceback" not in log


def test_a_killed_learner_ends_the_run_with_the_reason(warehouse: Path) -> None:
    endless = ("train.num_steps=100000", "engine.latency_s=0.05")
    with started(warehouse, "killed-learner", *endless) as (process, _):
        children = psutil.Process(process.pid).children(recursive=True)
        victims = [child for child in children if "learners" in " ".join(child.cmdline())]
        assert victims
        victims[0].kill()
        log = process.read_log()
    assert process.returncode == 1
    assert "learner was killed" in log.replace("\n", " ")
    assert "Traceback" not in log


def test_a_killed_run_leaves_no_process_and_the_next_start_removes_its_files(
    warehouse: Path,
) -> None:
    endless = ("train.num_steps=100000", "engine.latency_s=0.05", "checkpoint.every=1")
    with started(warehouse, "kill-9", *endless) as (process, run):
        below = psutil.Process(process.pid).children(recursive=True)
        assert below
        held = map(os.path.realpath, Path(f"/proc/{process.pid}/fd").iterdir())
        own = {Path(path) for path in held if "agentenv-weights-" in path}
        process.kill()
        process.wait()
        _, there = psutil.wait_procs(below, timeout=600)
    assert not [one for one in there if one.status() != psutil.STATUS_ZOMBIE]
    assert len(own) == start.MEMORY.is_dir()
    steps = int(sorted((run / "checkpoints").glob("step-*[0-9]"))[-1].name[5:])
    resumed = [str(warehouse), "run.name=kill-9", f"train.num_steps={steps + 1}", "--resume"]
    assert train.main(resumed) == 0
    assert not any(folder.exists() for folder in own)


async def test_weights_of_a_killed_run_in_shared_memory_are_removed_first(
    warehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take the memory that the model is to be loaded into."""
    memory = tmp_path / "memory"
    left = memory / "agentenv-weights-left"
    (left / "v1").mkdir(parents=True)

    async def refuse(*_: Any, **__: Any) -> None:
        assert not left.exists()
        raise ConfigError("the first of the checks")

    monkeypatch.setattr(start, "MEMORY", memory)
    monkeypatch.setattr(start, "refuse", refuse)
    config = load_config(TrainConfig, warehouse, [])
    run = RunDirectory(tmp_path / "run", resume=False)
    async with AsyncExitStack() as stack:
        with pytest.raises(ConfigError, match="of the checks"):
            await start.build_parts(config, run, None, stack, lambda text: None)
    run.close()
    assert list(memory.iterdir()) == []


class Second(Independent):
    def on_leaf_end(self, tree: TrajectoryTree, leaf: Node) -> int:
        return {0: 0}[tree.index]


class Planned(GRPO, frozen=True, kw_only=True, tag="planned"):
    def plan(self, vocab_size: int) -> Independent:
        return Second(self.group_size)


class Lossy(GRPO, frozen=True, kw_only=True, tag="lossy"):
    def loss(self, batch: LossBatch, *given: Any) -> Any:
        return {SIZE: super().loss(batch, *given)}[len(batch.weight)]


@pytest.mark.parametrize("name", ["Planned", "Lossy"])
def test_a_bug_of_an_algorithm_is_one_line(
    warehouse: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    keys = [f"run.name={name}", f"algorithm.name={__name__}:{name}"]
    assert train.main([str(warehouse), *keys]) != 0
    line = rf"error: {__name__}:\w+\.(on_leaf_end|loss) raised KeyError: .* \(test_train_ends.py, "
    assert re.search(line, capsys.readouterr().err)
