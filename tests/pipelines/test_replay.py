"""launchers/replay.py: what a run computed comes out again, and what does not is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentenv.archive import Archive, KeptTree, StepHeader, read_step, steps_of
from agentenv.frames import ArchiveConfig
from agentenv.launchers import replay, train
from tests.pipelines.killed_runs import KilledRun
from tests.support.killing import Plan
from tests.support.runs import rows_of

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("here"), pytest.mark.slow]

Change = Callable[[StepHeader, list[KeptTree]], StepHeader | None]


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """What replay reads of a run, to be changed."""
    shutil.copytree(finished / "trees", tmp_path / "run" / "trees")
    shutil.copy(finished / "config.json", tmp_path / "run")
    return tmp_path / "run"


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def rewritten(run: Path, number: int, change: Change) -> None:
    step = read_step(run / "trees" / f"step-{number:06d}.frames")
    trees = list(step.trees())
    header = change(step.header, trees) or step.header
    Archive(run / "trees", ArchiveConfig()).write(header, trees)


def test_a_finished_run_comes_out_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(run)]) == 0
    assert "4 steps, 8 trees: all that was computed again is equal" in said(capsys)
    assert replay.main([str(run), "--step", "2", "--tree", "3"]) == 0
    assert "1 step, 1 tree: all" in said(capsys)


def of_a_fork(header: StepHeader, trees: list[KeptTree]) -> None:
    node = next(n for kept in trees for n in kept.tree.nodes if n.num_forks is not None)
    node.num_forks = 1 - min(node.num_forks or 0, 1)


def of_credit(header: StepHeader, trees: list[KeptTree]) -> None:
    kept = next(kept for kept in trees if kept.credit is not None)
    assert kept.credit is not None
    kept.credit.adv_pos[1] += 0.5


def of_the_loss(header: StepHeader, trees: list[KeptTree]) -> StepHeader:
    return replace(header, metrics=header.metrics | {"learner/loss": 7.0})


def of_a_reward(header: StepHeader, trees: list[KeptTree]) -> None:
    kept = next(kept for kept in trees if kept.fate == "trained")
    kept.tree.leaves()[0].reward += 0.25


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (of_a_fork, "num_forks: recorded"),
        (of_credit, "adv_pos: recorded"),
        (of_the_loss, "loss: recorded 7, computed"),
        (of_a_reward, "returns: recorded"),
    ],
)
def test_what_comes_out_otherwise_is_named(
    run: Path, capsys: pytest.CaptureFixture[str], change: Any, expected: str
) -> None:
    number = next(
        n
        for n in (1, 2, 3, 4)
        if any(e.fate == "trained" for e in read_step(run / f"trees/step-{n:06d}.frames").entries)
    )
    rewritten(run, number, change)
    assert replay.main([str(run), "--step", str(number)]) == 1
    text = said(capsys)
    assert expected in text
    assert f"step {number}, " in text
    assert "differences" in text


def test_mistakes_are_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in (
        ([str(run.parent)], "not the folder of a run: config.json is missing"),
        ([str(run), "--step", "9"], "step 9 is not there; there are the steps 1 to 4"),
        ([str(run), "--tree", "99"], "tree 99 is not there; steps took those from 0 to 7"),
        ([str(run), "--step", "2", "--tree", "7"], "tree 7 is not there; step 2 took [2, 3]"),
        ([str(run), "limits.max_turns=3"], "was made under another configuration"),
    ):
        assert replay.main(arguments) == 2
        assert expected in said(capsys)
    config = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({"run": config["run"]}))
    assert replay.main([str(run)]) == 2
    assert "not a run of agentenv train" in said(capsys)


def test_a_step_that_is_cut_off_is_replayed_up_to_there(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = run / "trees" / "step-000004.frames"
    place = read_step(path).entries[1].place
    path.write_bytes(path.read_bytes()[: place + 20])
    assert replay.main([str(run), "--step", "4"]) == 0
    assert "is cut off: 1 of its 2 trees are there" in said(capsys)
    shutil.rmtree(run / "trees")
    assert replay.main([str(run)]) == 2
    assert "holds no step" in said(capsys)


def test_finished_trees_that_no_step_took_come_from_the_journal(
    finished: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a crash leaves them before their step is done."""
    shutil.copytree(finished / "journal", run / "journal")
    (run / "trees" / "step-000004.frames").unlink()
    before = {path: path.read_bytes() for path in (run / "journal").iterdir()}
    assert replay.main([str(run)]) == 0
    assert "3 steps, 8 trees: all that was computed again is equal" in said(capsys)
    assert {path: path.read_bytes() for path in (run / "journal").iterdir()} == before


