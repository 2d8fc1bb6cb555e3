"""Going on from checkpoints, starting from weights, adapters, and exporting, as users do it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from launchers import export, train
from launchers.rundir import Checkpoints

pytestmark = pytest.mark.timeout(400)  # each run starts a learner: long on a busy machine
KEPT = ["train.num_steps=3", "checkpoint.every=1", "checkpoint.keep_last=3"]
SET = ["eval.sets.a.every=2", "eval.sets.a.max_tasks=3", "checkpoint.best_metric=a/success"]
LORA = [
    "learner.optimizer=adamw",
    "learner.lora={r=4,alpha=8}",
    "learner.zero_stage=1",
    "learner.schedule=cosine",
    "learner.warmup_steps=1",
]


def rows_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "trees/offered" in row]


def names(run: Path) -> list[str]:
    return [path.name for path in Checkpoints(run / "checkpoints").finished()]


@pytest.fixture(scope="module")
def finished(warehouse: Path) -> Path:
    best = f"eval.sets.a.path={warehouse.parent}/a.jsonl"
    assert train.main([str(warehouse), "run.name=to-resume", best, *KEPT, *SET]) == 0
    return warehouse.parent / "runs" / "to-resume"


def test_a_run_goes_on_from_its_best_checkpoint(
    warehouse: Path, finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert names(finished) == ["step-000001", "step-000002", "step-000003"]
    best = f"eval.sets.a.path={warehouse.parent}/a.jsonl"
    common = [str(warehouse), "run.name=to-resume", best, *KEPT, *SET]
    assert train.main([*common, "--resume", "best"]) == 0
    assert "a newer checkpoint is moved to" in capsys.readouterr().out.replace("\n", " ")
    assert [row["step"] for row in rows_of(finished)] == [1, 2, 3]
    assert (finished / "checkpoints" / "set-aside" / "step-000003" / "state.json").is_file()
    first = str(finished / "checkpoints" / "step-000001")
    assert train.main([*common, "--resume", first]) == 0
    assert [row["step"] for row in rows_of(finished)] == [1, 2, 3]
    assert train.main([*common, "--resume", "train.num_steps=4"]) == 0, "the last one"
    assert [row["step"] for row in rows_of(finished)] == [1, 2, 3, 4]
    assert train.main([*common, "--resume", "step-77"]) == 2
    assert "not a complete checkpoint" in capsys.readouterr().err.replace("\n", " ")


def test_adapters_are_trained_resumed_and_exported(
    warehouse: Path, finished: Path, tmp_path: Path
) -> None:
    # weights only, from the last checkpoint of another run
    start = f"model.path={finished}"
    common = [str(warehouse), "run.name=adapters", start, *LORA]
    assert train.main([*common, "train.num_steps=2"]) == 0
    run = warehouse.parent / "runs" / "adapters"
    assert train.main([*common, "train.num_steps=3", "--resume"]) == 0
    assert [row["step"] for row in rows_of(run)] == [1, 2, 3]
    assert [row["learner/lr_scale"] for row in rows_of(run)][:2] == [1.0, 1.0]
    assert all(row.get("parity/logprob_gap_max", 0.0) >= 0 for row in rows_of(run))
    out = tmp_path / "out"
    assert export.main([str(run), str(out), "--dtype", "float32"]) == 0
    last = run / "checkpoints" / "step-000003"
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, last))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-6 for name in ours)
    assert (out / "adapter" / "adapter_config.json").is_file()
    assert (last / "adapter" / "adapter_model.safetensors").is_file()
