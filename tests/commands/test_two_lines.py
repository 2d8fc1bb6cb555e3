"""Two processes that resume one checkpoint, one after the other, train two lines of weights:
nothing of the first is used for the second. Whole runs under the virtual clock."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.types import SamplingParams
from agentenv.evaluation.store import identity, load_saved, read_rows
from agentenv.rollout.actor import Actor
from agentenv.training.loop.parts import Parts
from agentenv.training.loop.training import Training
from agentenv.training.reports.recorder import RunRecorder
from agentenv.training.start import make_training
from tests.support.toy_run import WEIGHTS, ToyEngine, ToyEnv, ToyWorld, toy_config
from tests.support.virtual_clock import run_virtual

KEYS = ("checkpoint.every=2", "eval.concurrency=1", "train.num_steps=4")
Moment = Callable[[Training], Awaitable[None]]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunRecorder, "draw", lambda self: [])


class World(ToyWorld):
    """With a separate engine for evaluations; it records the loaded weights."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluated: list[tuple[int, int]] = []  # as which policy version, and that of the files

    async def build(self, *arguments: Any) -> Parts:
        parts = await super().build(*arguments)
        engine, world = ToyEngine(self.faults), self

        async def load_weights(source: Path, policy_version: int) -> None:
            written = json.loads((source / WEIGHTS).read_text())[1]
            world.evaluated.append((policy_version, written))
            await ToyEngine.load_weights(engine, source, policy_version)

        engine.load_weights = load_weights  # type: ignore[method-assign]
        make: Any = lambda task: ToyEnv(self, task)  # noqa: E731
        limits, sampling = arguments[0].limits, SamplingParams(max_tokens=1)
        actor = Actor(engine, parts.actor.renderer, make, limits, sampling, "0/eval")
        return replace(parts, overlapping=actor)


def killed(run: Path, world: ToyWorld, moment: Moment, *overrides: str) -> Path:
    """The files of a process killed at a moment: a copy of the run. Resumes where another one
    was."""
    config = toy_config(run.parent, *KEYS, *overrides)
    resume = (run / "config.json").is_file()
    copy = run.with_name(f"{run.name}+")

    async def until() -> None:
        directory = RunDirectory(run, resume=resume)
        which = "latest" if resume else ""
        training = make_training(config, directory, View(), resume=which, build=world.build)
        main = asyncio.create_task(training.run_all())
        ends = asyncio.create_task(moment(training))  # type: ignore[arg-type]
        await asyncio.wait([main, ends], return_when=asyncio.FIRST_COMPLETED)
        if main.done():
            main.result()
        shutil.copytree(run, copy)
        ends.cancel()
        main.cancel()
        await asyncio.wait([main])
        directory.close()

    run_virtual(until())
    return copy


async def never(training: Training) -> None:
    await asyncio.get_running_loop().create_future()


def when(holds: Callable[[Training], bool]) -> Moment:
    async def moment(training: Training) -> None:
        while not holds(training):  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.1)

    return moment


def test_an_evaluation_of_lost_weights_is_not_continued(tmp_path: Path) -> None:
    """Both resume from step 2, and both evaluate their own step 4."""

    def in_evaluation(training: Training) -> bool:
        folder = training.run.path / "eval" / "step-000004.partial"
        return folder.is_dir() and len(read_rows(folder)) == 1

    first = killed(tmp_path / "run", ToyWorld(), when(lambda training: training.state.step == 3))
    second = killed(first, ToyWorld(), when(in_evaluation))
    begun = load_saved(second / "eval" / "step-000004.partial")
    third = killed(second, ToyWorld(), never)
    done = load_saved(third / "eval" / "step-000004")
    assert [saved.subject["incarnation"] for saved in (begun, done)] == [2, 3]
    assert identity(begun) != identity(done), "its rows are not kept"


