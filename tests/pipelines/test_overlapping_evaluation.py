"""Evaluations on a separate engine: the training continues in parallel, and each evaluation uses
one policy version from beginning to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.launchers import train
from agentenv.pipelines.evaluation.store import load_saved, read_rows
from tests.support.runs import rows_of

pytestmark = pytest.mark.slow

SCRIPT = "tests.support.warehouse:warehouse_turn"


def overrides(folder: Path, name: str, latency_s: float) -> list[str]:
    engine = f'{{name = "scripted", script = "{SCRIPT}", latency_s = {latency_s}}}'
    return [
        f"run.name={name}",
        f"eval.engine={engine}",
        f"eval.sets.a.path={folder}/a.jsonl",
        "eval.sets.a.every=2",
        "eval.sets.a.max_tasks=3",
        "eval.sets.a.phases=false",
        "checkpoint.best_metric=a/success",
        "checkpoint.keep_last=1",
    ]


def evaluated(run: Path) -> list[dict[str, Any]]:
    return [row for row in rows_of(run) if "eval/a/success" in row]


@pytest.fixture(scope="module")
def finished(warehouse: Path, here: None) -> Path:
    folder = warehouse.parent
    arguments = overrides(folder, "overlapping", 1.0)
    assert train.main([str(warehouse), *arguments, "train.num_steps=5"]) == 0
    return folder / "runs" / "overlapping"


def test_training_continues_during_an_evaluation(finished: Path) -> None:
    rows = rows_of(finished)
    order = [("eval" if "eval/a/success" in row else "step", row["step"]) for row in rows]
    assert order.index(("step", 3)) < order.index(("eval", 2))
    assert sorted(step for kind, step in order if kind == "eval") == [2, 4]


def test_each_evaluation_uses_only_the_policy_version_of_its_step(finished: Path) -> None:
    versions = {
        row["step"]: row["policy_version"] for row in rows_of(finished) if "phase" not in row
    }
    for row in evaluated(finished):
        folder = finished / "eval" / row["phase"]
        version = versions[row["step"]]
        assert {tuple(one.policy_versions) for one in read_rows(folder)} == {(version, version)}
        assert load_saved(folder).subject["policy_version"] == version
        assert row["policy_version"] == versions[row["step"]]


def test_the_best_checkpoint_is_that_of_the_evaluated_step(finished: Path) -> None:
    best = max(evaluated(finished), key=lambda row: (row["eval/a/success"], -row["step"]))
    state = json.loads((finished / "checkpoints" / "best" / "state.json").read_text())
    assert state["step"] == best["step"]
    assert not (finished / "evaluating").exists()
