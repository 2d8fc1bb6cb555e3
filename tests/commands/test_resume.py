"""Resuming from checkpoints, starting from weights, adapters, and exporting, with the commands of a
user."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from agentenv.launchers import export, train
from tests.support.golden import Said
from tests.support.runs import first_turns, rows_of, trees_of

pytestmark = pytest.mark.usefixtures("here")
LORA = ["learner.optimizer=adamw", "learner.lora={r=4,alpha=8}"]
LORA += ["learner.schedule=cosine", "learner.warmup_steps=1"]


def steps_of(run: Path) -> list[int]:
    return [row["step"] for row in rows_of(run) if "trees/offered" in row]


def copied(finished: Path, name: str) -> Path:
    return shutil.copytree(finished, finished.with_name(name))


def test_a_resumed_run_continues_with_the_next_tree(warehouse: Path, finished: Path) -> None:
    run = copied(finished, "resumed")
    assert train.main([str(warehouse), "run.name=resumed", "train.num_steps=6", "--resume"]) == 0
    assert [trees_of(run, step) for step in range(1, 7)] == [[2 * n, 2 * n + 1] for n in range(6)]
    assert steps_of(run) == [1, 2, 3, 4, 5, 6]
    counted, begun = first_turns(run)
    assert counted == begun > 0, "entropies of before the resume are kept"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["incarnation"] == 2
    assert summary["trees"]["offered"] == 12


def test_a_run_resumes_from_its_best_checkpoint(
    warehouse: Path, finished: Path, said: Said
) -> None:
    run = copied(finished, "from-best")
    common = [str(warehouse), "run.name=from-best", "checkpoint.every=1", "--resume"]
    assert "newer checkpoint to" in said(train.main, *common, "best").replace("\n", " ")
    assert steps_of(run) == [1, 2, 3, 4]
    assert (run / "checkpoints" / "set-aside" / "step-000004" / "state.json").is_file()
    assert "a complete checkpoint" in said(train.main, *common, "step-77", status=2).replace(
        "\n", " "
    )


def test_adapters_are_trained_resumed_and_exported(
    warehouse: Path, finished: Path, tmp_path: Path
) -> None:
    # weights only, from the last checkpoint of another run
    start = f"model.path={finished}"
    common = [str(warehouse), "run.name=adapters", start, *LORA]
    assert train.main([*common, "train.num_steps=2"]) == 0
    run = warehouse.parent / "runs" / "adapters"
    assert train.main([*common, "train.num_steps=3", "--resume"]) == 0
    assert steps_of(run) == [1, 2, 3]
    scales = [row["learner/lr_scale"] for row in rows_of(run) if "learner/lr_scale" in row]
    assert scales[:2] == [1.0, 1.0]
    assert all(row.get("parity/logprob_gap_max", 0.0) >= 0 for row in rows_of(run))
    out = tmp_path / "out"
    assert export.main([str(run), str(out), "--dtype", "float32"]) == 0
    last = run / "checkpoints" / "step-000003"
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (out, last))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] - theirs[name]).abs().max() < 1e-6 for name in ours)
    assert (out / "adapter" / "adapter_config.json").is_file()
    assert (last / "adapter" / "adapter_model.safetensors").is_file()