def test_an_evaluation_in_parallel_to_training_has_the_weights_of_its_step(tmp_path: Path) -> None:
    """The checkpoint of step 2 records its evaluation, while the weights of step 3 are loaded."""
    world = World()
    keys = ("eval.sets.a.every=1", "eval.sets.a.phases=false")

    def evaluates_3(training: Training) -> bool:
        what = training.state.evaluating
        return what is not None and what.step == 3

    run = killed(tmp_path / "run", world, when(evaluates_3), *keys)
    state = json.loads((run / "checkpoints" / "step-000002" / "state.json").read_text())
    assert state["evaluating"]["step"] == state["step"] == 2
    assert (run / "evaluating").is_dir()
    copy = shutil.copytree(run, tmp_path / "copy" / "run")
    shutil.rmtree(copy / "eval" / "step-000002")  # as if it had been lost
    for folder, num in ((run, 2), (copy, 3)):
        world = World()
        killed(folder, world, never, *keys)
        assert len(world.evaluated) == num, "of steps 3 and 4, and of 2 where that is not done"
    assert all(version == written for version, written in world.evaluated)


def test_training_continues_during_an_evaluation_of_one_policy_version(tmp_path: Path) -> None:
    keys = ("eval.sets.a.every=2", "eval.sets.a.phases=false", "eval.sets.a.num_samples=9")
    best = ("checkpoint.best_metric=a/success", "checkpoint.keep_last=1")
    run = killed(tmp_path / "run", World(), never, *keys, *best, "train.num_steps=5")
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    order = [("eval" if "eval/a/success" in row else "step", row["step"]) for row in rows]
    assert order.index(("step", 3)) < order.index(("eval", 2))
    assert sorted(step for kind, step in order if kind == "eval") == [2, 4]
    versions = {row["step"]: row["policy_version"] for row in rows if "phase" not in row}
    evaluated = [row for row in rows if "eval/a/success" in row]
    for row in evaluated:
        folder, version = run / "eval" / row["phase"], versions[row["step"]]
        assert {tuple(one.policy_versions) for one in read_rows(folder)} == {(version, version)}
        assert load_saved(folder).subject["policy_version"] == row["policy_version"] == version
    first = max(evaluated, key=lambda row: (row["eval/a/success"], -row["step"]))
    kept = json.loads((run / "checkpoints" / "best" / "state.json").read_text())
    assert kept["step"] == first["step"]
    assert not (run / "evaluating").exists()


def evaluated_phases(run: Path) -> list[str]:
    """The evaluations with rows of metrics."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["phase"] for row in rows if "eval/a/success" in row]


def test_a_finished_evaluation_stays_reported_after_resuming_an_older_checkpoint(
    tmp_path: Path,
) -> None:
    """The checkpoint of step 3 records the evaluation of step 2 as in progress, although it has
    ended."""
    keys = ("eval.sets.a.every=2", "eval.sets.a.phases=false", "eval.sets.a.num_samples=5")
    keys = (*keys, "checkpoint.every=1", "checkpoint.keep_last=1", "eval.concurrency=1")

    def has_ended(training: Training) -> bool:
        folder = training.run.path
        saved = folder / "checkpoints" / "step-000003" / "state.json"
        if training.state.step < 3 or not saved.is_file():
            return False
        is_known = json.loads(saved.read_text())["evaluating"] is not None
        return is_known and training.state.evaluating is None

    best = "checkpoint.best_metric=a/success"
    run = killed(tmp_path / "run", World(), when(has_ended), *keys, best)
    state = json.loads((run / "checkpoints" / "step-000003" / "state.json").read_text())
    assert state["evaluating"]["step"] == 2
    assert evaluated_phases(run) == ["step-000002"]
    shutil.rmtree(run / "checkpoints" / "step-000002", ignore_errors=True)  # as if pruned since
    done = killed(run, World(), never, *keys, best)
    assert evaluated_phases(done) == ["step-000002", "step-000004"]
    kept = json.loads((done / "checkpoints" / "best" / "state.json").read_text())
    assert kept["step"] in (2, 4)


def test_an_evaluation_whose_weights_are_missing_is_a_reported_gap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ("eval.sets.a.every=2", "eval.sets.a.phases=false", "checkpoint.every=1")

    def knows_of_2(training: Training) -> bool:
        saved = training.run.path / "checkpoints" / "step-000003" / "state.json"
        return saved.is_file() and training.state.evaluating is not None

    run = killed(tmp_path / "run", World(), when(knows_of_2), *keys, "eval.sets.a.num_samples=40")
    shutil.rmtree(run / "evaluating")
    done = killed(run, World(), never, *keys, "eval.sets.a.num_samples=40")
    assert "the evaluation step-000002" in caplog.text
    assert evaluated_phases(done) == ["step-000004"]
    last = json.loads((done / "checkpoints" / "step-000004" / "state.json").read_text())
    assert last["evaluating"] is None
