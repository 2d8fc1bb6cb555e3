"""Evaluations stored by an earlier version have the same reports, comparisons and regrades.

`tests/fixtures/stored_evaluation` was written at commit 3420bb4 and has the keys of commit
7183755: two evaluations of 14 questions with three samples, a judge, failures, limits and helpers;
beside them the reports of that commit.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentenv.launchers import evaluate

SINCE = {"num_retries", "num_misformatted", "num_same", "error"}  # figures that reports had not yet
STORED = Path(__file__).parents[1] / "fixtures" / "stored_evaluation"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def leaves(tree: Any, path: str = "") -> dict[str, Any]:
    """Every value of a tree of JSON by its path."""
    if isinstance(tree, dict | list):
        parts = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, part in parts for k, v in leaves(part, f"{path}/{key}").items()}
    return {path: pytest.approx(tree, rel=1e-9) if isinstance(tree, float) else tree}


def assert_same_summary(folder: Path, name: str, before: str) -> None:
    found = json.loads((folder / name / "summary.json").read_text())
    expected = json.loads((STORED / before).read_text())
    assert expected.pop("num_unscored") == 0  # of a busy machine, which plays no part any more
    known, now = leaves(expected), leaves(found)
    assert {path: now[path] for path in known} == known
    assert {path.rpartition("/")[2] for path in now.keys() - known.keys()} == SINCE
    assert list(expected["groups"]) == list(found["groups"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first", "second"])
def test_the_report_of_a_stored_evaluation_has_the_same_figures(folder: Path, name: str) -> None:
    assert evaluate.main(["report", name]) == 0
    assert_same_summary(folder, name, f"{name}.json")


def test_the_comparison_of_stored_evaluations_is_unchanged(folder: Path) -> None:
    assert evaluate.main(["compare", "first", "second", "--out", "found.md"]) == 0
    assert (folder / "found.md").read_text() == (STORED / "compared.md").read_text()


@pytest.mark.slow
def test_regrading_changes_the_same_verdicts(folder: Path) -> None:
    grader = ["grader.kind=layered", "grader.math=false", "grader.reward=answer"]
    assert evaluate.main(["regrade", "second", *grader]) == 0
    assert (folder / "second" / "regrade.md").read_text() == (STORED / "regrade.md").read_text()
    assert_same_summary(folder, "second", "regraded.json")
