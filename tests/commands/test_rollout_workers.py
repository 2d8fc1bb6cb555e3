"""Runs whose rollouts grow in separate processes end like others, through any loss of these
processes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

from agentenv.assembly.keys.cluster import SpreadCluster
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.exits import first_reason
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.config import load_config
from agentenv.base.errors import EXIT_INTERRUPTED, ConfigError, WorkerError
from agentenv.cluster.engines import Turns
from agentenv.processes import supervisor as local
from agentenv.processes.supervisor import NUMBER_VARIABLE
from agentenv.rollout.archive import steps_of
from agentenv.rollout.archive_reader import read_step
from agentenv.rollout.frames import Leased
from agentenv.training.loop.training import Training
from agentenv.training.start import make_training
from benchmarks.parts import chaos
from benchmarks.parts.mock_server import TOKEN_S, MockServer, Replayed
from tests.support import forks
from tests.support.polling import until
from tests.support.ports import held_ports
from tests.support.runs import rows_of
from tests.support.toy_rank import toy_ranks
from tests.support.warehouse import ROOT
from tests.test_cluster import grown

PROCESSES = ["cluster.kind=processes", "cluster.workers=2", "eval.sets={}", "queue.max_staleness=1"]
START_S = 90.0
SLOW = ["engine.latency_s=0.3", "train.num_steps=8"]


@pytest.fixture(autouse=True, scope="module")
def _light(warehouse: Path) -> Iterator[None]:
    """Nothing is learned and nothing drawn; workers find the environment."""
    with toy_ranks(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "start_process", start_worker)
        patch.setenv("PYTHONPATH", str(warehouse.parent))
        yield


@pytest.fixture(autouse=True)
def _no_worker_yet() -> None:
    _guards.clear()


def run(
    warehouse: Path,
    name: str,
    *overrides: str,
    during: Callable[[Training], Awaitable[None]] | None = None,
    resume: str = "",
    servers: Sequence[MockServer] = (),
) -> Path:
    """The directory of the run; `during` runs in parallel to it, on open `servers`."""
    config = load_config(TrainConfig, warehouse, [f"run.name=workers-{name}", *overrides])
    folder = RunDirectory(Path(config.run.dir) / config.run.name, resume=bool(resume))
    view = View()
    view.log_to(folder.path / "run.log")
    training = make_training(config, folder, view, resume=resume)

    async def main() -> None:
        for server in servers:
            await server.open()
        task = None if during is None else asyncio.ensure_future(during(training))
        try:
            await training.run_all()
        finally:
            if task is not None:
                task.cancel()
                (failed,) = await asyncio.gather(task, return_exceptions=True)
                if isinstance(failed, Exception):
                    raise failed
            for server in servers:
                await server.close()

    try:
        asyncio.run(main())
    finally:
        view.close()
        folder.close()
    return folder.path


_guards: dict[str, int] = {}  # the last one of each worker


async def start_worker(*command: str, env: Mapping[str, str], **others: Any) -> forks.Worker:
    started = await forks.start_worker(*command, env=env, **others)
    _guards[env[NUMBER_VARIABLE]] = started.pid
    return started


def workers() -> list[psutil.Process]:
    """Those of the run, below their guards, in the order of their numbers."""
    found = []
    for _, guard in sorted(_guards.items()):
        with suppress(psutil.Error):  # it has ended, or has not begun
            found += psutil.Process(guard).children()
    return found


def log_of(run: Path) -> str:
    return (run / "run.log").read_text()


def taken(run: Path) -> list[int]:
    """The places of the trees that steps took, in their order."""
    frames = chaos.Reader(run / "journal").read()
    return [tree for frame in frames if isinstance(frame, Leased) for tree in frame.trees]


def trees(run: Path, bound: int = 1) -> dict[int, Any]:
    """Task and branches of each tree that a step took, by its place; `bound` of the staleness."""
    found: dict[int, Any] = {}
    for path in steps_of(run / "trees").values():
        step = read_step(path)
        for kept in step.trees():
            tree = kept.tree
            oldest = min(tree.policy_version, tree.oldest_version())
            assert step.header.policy_version - oldest <= bound, "too stale"
            found[tree.index] = (tree.task.id, grown(tree))
    return found


def end() -> None:
    """As Ctrl-C does."""
    (main,) = [one for one in asyncio.all_tasks() if "run.<locals>.main" in repr(one)]
    main.cancel()


@pytest.fixture(scope="module")
def calm(warehouse: Path) -> Path:
    """A run in one process, and of as many steps."""
    return run(warehouse, "calm", "eval.sets={}", "queue.max_staleness=1", *SLOW)


def test_a_run_with_workers_has_the_trees_of_one_without(warehouse: Path, calm: Path) -> None:
    spread = run(warehouse, "spread", *PROCESSES, *SLOW)
    assert trees(spread) == trees(calm)
    rows = [row for row in rows_of(spread) if "workers/up" in row]
    assert [row["workers/up"] for row in rows] == [2] * 8
    ended = [rows[-1][f"workers/worker-{number}/ended"] for number in range(2)]
    assert min(ended) > 3
    assert not workers()


def test_a_killed_worker_costs_no_tree(warehouse: Path, calm: Path) -> None:
    killed: list[int] = []

    async def kill(training: Training) -> None:
        def has_trees() -> bool:
            group = training.loop.feeder.workers
            assert group is not None
            found = group.workers.values()
            return len(workers()) == 2 and sum(bool(one.trees) for one in found) == 2

        for number, step in enumerate([1, 3, 5]):
            await until(lambda step=step: training.state.step >= step and has_trees())
            victim = workers()[number % 2]
            killed.append(victim.pid)
            victim.kill()
        await until(lambda: training.state.step >= 8)
        end()  # not before, however long workers take to start

    with pytest.raises(asyncio.CancelledError):
        run(warehouse, "killed", *PROCESSES, *SLOW, "train.num_steps=10000", during=kill)
    found = warehouse.parent / "runs" / "workers-killed"
    assert len(killed) == 3
    assert taken(found)[: len(taken(calm))] == taken(calm)  # 0 lost, in the same order
    assert len(set(taken(found))) == len(taken(found))  # 0 duplicated
    both = trees(found)
    assert {index: both[index] for index in trees(calm)} == trees(calm)
    last = [row for row in rows_of(found) if "workers/up" in row][-1]
    lost = r"worker-\d is lost: it was killed by SIGKILL .*; trees [\d, ]+ resume"
    assert re.search(lost, log_of(found))
    assert last["workers/lost"] >= 2
    assert last["workers/trees_moved"] > 0


def test_a_run_that_loses_all_workers_ends_with_a_checkpoint_and_resumes(
    warehouse: Path, calm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def kill(training: Training) -> None:
        await until(lambda: training.state.step >= 2)
        while True:
            for one in workers():
                with suppress(psutil.NoSuchProcess):  # it has ended since
                    one.kill()
            await asyncio.sleep(0.05)

    monkeypatch.setattr(SpreadCluster, "max_restarts", 1)
    with pytest.raises(BaseExceptionGroup) as ended:
        run(warehouse, "none", *PROCESSES, *SLOW, during=kill)
    reason = first_reason(ended.value)
    assert isinstance(reason, WorkerError)
    assert "1 times in" in str(reason)
    found = run(warehouse, "none", *PROCESSES, *SLOW, resume="latest")
    assert trees(found) == trees(calm)


def test_a_configuration_error_of_a_worker_is_reported_before_the_run(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "")  # workers do not find the module of the environment
    with pytest.raises(ConfigError, match=r"worker-\d: env\.module: 'my_env'"):
        run(warehouse, "wrong", *PROCESSES)
    assert not workers()


# The policy over HTTP.

SIZE = replace(chaos.SHORT, num_servers=2, token_s=0.01)
SERVED = ["train.num_steps=6", "checkpoint.minutes=60", "eval.sets={}"]


@pytest.fixture(scope="module")
def replay_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[int]]]:
    """A configuration whose policy two servers recite, and their ports."""
    folder = tmp_path_factory.mktemp("recited")
    chaos.make_model(folder)
    with held_ports(SIZE.num_servers) as ports:
        chaos.write_workspace(folder, SIZE, ports)
        yield folder / chaos.CONFIG, ports


def run_served(
    replay_servers: tuple[Path, list[int]], name: str, *overrides: str, **others: Any
) -> Path:
    path, ports = replay_servers
    model, scale = path.parent / "model", SIZE.token_s / TOKEN_S
    recital = Replayed(model)
    servers = [MockServer("", port, recital, model, scale) for port in ports]
    return run(path, name, *SERVED, *overrides, servers=servers, **others)


def tasks(run: Path, bound: int) -> dict[int, str]:
    """The task of each tree that a step took, by its place."""
    return {index: task for index, (task, _) in trees(run, bound).items()}


def test_trees_of_a_killed_worker_continue_on_the_same_servers(
    replay_servers: tuple[Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers query the servers themselves: no token passes through the controller."""
    monkeypatch.delattr(Turns, "sample")

    async def kill(training: Training) -> None:
        await until(lambda: training.state.step >= 2)
        workers()[1].kill()

    calm = run_served(replay_servers, "calm")
    found = run_served(replay_servers, "killed", *PROCESSES[:2], during=kill)
    witness = chaos.Witness()
    witness.begin()
    for frame in chaos.Reader(found / "journal").read():
        witness.add(frame)
    assert witness.lost(sorted(tasks(calm, chaos.MAX_STALENESS))) == witness.duplicated() == []
    assert tasks(found, chaos.MAX_STALENESS) == tasks(calm, chaos.MAX_STALENESS)
    last = rows_of(found)[-1]
    assert last["engine/requests"] > 0
    assert last["engine/sampled_tokens"] > 0


