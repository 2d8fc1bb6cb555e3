"""A second command over an evaluation: which trajectories it repeats, and when it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.errors import DataError, EngineError
from agentenv.base.types import Limits
from agentenv.engines.scripted import ScriptedEngine
from agentenv.evaluation.run import MAX_FAILED
from agentenv.evaluation.store import load_saved, read_rows
from tests.commands.evaluating import Run, refused, runner, texts


@pytest.fixture
def run(warehouse: Path, tmp_path: Path) -> Run:
    return runner(warehouse, tmp_path)


def test_a_repeated_command_sends_no_requests(run: Run, tmp_path: Path, prompts: list[str]) -> None:
    assert run("out") == 0
    assert len(prompts) == 24
    before = (tmp_path / "out" / "rows.jsonl").read_bytes()
    assert run("out") == 0
    assert len(prompts) == 24
    assert (tmp_path / "out" / "rows.jsonl").read_bytes() == before


def test_more_samples_and_questions_reuse_stored_trajectories(
    run: Run, tmp_path: Path, prompts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Fewer questions send no requests, and the larger extent of the report is shown."""
    assert run("out", "--n", "4") == 0
    first = texts(tmp_path / "out")
    assert run("out", "--n", "6", "num_samples=4", "concurrency=3") == 0
    assert len(prompts) == 24
    rows = texts(tmp_path / "out")
    assert len(rows) == 24
    assert {key: rows[key] for key in first} == first
    assert "also contains" not in capsys.readouterr().out
    assert run("out", "--n", "5", "num_samples=3") == 0
    assert len(prompts) == 24
    told = " ".join(capsys.readouterr().out.split())
    assert "15 of 15" in told
    assert "contains 9 trajectories" in told


def test_a_truncated_last_line_is_dropped_and_evaluated_again(
    run: Run, tmp_path: Path, prompts: list[str]
) -> None:
    assert run("out", "--n", "6") == 0
    path, before = tmp_path / "out" / "rows.jsonl", texts(tmp_path / "out")
    path.write_bytes(path.read_bytes()[:-40])
    assert len(read_rows(tmp_path / "out")) == 5
    assert run("out", "--n", "6") == 0
    assert len(prompts) == 7
    assert texts(tmp_path / "out") == before
    path.write_bytes(b'{"no": "row"}\n' + path.read_bytes())
    with pytest.raises(DataError, match=r"rows\.jsonl, line 1"):
        read_rows(tmp_path / "out")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An engine that fails from its sixth request on, until [0] is 0. [1] counts failures."""
    state = [6, 0]
    generate = ScriptedEngine.generate

    async def failing(self: ScriptedEngine, *rest: Any, **keys: Any) -> Any:
        if state[0] and self.stats()["requests"] + state[1] >= state[0]:
            state[1] += 1
            raise EngineError("out of memory")
        return await generate(self, *rest, **keys)

    monkeypatch.setattr(ScriptedEngine, "generate", failing)
    return state


def test_failures_do_not_count_as_wrong_and_are_retried(
    run: Run, tmp_path: Path, broken: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ("--n", "6", "concurrency=1", "limits.max_failures=1")
    assert run("out", *keys) == 1, "half of them failed"
    rows = read_rows(tmp_path / "out")
    failed = [row for row in rows if row.end == "failed"]
    assert len(rows) == 6
    assert len(failed) == 3
    turns = 1 + Limits().max_turn_retries
    assert broken[1] == 3 * 2 * turns, "each was tried once more"
    assert {row.error for row in failed} == {"EngineError: out of memory"}
    assert not any(row.success or row.scores or row.prediction for row in failed)
    told = capsys.readouterr()
    assert "3 trajectories failed" in told.out
    assert "3 of 6" in told.err
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["overall"]["num_failed"] == 3
    broken[0] = 0
    assert run("out", *keys) == 0
    assert [row.end for row in read_rows(tmp_path / "out")] == ["terminated"] * 6
    assert run("whole", *keys) == 0
    assert texts(tmp_path / "whole") == texts(tmp_path / "out"), "a failure changes no answer"


def test_an_evaluation_in_which_everything_fails_stops(
    run: Run, tmp_path: Path, broken: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its stored trajectories are evaluated again."""
    broken[0] = 1
    keys = ("num_samples=20", "concurrency=4", "limits.max_failures=0", "limits.max_turn_retries=0")
    assert run("out", *keys) == 1
    assert f"all of the first {MAX_FAILED} attempts failed" in capsys.readouterr().err
    assert MAX_FAILED <= len(read_rows(tmp_path / "out")) < 60


def test_another_configuration_and_other_weights_and_questions_are_refused(
    run: Run, tmp_path: Path, warehouse: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("out", "--n", "2") == 0
    for key, named in (
        ("sampling.temperature=0.5", "sampling.temperature: 1.0 -> 0.5"),
        ("prompt.template=direct", "prompt.template: '' -> 'direct'"),
        ("engine.script=tests.support.warehouse:warehouse_turn", "engine.script"),
    ):
        assert run("out", "--n", "2", key) == 2
        text = refused(capsys)
        assert named in text
        assert "choose another --out" in text
    assert len(read_rows(tmp_path / "out")) == 2
    saved = load_saved(tmp_path / "out")
    path = tmp_path / "out" / "config.json"
    path.write_text(path.read_text().replace(saved.subject["weights"], "f" * 16))
    assert run("out", "--n", "2") == 2
    assert "subject.weights" in refused(capsys)
    path.write_text(path.read_text().replace("f" * 16, saved.subject["weights"]))
    rows = (warehouse.parent / "a.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "a.jsonl").write_text("".join(rows[::-1]))
    assert run("out", f"data={tmp_path}/a.jsonl", data=False) == 2
    assert "question a-1 differs" in refused(capsys)
