"""benchmarks/experiments/study.py: which runs its stages ask for, and how results are kept."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import build_config
from agentenv.base.errors import DataError
from benchmarks.experiments import study as command
from benchmarks.experiments.algorithms import configuration
from benchmarks.experiments.study import Cell, Study

CALLS = range(0, 4001, 200)
NEEDED = {"uniform-turnwise": 400, "spread-turnwise": 600, "arpo": 800, "gigpo-4": 900}
SIZES = {"grpo-4": 1000, "grpo-5": 1100, "grpo-6": 1200, "grpo-8": 1300, "grpo-12": 1400}


def learned(cell: Cell, best_rate: float = 4.0) -> list[dict[str, object]]:
    """Points of a run that needs so many calls to 0.7: more at any rate but the best one."""
    needed = (NEEDED | SIZES).get(cell.arm, 2000) * (1 + abs(math.log2(cell.rate / best_rate)))
    right = [min(10, round(7 * calls / needed)) for calls in CALLS]
    return [
        {"calls": float(calls), "tokens": 10.0 * calls, "right": "1" * one + "0" * (10 - one)}
        for calls, one in zip(CALLS, right, strict=True)
    ]


class Synthetic(Study):
    best = 4.0

    def run(self, cell: Cell) -> None:
        best = self.best if cell.arm == "arpo" else 4.0
        row = {**cell._asdict(), "digest": self.digest, "points": learned(cell, best), "cpu_s": 1.0}
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._add(row)

    def finish(self, stage: str) -> set[Cell]:
        """Run all of a stage; returns what was run."""
        before = set(self.known)
        while cells := list(self.missing(stage)):
            for cell in cells:
                self.run(cell)
        return set(self.known) - before


def test_stages_keep_the_best_arms_tune_them_and_confirm_the_winner(tmp_path: Path) -> None:
    study = Synthetic(tmp_path)
    ran = {stage: study.finish(stage) for stage in "abcd"}
    assert {cell.arm for cell in ran["a"]} == set(study.plan["arms"])
    assert len(ran["a"]) == len(study.plan["arms"]) * 2 * 2  # two tasks, two rates, one seed
    assert {cell.arm for cell in ran["b"]} == {*NEEDED, "grpo-4", "grpo-5"}
    assert {cell.rate for cell in ran["c"] | ran["d"]} == {4.0}
    tuned = {cell for cell in ran["c"] if cell.task != "quickstart"}
    assert {cell.arm for cell in tuned} == {*NEEDED, "grpo-4"}
    assert len(tuned) == 5 * 3 * 10
    assert {cell.arm for cell in ran["c"] - tuned} == {"uniform-turnwise", "grpo-4"}
    assert {cell.arm for cell in ran["d"]} == {"uniform-turnwise", "grpo-4"}
    assert not {cell.seed for cell in ran["d"]} & {cell.seed for cell in ran["c"]}


@pytest.mark.parametrize(("best", "extended"), [(2.0, {1.0}), (30.0, {16.0, 32.0}), (4.0, ())])
def test_a_best_rate_at_the_edge_extends_the_grid(
    tmp_path: Path, best: float, extended: set[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NEEDED, "arpo", 300)  # so that stage a keeps it
    study = Synthetic(tmp_path)
    study.best = best
    study.finish("a")
    study.finish("b")
    rates = study.rates("mend", "arpo", study.plan["stages"]["b"]["seeds"])
    assert set(rates) == {2.0, 4.0, 8.0, *extended}


def test_a_run_that_misses_a_level_is_not_the_cheapest(tmp_path: Path) -> None:
    study = Synthetic(tmp_path)
    study.finish("a")
    few = Cell("mend", "arpo", 16.0, 900)
    points = [{"calls": 0.0, "tokens": 0.0, "right": "0" * 10}]
    points += [{"calls": 9.0, "tokens": 9.0, "right": "0" * 10}]
    study._add({**few._asdict(), "digest": study.digest, "points": points, "cpu_s": 1.0})
    assert study.best_rate("mend", "arpo", "a") == 4.0


def test_results_go_on_and_belong_to_one_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Synthetic(tmp_path)
    study.finish("a")
    assert not list(Study(tmp_path).missing("a"))
    assert command.main(["--out", str(tmp_path), "--stage", "a", "--report-only"]) == 0
    assert "chain; baseline grpo-4@4" in capsys.readouterr().out
    changed = tmp_path / "study.toml"
    changed.write_text(command.FILE.read_text() + "\n# changed\n")
    with pytest.raises(DataError, match="fixed before its"):
        Study(tmp_path, changed)


@pytest.mark.parametrize("task", ["mend", "chain", "noisy", "quickstart"])
def test_every_arm_of_the_study_is_a_valid_configuration(tmp_path: Path, task: str) -> None:
    study = Study(tmp_path)
    sampled = set()
    for arm in study.plan["arms"]:
        config = study.config(Cell(task, arm, 0.5, 900), configuration(task), tmp_path)
        built = build_config(TrainConfig, config, arm)
        every = built.eval.sets["heldout"].every
        assert built.train.num_steps % every == 0
        sampled.add(
            built.train.num_steps * built.queue.groups_per_step * built.algorithm.group_size
        )
        assert built.learner.learning_rate == 0.5 * configuration(task)["learner"]["learning_rate"]
    assert max(sampled) <= 1.1 * min(sampled)