# In a separate process: a run without anything to learn.
COMMAND = """
import sys
from agentenv.launchers import train
from tests.support.toy_rank import toy_ranks
from tests.support.warehouse import ROOT
with toy_ranks():
    sys.exit(train.main(sys.argv[1:]))
"""


@contextmanager
def command(warehouse: Path, name: str) -> Iterator[tuple[subprocess.Popen[bytes], set[int]]]:
    """The command of a run with workers, and its child processes."""
    keys = [*PROCESSES, *SLOW, "train.num_steps=1000", f"run.name={name}"]
    arguments = [sys.executable, "-c", COMMAND, str(warehouse), *keys]
    process = subprocess.Popen(arguments, cwd=ROOT, start_new_session=True)
    try:
        metrics = warehouse.parent / "runs" / name / "metrics.jsonl"
        end = time.monotonic() + START_S
        while not metrics.is_file() or not metrics.stat().st_size:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        yield process, {one.pid for one in psutil.Process(process.pid).children(recursive=True)}
    finally:
        process.kill()
        process.wait()


def are_gone(pids: set[int]) -> bool:
    end = time.monotonic() + START_S
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(map(psutil.pid_exists, pids))


def test_no_worker_outlives_its_controller(warehouse: Path) -> None:
    with command(warehouse, "orphans") as (process, below):
        assert len(below) >= 4  # two workers and their guards
        process.kill()
        process.wait()
        assert are_gone(below)


def test_a_second_ctrl_c_ends_workers_after_the_last_checkpoint(warehouse: Path) -> None:
    with command(warehouse, "twice") as (process, below):
        for _ in range(2):
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            time.sleep(0.2)
        assert process.wait(START_S) == EXIT_INTERRUPTED
        assert are_gone(below)
    run = warehouse.parent / "runs" / "twice"
    state = json.loads((sorted((run / "checkpoints").iterdir())[-1] / "state.json").read_text())
    assert state["step"] >= rows_of(run)[-1]["step"] - 1
