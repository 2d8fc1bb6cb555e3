"""A second command over a synthesis: which trajectories it repeats, and when it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.commands.evaluating import refused
from tests.commands.synthesizing import HINTS, Run, count_turns, runner, written
from tests.support.json_files import rows_in


@pytest.fixture
def run(warehouse: Path, tmp_path: Path, questions: Path) -> Run:
    return runner(warehouse, tmp_path, questions)


@pytest.fixture
def num_asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return count_turns(monkeypatch)


def test_a_repeated_synthesis_sends_no_requests_and_writes_the_same_files(
    run: Run, tmp_path: Path, num_asked: list[int]
) -> None:
    assert run("out", *HINTS) == 0
    first, count = written(tmp_path / "out"), num_asked[0]
    assert count > 40
    assert run("out", *HINTS) == 0
    assert num_asked[0] == count
    assert written(tmp_path / "out") == first
    learned = len(rows_in(tmp_path / "out" / "sft.jsonl"))
    assert run("out", *HINTS, "filter.max_per_question=2") == 0
    assert num_asked[0] == count, "other filters ask nothing"
    assert len(rows_in(tmp_path / "out" / "sft.jsonl")) > learned


def test_an_interrupted_synthesis_continues(run: Run, tmp_path: Path) -> None:
    assert run("out", *HINTS, "concurrency=1") == 0
    first = written(tmp_path / "out")
    path = tmp_path / "out" / "trajectories" / "rows.jsonl"
    for share in (0.2, 0.7):
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        assert run("out", *HINTS, "concurrency=7") == 0
        assert written(tmp_path / "out") == first


def test_trajectories_of_another_configuration_are_refused(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("out", *HINTS, "--n", "2") == 0
    before = written(tmp_path / "out")
    for key, named in (
        ("hints.verification=['Other.']", "hints.verification"),
        ("sampling.temperature=0.5", "sampling.temperature: 1.0 -> 0.5"),
        ("direct.prompt.template=direct", "prompt.template"),
    ):
        assert run("out", *HINTS, "--n", "2", key) == 2
        text = refused(capsys)
        assert named in text
        assert "choose another --out" in text
    assert written(tmp_path / "out") == before
