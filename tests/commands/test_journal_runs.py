"""A killed run resumes with its rollouts: nothing is sampled or trained twice."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TypeVar

import pytest

from agentenv.launchers import train
from agentenv.rollout.archive import steps_of
from agentenv.rollout.archive_reader import read_step
from agentenv.rollout.frames import Began, Finished, Frame, Leased, Trained
from benchmarks.parts.chaos import Reader
from tests.commands.test_train_ends import started
from tests.support.forks import Command
from tests.support.runs import rows_of

pytestmark = pytest.mark.usefixtures("here")

Kind = TypeVar("Kind")


def of(kind: type[Kind], found: list[Frame]) -> list[Kind]:
    return [frame for frame in found if isinstance(frame, kind)]


def weights(run: Path, step: int) -> bytes:
    return (run / "checkpoints" / f"step-{step:06d}" / "model.safetensors").read_bytes()


def read_and_killed(process: Command, journal: Reader, num_steps: int) -> list[Frame]:
    """The frames of a run until it has trained so many steps and is killed."""
    found: list[Frame] = []
    while len(of(Trained, found)) < num_steps:
        found += journal.read()
        assert process.poll() is None, process.read_log()
    process.kill()
    process.wait()
    return found + list(journal.read())


def test_after_kill_9_the_same_trees_make_the_same_weights(
    warehouse: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier checkpoints are removed except the first, as if they had been far apart. Both
    learners are processes of one thread, since the number of threads decides the last bit of
    sums."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    keys = ("train.num_steps=100000", "checkpoint.every=2", "checkpoint.keep_last=1000")
    with started(warehouse, "killed-9", *keys, "engine.latency_s=0.05") as (process, run):
        journal = Reader(run / "journal")
        before = read_and_killed(process, journal, 5)
    trained = of(Trained, before)
    num_steps = len(trained)
    there = {frame.tree for frame in of(Finished, before)}
    old = {step: weights(run, step) for step in (2, 4)}
    for path in sorted((run / "checkpoints").glob("step-*"))[1:]:
        shutil.rmtree(path)
    last = num_steps + 1
    goes_on = ("train.num_steps=100000", *keys[1:], "--resume")
    with started(warehouse, "killed-9", *goes_on) as (process, run):
        after = read_and_killed(process, journal, last)
    assert not there & {frame.tree for frame in of(Began, after)}, "none is rolled out again"
    again = [frame.trees for frame in of(Trained, after)][:num_steps]
    assert again == [frame.trees for frame in trained]
    leased = [index for frame in of(Leased, after) for index in frame.trees]
    assert leased == list(range(len(leased))), "each once, in start order"
    assert {step: weights(run, step) for step in (2, 4)} == old
    rows = {row["step"]: row for row in rows_of(run) if "score/value" in row}
    known = [there.issuperset(frame.trees) for frame in of(Leased, after)]
    for step, row in rows.items():
        if known[step - 1]:  # whose seconds were those of the process before
            assert row["score/accepted_tokens_per_s"] == 0.0, step
    assert any(known)
    files = steps_of(run / "trees")
    assert num_steps <= len(files)
    steps = [read_step(path) for path in files.values()]
    assert {step.header.incarnation for step in steps} == {2}, "of the weights that survive"
    kept = [entry.tree for step in steps for entry in step.entries]
    assert kept == list(range(len(kept))), "each tree once"


def test_a_run_resumed_from_an_older_checkpoint_restarts_its_trees(warehouse: Path) -> None:
    """Trees of discarded weights, some of which would otherwise be trained as new ones."""
    keys = ("train.num_steps=100000", "checkpoint.every=1", "checkpoint.keep_last=1000")
    with started(warehouse, "goes-back", *keys, "engine.latency_s=0.05") as (process, run):
        journal = Reader(run / "journal")
        before = read_and_killed(process, journal, 5)
    there = {frame.tree for frame in of(Finished, before) if frame.tree >= 4}  # 2 a step
    older = run / "checkpoints" / "step-000002"
    back = ("train.num_steps=100000", *keys[1:], "--resume", str(older))
    with started(warehouse, "goes-back", *back) as (process, run):
        after = read_and_killed(process, journal, 5)
    assert len(there) > 4
    assert there <= {frame.tree for frame in of(Began, after)}


def test_a_run_with_another_environment_restarts_its_trees(warehouse: Path) -> None:
    keys = ("train.num_steps=100000", "engine.latency_s=0.05")
    with started(warehouse, "changed", *keys) as (process, run):
        process.kill()
        process.wait()
    journal = Reader(run / "journal")
    assert {0, 1} <= {frame.tree for frame in of(Began, [*journal.read()])}
    resumed = [str(warehouse), "run.name=changed", "train.num_steps=1", "limits.max_turns=7"]
    assert train.main([*resumed, "--resume"]) == 0
    assert {0, 1} <= {frame.tree for frame in of(Began, [*journal.read()])}, "again"