def test_trees_that_went_on_after_a_kill_come_out_again(
    warehouse: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = KilledRun(warehouse, "killed", "algorithm.name=arpo", "engine.latency_s=0.1")
    for number in (2, 2):
        assert run.start(Plan("frame Grown", "after", number)) != 0
    assert run.start() == 0
    assert replay.main([str(run.path)]) == 0
    text = said(capsys)
    assert "4 steps, 8 trees: all that was computed again is equal" in text
    assert "cannot be grown" not in text


@pytest.mark.parametrize(
    "keys",
    [
        ["algorithm.name=aepo", "learner.groups_per_minibatch=1", "queue.max_staleness=1"],
        ["algorithm.name=gspo", "learner.proximal=always"],
        ["algorithm.name=reinforce_pp"],
    ],
    ids=["aepo", "gspo", "reinforce_pp"],
)
def test_other_algorithms_come_out_again(
    warehouse: Path, capsys: pytest.CaptureFixture[str], keys: list[str]
) -> None:
    name = keys[0].partition("=")[2]
    assert train.main([str(warehouse), f"run.name=again-{name}", "train.num_steps=2", *keys]) == 0
    assert replay.main([str(warehouse.parent / "runs" / f"again-{name}")]) == 0
    text = said(capsys)
    assert "all that was computed again is equal" in text
    assert "not computed again" not in text
    assert "cannot be grown" not in text


@pytest.mark.parametrize("algorithm", ["arpo", "aepo", "reinforce_pp", "gspo"])
@pytest.mark.parametrize("equal", ["count", "drop"])
def test_steps_are_as_many_as_were_said_and_their_losses_come_out_again(
    warehouse: Path, capsys: pytest.CaptureFixture[str], algorithm: str, equal: str
) -> None:
    """Groups of two, of which some have equal returns; of a step perhaps all."""
    keys = ["algorithm.group_size=2", "learner.groups_per_minibatch=1", "train.num_steps=6"]
    name = f"steps-{algorithm}-{equal}"
    keys += [f"algorithm.name={algorithm}", f"queue.equal_groups={equal}", f"run.name={name}"]
    assert train.main([str(warehouse), *keys]) == 0
    run = warehouse.parent / "runs" / name
    said_at_start = re.search(r"trajectories in (up to )?(\d+) optimizer steps", said(capsys))
    assert said_at_start is not None
    rows = [row for row in rows_of(run) if "trees/offered" in row]
    taken = [row.get("learner/num_steps", 0) for row in rows]
    fates = [
        entry.fate for path in steps_of(run / "trees").values() for entry in read_step(path).entries
    ]
    if equal == "count":
        assert said_at_start.groups() == (None, "2")
        assert taken == [2.0] * 6
        assert fates == ["trained"] * 12
        assert rows[-1]["trees/equal"] == sum(row["learner/num_equal_groups"] for row in rows)
        assert rows[-1]["trees/equal"] > 0
    else:
        assert said_at_start.groups() == ("up to ", "2")
        assert taken == [row.get("learner/num_trained", 0) for row in rows]
        assert set(fates) == {"trained", "filtered"}
    assert replay.main([str(run)]) == 0
    text = said(capsys)
    assert "6 steps, 12 trees: all that was computed again is equal" in text
    assert "not computed again" not in text
