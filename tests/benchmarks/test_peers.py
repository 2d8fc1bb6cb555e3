"""The bench of peers: the contract of a driver, with a peer made here, and the report."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import bench
from benchmarks.peers import contest
from benchmarks.peers.contest import PEERS, Peer, Sample
from benchmarks.peers.environments import PeerError

DRIVER = """
from work import rollouts

async def run(work):
    async def one(number):
        assert work.question(number).startswith("Which")
        for num_results in range(work.num_calls + 1):
            token_ids, logprobs = await work.turn("tags", num_results)
            assert len(token_ids) == len(logprobs)
            said = work.text("tags", num_results)
            if num_results < work.num_calls:
                assert said == "call"
                assert await work.result()
        assert said == "answer"

    await rollouts(work, one)
"""
BUSY = """
import subprocess
import sys
import tiny_work

async def run(work):
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        await tiny_work.run(work)
    finally:
        child.kill()
        child.wait()
"""
SILENT = """
from work import rollouts

async def run(work):
    async def one(number):
        await work.turn("tags", 0)

    await rollouts(work, one)
"""
BROKEN = "raise ValueError('it has moved')\n"


def write_task(folder: Path, **others: Any) -> Path:
    """A task of four rollouts that end at once."""
    form = {"call": [1, 2], "answer": [3, 4], "call_text": "call", "answer_text": "answer"}
    task = {
        "tokenizer": "none", "num_calls": 4, "group_size": 2, "turn_s": 0.001, "tool_s": 0.001,
        "first_part": 0.2, "min_steps": 50, "texts": ["one", "two"],
        "questions": ["Which one is it?"], "logprobs": [[-0.5, -0.25]], "forms": {"tags": form},
        "sizes": [{"at_once": 4, "scale": 1.0}], **others,
    }  # fmt: skip
    path = folder / "task.json"
    path.write_text(json.dumps(task))
    return path


def write_driver(folder: Path, text: str) -> Path:
    path = folder / "tiny_peer.py"
    path.write_text(text)
    return path


def test_a_driver_reports_figures_for_each_size(tmp_path: Path) -> None:
    sizes = [{"at_once": 2, "scale": 1.0}, {"at_once": 4, "scale": 0.5}]
    task = write_task(tmp_path, sizes=sizes)
    found = contest.drive(Path(sys.executable), write_driver(tmp_path, DRIVER), task)
    assert found.keys() == {"2", "4"}
    for one in found.values():
        assert one.cpu_us > 0
        assert one.floor_us > 0
        assert one.children_us == 0
        assert one.steps_per_s is not None
        assert one.steps_per_s > 0


def test_processes_of_a_driver_are_counted_separately(tmp_path: Path) -> None:
    (tmp_path / "tiny_work.py").write_text(DRIVER)
    task = write_task(tmp_path, min_steps=200)
    found = contest.drive(Path(sys.executable), write_driver(tmp_path, BUSY), task)
    assert found["4"].children_us > found["4"].cpu_us / 10


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (SILENT, "0 results of the tool: the driver does not pass its peer's calls to the tool"),
        (BROKEN, "ValueError: it has moved"),
        ("async def run(work): pass\n", "the driver ended after 0 env steps of 54"),
    ],
)
def test_a_driver_that_does_less_work_is_reported(
    tmp_path: Path, driver: str, message: str
) -> None:
    with pytest.raises(PeerError, match=message):
        contest.drive(Path(sys.executable), write_driver(tmp_path, driver), write_task(tmp_path))


def test_missing_figures_of_a_driver_are_reported() -> None:
    with pytest.raises(PeerError, match="cpu_us"):
        contest.read_samples(b'{"100": {"floor_us": 1.0}}')


def test_ratios_are_of_the_same_round() -> None:
    """A machine that becomes twice as slow in the second of three rounds changes no ratio."""
    ours = [Sample(cost * 150.0, 0.0, cost * 50.0) for cost in (1, 2, 1)]
    peer = [Sample(cost * 450.0, cost * 5.0, cost * 50.0, 30.0, 60.0) for cost in (1, 2, 1)]
    found = contest.figures(peer, ours)
    assert (found.times_ours, found.times_floor, found.speed) == (4.0, 9.0, 0.5)
    assert (found.cpu_us, found.cpu_us_min, found.cpu_us_max) == (450.0, 450.0, 900.0)
    assert found.above_floor_us == 400.0
    assert contest.figures(peer, ()).times_ours is None


def test_a_run_reports_figures_and_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two contestants in two rounds: one that works, and one whose environment cannot be made."""
    requirements = tmp_path / "missing.txt"
    requirements.write_text("nothing-of-this-name\n")
    peers = {
        "tiny": Peer(driver=write_driver(tmp_path, DRIVER)),
        "missing": Peer(driver=tmp_path, requirements=requirements, versions=("2.0",)),
    }
    monkeypatch.setattr(contest, "write_task", lambda place, sizes: write_task(place))
    lines: list[str] = []
    kept: list[int] = []
    report = contest.run(
        ["tiny", "missing"],
        [100],
        2,
        tmp_path,
        1.0,
        lines.append,
        peers=peers,
        keep=lambda report: kept.append(report.num_rounds),
    )
    assert kept == [1, 2]
    assert len(report.peers["tiny"].rounds["4"]) == 2
    assert report.peers["tiny"].sizes["4"].times_ours is None, "ours did not take part"
    assert report.peers["missing"].sizes == {}
    assert "needs Python 2.0" in report.peers["missing"].error
    assert [line for line in lines if line.startswith("round")] == [
        "round 1 of 2: tiny",
        "round 2 of 2: tiny",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--only", "gym"], f"--only gym: unknown; expected: {', '.join(PEERS)}"),
        (["--sizes", "7"], "--sizes 7: unknown; expected: 100, 1000"),
        (["--rounds", "0"], "--rounds 0: expected at least 1"),
    ],
)
def test_bad_options_are_refused_before_anything_starts(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert bench.main(["peers", *options, "--folder", str(tmp_path / "none")]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "none").exists()


def test_every_driver_and_requirement_exists() -> None:
    for name, peer in PEERS.items():
        assert peer.driver is None or peer.driver.is_file(), name
        if peer.requirements is not None:
            lines = peer.requirements.read_text().splitlines()
            assert [line for line in lines if line and not line.startswith("#")], name


def test_the_task_has_turns_of_one_length_in_each_form(tmp_path: Path) -> None:
    task = json.loads(contest.write_task(tmp_path, [100]).read_text())
    lengths = {len(form[name]) for form in task["forms"].values() for name in ("call", "answer")}
    assert lengths == {contest.TURN_TOKENS}
    assert task["forms"]["json"]["call_text"].endswith("</tool_call>")
    assert task["forms"]["tags"]["call_text"].endswith("</search>")
    assert (tmp_path / "tokenizer" / "tokenizer.json").is_file()
