"""A whole run under the virtual clock: real parts but for a rank that computes nothing. The same
seed makes the same trees to the bit, and hours of tools cost a second."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.config import load_config
from agentenv.base.types import ToolResult
from agentenv.contract.function_tool import FunctionTool
from agentenv.rollout.frames import (
    DECODER,
    Began,
    Finished,
    Frame,
    Grown,
    Started,
    Trained,
    framed,
    frames_of,
)
from agentenv.training.start import make_training
from tests.support.runs import rows_of
from tests.support.toy_rank import ToyRank, toy_ranks
from tests.support.virtual_clock import run_virtual

Kind = TypeVar("Kind")

KEYS = [
    "engine.latency_s=1.5", "engine.tokens_per_s=20", "queue.max_staleness=2",
    "eval.sets.a.path={here}/a.jsonl", "eval.sets.a.every=2", "eval.sets.a.max_tasks=3",
    "checkpoint.every=1", "checkpoint.minutes=30",
]  # fmt: skip
KEPT = ("train.num_steps=8", "checkpoint.keep_last=1000")  # and so all of the journal
OF_THIS_PROCESS = ("cpu_s", "lag_", "stalled", "env/")  # which other tests used before


@contextmanager
def slow_tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An update takes five minutes; a tool a second, or a hundred."""
    seconds = {"Update": 300.0, "WriteModel": 20.0}
    monkeypatch.setattr(ToyRank, "at", staticmethod(seconds.get))
    call = FunctionTool.call

    async def calling(tool: FunctionTool, arguments: Any, state: Any) -> ToolResult:
        await asyncio.sleep(Random(f"{arguments}").paretovariate(1.1))
        return await call(tool, arguments, state)

    monkeypatch.setattr(FunctionTool, "call", calling)
    with toy_ranks():
        yield


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with slow_tools(monkeypatch):
        yield


def finished_run(warehouse: Path, name: str, *overrides: str, resume: str = "") -> Path:
    keys = [key.replace("{here}", str(warehouse.parent)) for key in KEYS]
    config = load_config(TrainConfig, warehouse, [*keys, f"run.name={name}", *overrides])
    run = RunDirectory(Path(config.run.dir) / name, resume=bool(resume))
    run_virtual(make_training(config, run, View(), resume=resume).run_all())
    run.close()
    return run.path


def frames(run: Path) -> list[Frame]:
    paths = sorted((run / "journal").glob("*.frames"))
    read = [path.read_bytes() for path in paths]
    return [
        DECODER.decode(data[at : at + size]) for data in read for at, size, _ in frames_of(data)
    ]


def of(kind: type[Kind], found: Sequence[Frame]) -> list[Kind]:
    return [frame for frame in found if isinstance(frame, kind)]


def measured(run: Path) -> list[dict[str, Any]]:
    """Rows of metrics without the values of this process."""
    return [
        {key: value for key, value in row.items() if not any(x in key for x in OF_THIS_PROCESS)}
        for row in rows_of(run)
    ]


def test_equal_seeds_make_equal_trees(warehouse: Path) -> None:
    first, second = (finished_run(warehouse, name, *KEPT) for name in ("virtual-1", "virtual-2"))
    written = frames(first)
    assert {type(frame) for frame in written} >= {Finished, Started, Trained}
    assert written == frames(second), "tokens, log-probs, versions, times and order of all trees"
    assert measured(first) == measured(second)
    started = of(Started, written)
    assert [frame.tree for frame in started] == list(range(16)), "each tree once, in start order"
    assert [frame.step for frame in started] == sorted(frame.step for frame in started)
    early = [row["flow/producer_early_s"] for row in rows_of(first) if "score/value" in row]
    assert sum(early) > 0, "the learner is what takes long"
    assert sum(frame.early_s for frame in started) == pytest.approx(sum(early), abs=0.1)
    for left, right in zip(*(sorted(run.rglob("*.jsonl")) for run in (first, second)), strict=True):
        if left.name != "metrics.jsonl":
            assert left.read_bytes() == right.read_bytes(), left.name
    assert json.loads((first / "summary.json").read_text())["wall_s"]["rl"] > 4 * 300


