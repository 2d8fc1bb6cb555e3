"""A run and an evaluation that commit 7183755 wrote are resumed and read by the present version.

tests/fixtures/old_run.tar.xz holds a run of two updates of the README's environment with a tiny
model and a scripted engine, its checkpoint and its evaluations, and an evaluation of that run by
`launchers/evaluate.py`; /OLD-WORKSPACE stands for the folder that it was made in, and the imports
of `my_env.py` have their present names.
"""

from __future__ import annotations

import json
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.launchers import evaluate, train
from agentenv.pipelines.evaluation.store import read_rows
from tests.support.runs import rows_of

ARCHIVE = Path(__file__).parents[1] / "fixtures" / "old_run.tar.xz"
SET = ["eval.sets.a.every=2", "eval.sets.a.max_tasks=6", "eval.sets.a.num_samples=2"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("old")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    for path in folder.rglob("*"):
        if path.suffix in (".json", ".jsonl", ".toml"):
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace("/OLD-WORKSPACE", str(folder)), encoding="utf-8")
    module = sys.modules.pop("my_env", None)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    if module is not None:
        sys.modules["my_env"] = module


def updates(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(run) if "trees/offered" in row]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("here")
def test_a_checkpoint_of_an_old_run_is_resumed(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = workspace / "runs" / "resumed"
    shutil.copytree(workspace / "runs" / "old", run)
    before = updates(run)
    sets = [f"eval.sets.a.path={workspace}/a.jsonl", *SET, "checkpoint.best_metric=a/success"]
    command = [str(workspace / "warehouse.toml"), "run.name=resumed", *sets, "train.num_steps=4"]
    assert train.main([*command, "--resume"]) == 0
    after = updates(run)
    assert after[:2] == before
    assert [(row["step"], row["policy_version"]) for row in after] == [
        (1, 1), (2, 2), (3, 3), (4, 4)
    ]  # fmt: skip
    assert after[-1]["trees/offered"] == 2 * len(after)  # two trees an update
    summary = json.loads((run / "summary.json").read_text())
    assert summary["num_trajectories"] == {"before_sft": 12, "after_sft": 12, "after_rl": 12}
    assert {path.name for path in (run / "eval").iterdir()} == {
        "before_sft", "step-000002", "step-000004", "after_rl"
    }  # fmt: skip
    assert (run / "checkpoints" / "step-000004" / "trainer").is_dir()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_evaluations_of_an_old_run_are_compared_with_new_ones(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = workspace / "evals" / "old", workspace / "evals" / "new"
    arguments = [str(workspace / "runs" / "old"), "--n", "6", "num_samples=2"]
    assert evaluate.main([*arguments, "--out", str(new)]) == 0
    assert evaluate.main(["compare", str(old), str(new)]) == 0
    assert "6 questions are in both; none is left out" in capsys.readouterr().out
    assert [row.segments for row in read_rows(new)] == [row.segments for row in read_rows(old)]
    assert evaluate.main(["report", str(old)]) == 0
    assert json.loads((old / "summary.json").read_text())["overall"]["num_trajectories"] == 12


@pytest.mark.slow
def test_an_evaluation_of_an_old_run_is_continued(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = workspace / "evals" / "cut-off"
    shutil.copytree(workspace / "evals" / "old", folder)
    whole = read_rows(folder)
    lines = (folder / "rows.jsonl").read_text().splitlines(keepends=True)
    (folder / "rows.jsonl").write_text("".join(lines[:-1]))
    arguments = [str(workspace / "runs" / "old"), "--n", "6", "num_samples=2"]
    assert evaluate.main([*arguments, "--out", str(folder)]) == 0
    assert "contains 11 of 12 trajectories" in " ".join(capsys.readouterr().out.split())
    assert [row.segments for row in read_rows(folder)] == [row.segments for row in whole]
