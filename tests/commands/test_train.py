"""The training run around the loop: cadence, files, and the contents of a step."""

from __future__ import annotations

import csv
import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from agentenv.assembly.keys.rl import TrainConfig, TrainingConfig
from agentenv.assembly.keys.supervised import SFTStage
from agentenv.assembly.reports.pictures import panels, png
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.tables import Table
from agentenv.assembly.run.terminal import View
from agentenv.base.config import load_config
from agentenv.base.errors import ConfigError
from agentenv.base.model_files import load_tokenizer
from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task
from agentenv.training.loop.brief_reports import phase_title
from agentenv.training.loop.state import RunState
from agentenv.training.reports.recorder import RunRecorder
from agentenv.training.supervised.cold_start import why_lower
from tests.support.runs import first_turns, rows_of

pytestmark = pytest.mark.usefixtures("here")


def test_each_evaluation_set_has_its_own_cadence_and_name(finished: Path) -> None:
    rows = rows_of(finished)
    phases = ["before_sft", *(f"step-00000{n}" for n in (1, 2, 3, 4)), "after_rl"]
    assert [r["phase"] for r in rows if "eval/a/success" in r] == phases
    assert [r["step"] for r in rows if "eval/b/success" in r] == [3]
    counted = next(r for r in rows if "eval/b/success" in r)
    assert counted["eval/b/trajectories"] == 48
    assert 0.3 < counted["eval/b/success"] < 0.95
    assert counted["eval/b/bolts/trajectories"] == 16
    assert counted["eval/b/reward/accuracy"] == counted["eval/b/success"]


def test_checkpoints_are_rotated_and_the_best_is_kept(finished: Path) -> None:
    found = sorted(path.name for path in (finished / "checkpoints").iterdir())
    assert found == ["best", "step-000003", "step-000004"]
    for name in found:
        assert (finished / "checkpoints" / name / "model.safetensors").is_file()
        assert (finished / "checkpoints" / name / "tokenizer.json").is_file()


def test_the_summary_has_all_documented_keys_and_no_tree_is_lost(finished: Path) -> None:
    summary = json.loads((finished / "summary.json").read_text())
    documented = {
        "seed", "algorithm", "success", "success_by_kind", "reward", "reward_by_kind",
        "tool_calls_total", "forks_total", "trees", "staleness", "tokens", "wall_s",
        "policy_version", "engine_learner_logprob_gap", "event_loop",
    }  # fmt: skip
    assert set(summary) >= documented
    assert set(summary["success"]) == {"before_sft", "after_sft", "after_rl"}
    assert set(summary["wall_s"]) >= {"setup", "sft", "rl", "eval", "total"}
    trees = summary["trees"]
    assert trees["offered"] == 8
    ends = ("trained", "filtered", "failed", "in_flight")
    assert trees["offered"] == sum(trees[name] for name in ends)
    assert summary["staleness"]["max"] <= 1
    updates = sum("learner/loss" in row for row in rows_of(finished))
    assert summary["policy_version"] == updates > 0
    assert summary["forks_total"] > 0


def test_entropy_by_position_is_written_as_table_and_picture(finished: Path) -> None:
    rows = list(csv.DictReader((finished / "entropy.csv").read_text().splitlines()))
    assert {row["curve"] for row in rows} == {"start", "after_result", "after/stock"}
    assert all(float(row["entropy"]) >= 0 and int(row["turns"]) > 0 for row in rows)
    counted, begun = first_turns(finished)
    assert counted == begun > 0
    assert (finished / "entropy.png").read_bytes().startswith(b"\x89PNG")


def test_the_last_lines_name_existing_files_and_phases_only(finished: Path) -> None:
    log = (finished / "run.log").read_text()
    last = log.partition(f"results in {finished}: ")[2].splitlines()[0].split(", ")
    assert {"run.log", "trees/", "trajectories/", "curve.png", "samples.txt"} < {*last}
    assert all((finished / name).exists() for name in last)
    for text in (log.partition("success on a, sampled")[2], (finished / "samples.txt").read_text()):
        assert "before RL" in text
        assert "after RL" in text
        assert "cold start" not in text
    assert "evaluation a before" in log
    assert "step 1: success" in log
    assert "before_sft" not in log


