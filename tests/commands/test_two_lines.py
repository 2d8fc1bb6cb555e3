"""Two processes that resume one checkpoint, one after the other, train two lines of weights:
nothing of the first is used for the second. Whole runs under the virtual clock."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.evaluation.store import identity, load_saved, read_rows
from agentenv.training.loop.training import Training
from agentenv.training.reports.recorder import RunRecorder
from agentenv.training.start import make_training
from tests.support.toy_run import ToyWorld, toy_config
from tests.support.virtual_clock import run_virtual

KEYS = ("checkpoint.every=2", "eval.concurrency=1", "train.num_steps=4")
Moment = Callable[[Training], Awaitable[None]]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunRecorder, "draw", lambda self: [])


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