def test_turns_have_the_temperature_of_the_start_of_their_tree(warehouse: Path) -> None:
    """The schedule is by policy version; trees of two versions are in flight."""
    run = finished_run(warehouse, "virtual-cooling", *KEPT, "sampling.schedule=[[1,1.2],[5,0.4]]")
    written = frames(run)
    began = {frame.tree: frame.policy_version for frame in of(Began, written)}
    expected = {tree: min(1.2, max(0.4, 1.4 - 0.2 * v)) for tree, v in began.items()}
    assert len({*expected.values()}) > 3
    found = {
        (frame.tree, turn.node.temperature)
        for frame in (*of(Grown, written), *of(Finished, written))
        for turn in frame.turns
        if turn.node.action_ids
    }
    assert len(found) == len(expected)
    assert dict(found) == pytest.approx(expected)


@pytest.fixture(scope="module")
def kept(warehouse: Path) -> Iterator[Path]:
    """A run of eight steps that keeps every checkpoint."""
    monkeypatch = pytest.MonkeyPatch()
    with slow_tools(monkeypatch):
        yield finished_run(warehouse, "virtual-kept", *KEPT)
    monkeypatch.undo()


def resume_frames(
    warehouse: Path, kept: Path, name: str, journal: Sequence[Frame], keys: Sequence[str] = KEPT
) -> list[Frame]:
    """The frames of a process that resumes from the first checkpoint with this journal."""
    run = kept.parent / name
    shutil.copytree(kept, run)
    for path in (run / "journal").iterdir():
        path.unlink()
    data = b"".join(framed(frame) for frame in journal)
    (run / "journal" / "000001.frames").write_bytes(data)
    for path in (run / "checkpoints").glob("step-*"):
        if path.name > "step-000001":
            shutil.rmtree(path)
    finished_run(warehouse, name, *keys, resume="latest")
    (run / "journal" / "000001.frames").unlink(missing_ok=True)
    return frames(run)


@pytest.mark.parametrize(
    ("started", "waits"),
    [(range(0), True), (range(2, 6), True), (range(8, 16), False), (range(2, 16), False)],
)
def test_a_scheduled_tree_that_never_began_starts_immediately(
    warehouse: Path, kept: Path, started: range, waits: bool
) -> None:
    """Of a process that was killed in between. Without such frames the others wait their turn."""
    name = f"virtual-started-{started.start}-{started.stop}"
    written = resume_frames(warehouse, kept, name, [Started(tree, 1, 0.0) for tree in started])
    places = range(2, 16)  # not trained in the checkpoint
    assert [frame.tree for frame in of(Started, written)] == sorted({*places} - {*started})
    assert {frame.tree for frame in of(Began, written)} == {*places}
    assert (sum(frame.early_s for frame in of(Started, written)) > 0) is waits
    rows = [row for row in rows_of(kept.parent / name) if "score/value" in row]
    assert (sum(row["flow/producer_early_s"] for row in rows[-7:]) > 0) is waits


def test_a_resumed_curriculum_draws_the_tasks_of_the_first_process(warehouse: Path) -> None:
    keys = ("data.curriculum.prefer=hard", "checkpoint.keep_last=1000", "train.num_steps=8")
    run = finished_run(warehouse, "virtual-drawn", *keys)
    drawn = {frame.tree: frame.task for frame in of(Started, frames(run))}
    assert list(drawn) == list(range(16))
    trained = [row for row in rows_of(run) if "score/value" in row]
    seen = [row["curriculum/seen"] for row in trained]
    assert seen == sorted(seen)
    others = dict(zip(drawn, reversed(drawn.values()), strict=True))
    for name, known in (("alike", drawn), ("others", others), ("anew", {})):
        written = resume_frames(
            warehouse,
            run,
            f"virtual-drawn-{name}",
            [Started(tree, 1, 0.0, task) for tree, task in known.items()],
            keys,
        )
        began = {frame.tree: frame.task_id for frame in of(Began, written)}
        again = {frame.tree: frame.task for frame in of(Started, written)}
        assert began == {tree: {**again, **known}[tree] for tree in range(2, 16)}
        assert set(again) == set(began) - set(known)