def test_a_table_has_no_colors_in_the_log(tmp_path: Path) -> None:
    view = View()
    view.console = Console(file=StringIO(), force_terminal=True, color_system="standard")
    view.log_to(tmp_path / "run.log")
    view.show(Table(title="n", columns=["figures"], rows=[["1"]]))
    view.close()
    assert "figures" in (tmp_path / "run.log").read_text()
    assert "\x1b" not in (tmp_path / "run.log").read_text()


def test_no_legend_covers_a_curve() -> None:
    figure, places = panels(2, (11, 5))
    for axes, label in zip(places, ("", "update"), strict=True):
        axes.set_xlabel(label)
        for name in ("one", "another"):
            axes.plot([1, 2], [1, 2], label=name)
    png(figure)
    for axes in places:
        (legend,) = axes.figure.legends
        assert legend.get_window_extent().y1 <= axes.xaxis.get_tightbbox().y0 + 2  # pixels


def test_a_phase_that_did_not_exist_is_not_named() -> None:
    assert phase_title("before_sft", cold_start=True) == "before cold start"
    assert phase_title("before_sft", cold_start=False) == "before RL"
    assert phase_title("after_sft", cold_start=False) == "before RL"
    assert phase_title("step-000040", cold_start=False) == "after step 40"


@pytest.mark.parametrize(
    ("rows", "told"), [(["clean", "mixed"], "other rows than the gate measures (clean)"),
                       (["copy", "clean", "clean"], ""), (["copy"], "")]
)  # fmt: skip
def test_a_last_cold_start_stage_without_the_gate_is_reported(rows: list[str], told: str) -> None:
    stages = [SFTStage(rows=one, num_steps=1, until_gate=one == "clean") for one in rows]
    assert told in why_lower(stages)
    assert bool(told) == bool(why_lower(stages))


def test_trajectories_are_written_as_readable_rows(finished: Path) -> None:
    path = finished / "trajectories" / "step-000001.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 8
    row = rows[0]
    assert row["segments"][1]["policy"].endswith("</stock>")
    assert "<result>" in row["segments"][2]["env"]
    assert row["tool_calls"][0]["name"] == "stock"
    assert sum(row["loss_mask"]) == row["num_tokens"]
    assert {row["fork_parent"] is None for row in rows} == {True, False}
    assert set(row["parts"])


def test_epochs_count_questions() -> None:
    assert TrainingConfig(num_steps=7).count_steps(24, groups_per_step=2) == 7
    assert TrainingConfig(num_epochs=0.3).count_steps(25, groups_per_step=2) == 3, (
        "7 of 25 questions, 2 a step"
    )
    with pytest.raises(ConfigError, match=r"num_epochs.*0\.1.*10"):
        TrainingConfig(num_epochs=0.1).count_steps(10, groups_per_step=2)


def a_tree() -> TrajectoryTree:
    tree = TrajectoryTree(Task("t", "env", "?", ("a",)))
    root = tree.add(None, observation_ids=[1, 2])
    tree.add(root, action_ids=[3, 4], logprobs=[-1.0, -1.0], reward=1.0, end="terminated")
    return tree


async def test_trajectories_can_be_switched_off_and_are_bounded(
    warehouse: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer = load_tokenizer(warehouse.parent / "model")
    for name, override, max_bytes, num_files in (
        ("silent", "log.trajectories=false", 500e6, 0),
        ("whole", "log.trajectories=true", 500e6, 2),
        ("bounded", "log.trajectories=true", 100.0, 1),
    ):
        monkeypatch.setattr("agentenv.training.reports.recorder.MAX_TRAJECTORY_BYTES", max_bytes)
        config = load_config(TrainConfig, warehouse, [override])
        run = RunDirectory(tmp_path / name, resume=False)
        recorder = RunRecorder(config, run, View(), RunState(), tokenizer)
        for step in ("step-000001", "step-000002"):
            await recorder.write_trajectories(step, [a_tree()])
        assert len(list(run.path.glob("trajectories/*"))) == num_files
        told = "no more are written" in caplog.text
        assert told == (name == "bounded")
