"""Scores of stored rows are computed once, by the first command that wants them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from agentenv.evaluation.scores import Scorer
from agentenv.evaluation.store import lock, read_rows
from agentenv.launchers import evaluate
from tests.support.stored_evaluation import mixed_rows, write_evaluation

GRADER = {"kind": "layered"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_evaluation(tmp_path / "e", mixed_rows(12, 4), GRADER)


@pytest.fixture(autouse=True)
def scored_answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The answers that the layered grader is queried with; it accepts only equal text."""
    found: list[str] = []

    async def counted(_: Scorer, answer: str, golds: Sequence[str], *__: Any, **___: Any) -> bool:
        found.append(answer)
        return answer in golds

    monkeypatch.setattr(Scorer, "equal", counted)
    return found


def summary(folder: Path) -> object:
    return json.loads((folder / "summary.json").read_text())


def test_a_repeated_report_scores_nothing_and_has_the_same_summary(
    folder: Path, scored_answers: list[str]
) -> None:
    assert evaluate.main(["report", str(folder)]) == 0
    first, num = summary(folder), len(scored_answers)
    assert num >= 48
    assert all({"em", "rule"} <= row.scores.keys() for row in read_rows(folder))
    assert evaluate.main(["report", str(folder)]) == 0
    assert len(scored_answers) == num
    assert summary(folder) == first


def test_a_comparison_uses_stored_scores_and_stores_new_ones(
    folder: Path, tmp_path: Path, scored_answers: list[str]
) -> None:
    other = write_evaluation(tmp_path / "other", mixed_rows(12, 4), GRADER)
    assert evaluate.main(["report", str(folder)]) == 0
    scored_answers.clear()
    assert evaluate.main(["compare", str(folder), str(other)]) == 0
    assert len(scored_answers) == 48
    scored_answers.clear()
    assert evaluate.main(["compare", str(folder), str(other)]) == 0
    assert scored_answers == []


def test_only_an_added_sample_is_scored_and_votes_include_it(
    folder: Path, scored_answers: list[str]
) -> None:
    rows = read_rows(folder)
    whole = write_evaluation(folder.with_name("whole"), rows, GRADER)
    first = [row for row in rows if row.sample < 3]
    part = write_evaluation(folder.with_name("part"), first, GRADER)
    assert evaluate.main(["report", str(part)]) == 0
    known = read_rows(part)
    write_evaluation(part, [*known, *(row for row in rows if row.sample == 3)], GRADER)
    scored_answers.clear()
    assert evaluate.main(["report", str(part)]) == 0
    assert len(scored_answers) < len(rows)
    assert evaluate.main(["report", str(whole)]) == 0
    assert summary(part)["overall"] == summary(whole)["overall"]  # type: ignore[index]


def test_regrading_recomputes_scores(folder: Path, scored_answers: list[str]) -> None:
    assert evaluate.main(["report", str(folder)]) == 0
    scored_answers.clear()
    assert evaluate.main(["regrade", str(folder)]) == 0
    assert len(scored_answers) >= 48


def test_scores_are_not_stored_while_another_command_writes(folder: Path) -> None:
    before = (folder / "rows.jsonl").read_bytes()
    with closing(lock(folder)):
        assert evaluate.main(["report", str(folder)]) == 0
    assert (folder / "rows.jsonl").read_bytes() == before
