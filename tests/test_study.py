"""benchmarks/experiments/study.py: which runs its stages ask for, and how results are kept."""

from __future__ import annotations

import json
import lzma
import math
from pathlib import Path

import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import build_config
from agentenv.base.errors import DataError
from benchmarks.experiments import findings, tables
from benchmarks.experiments import study as command
from benchmarks.experiments.algorithms import configuration
from benchmarks.experiments.study import Cell, Study

CALLS = range(0, 4001, 200)
NEEDED = {"anywhere-8x2": 400, "rescue-16x4": 600, "arpo-4x4": 800}
SIZES = {"grpo-4x8": 1000, "grpo-3x5": 1100}


class Synthetic(Study):
    """Runs that need so many calls to 0.7: more at any rate but the best one."""

    best = 2.0

    def __init__(self, out: Path) -> None:
        super().__init__(out)
        self.tasks = {task: self.tasks[task] for task in ("late-8", "mend", "noisy")}
        kept = (*NEEDED, *SIZES, "grpo-8x2", "arpo-8x2")
        self.plan["arms"] = {arm: self.plan["arms"][arm] for arm in kept}

    def run(self, cell: Cell) -> None:
        best = self.best if cell.arm == "arpo-4x4" else 2.0
        needed = (NEEDED | SIZES).get(cell.arm, 2000) * (1 + abs(math.log2(cell.rate / best)))
        self.write(cell, [min(10, round(7 * calls / needed)) for calls in CALLS])

    def write(self, cell: Cell, right: list[int]) -> None:
        points = [
            {"calls": float(calls), "right": "1" * one + "0" * (10 - one)}
            | dict.fromkeys(("led", "roots", "learner_s", "wait_s", "trajectories"), calls / 100)
            for calls, one in zip(CALLS, right, strict=True)
        ]
        row = {**cell._asdict(), "digest": self.digest, "points": points, "clipped": 0.1}
        row["cpu_s"] = 1.0
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self._add(row)

    def finish(self, stage: str) -> set[Cell]:
        """Run all of a stage; returns what was run."""
        before = set(self.known)
        while cells := self.missing(stage):
            for cell in cells:
                self.run(cell)
        return set(self.known) - before


def test_stages_keep_the_best_arms_tune_and_compare_them(tmp_path: Path) -> None:
    study = Synthetic(tmp_path)
    ran = {stage: study.finish(stage) for stage in command.STAGES}
    tuned = set(study.tasks) - {"noisy"}  # which has the choices of mend
    assert {cell.task for cell in ran["a"] | ran["b"]} == tuned
    assert len(ran["a"]) == len(study.plan["arms"]) * len(tuned)  # one seed
    assert {cell.arm for cell in ran["b"]} == {*NEEDED, *SIZES}
    best = {*NEEDED, "grpo-4x8"}
    assert {(cell.arm, cell.rate) for cell in ran["c"] | ran["d"]} == {(arm, 2.0) for arm in best}
    assert len(ran["c"]) == len(ran["d"]) == len(best) * len(study.tasks) * 10
    assert {(cell.task, cell.rate) for cell in ran["e"]} == {("late-8", 1.0)}
    assert not {cell.seed for cell in ran["d"]} & {cell.seed for cell in ran["c"]}


def test_a_stage_may_have_the_best_families_alone_and_a_task_its_own(tmp_path: Path) -> None:
    study = Synthetic(tmp_path)
    study.plan["stages"]["d"]["best"] = 1
    study.plan["arms"]["rescue-16x4"] |= {"tasks": ["mend"]}
    ran = {stage: study.finish(stage) for stage in "abcd"}
    assert {cell.arm for cell in ran["d"]} == {"anywhere-8x2", "grpo-4x8"}
    assert {cell.task for one in ran.values() for cell in one if cell.arm == "rescue-16x4"} == {
        "mend",
        "noisy",
    }


@pytest.mark.parametrize(("best", "extended"), [(1.0, {0.5}), (9.0, {8.0, 16.0}), (2.0, ())])
def test_a_best_rate_at_the_edge_extends_the_grid(
    tmp_path: Path, best: float, extended: set[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(NEEDED, "arpo-4x4", 300)  # so that stage a keeps it
    study = Synthetic(tmp_path)
    study.best = best
    study.finish("a")
    study.finish("b")
    assert set(study.rates("mend", "arpo-4x4", study.seeds("b"))) == {1.0, 2.0, 4.0, *extended}


def test_a_run_that_misses_a_level_is_not_the_cheapest(tmp_path: Path) -> None:
    study = Synthetic(tmp_path)
    study.finish("a")
    study.finish("b")
    for seed in study.seeds("b"):
        study.write(Cell("mend", "arpo-4x4", 0.1, seed), [0] * len(CALLS))
    assert study.best_rate("mend", "arpo-4x4") == 2.0


def test_further_grpos_of_any_size_are_in_the_table(tmp_path: Path) -> None:
    study = Synthetic(tmp_path)
    for stage in "abc":
        study.finish(stage)
    cells = study.more(["grpo-4x2@0.5"], "c", ["mend"])
    assert {cell.seed for cell in cells} == set(study.seeds("c"))
    for cell in cells:
        study.run(cell)
    assert ("grpo-4x2", 0.5) in study.also("c", "mend")
    assert "grpo-4x2@0.5" in study.report("c")
    config = study.config(cells[0], configuration("mend"), tmp_path)
    assert build_config(TrainConfig, config, "").algorithm.group_size == 4
    assert "grpo-4x2" not in study.chosen("mend")


@pytest.mark.parametrize("name", ["grpo-4x2", "grpo-4x2@0", "grpo-x2@1", "arpo-4x4@1"])
def test_a_wrong_name_of_a_further_run_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match="expected grpo-SIZExQUESTIONS@RATE"):
        Synthetic(tmp_path).more([name], "c", [])


def test_costs_count_replays_or_set_ups(tmp_path: Path) -> None:
    study = Synthetic(tmp_path)
    study.run(cell := Cell("mend", "grpo-4x8", 2.0, 900))
    found = {cost: study.curve(cell, cost).calls[-1] for cost in command.COSTS}
    assert found["calls"] == 4040
    assert found["calls, forks by copies"] == 4000
    assert found["calls + 5 set-ups"] == 4200


def test_results_go_on_and_belong_to_one_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = Synthetic(tmp_path)
    study.finish("a")
    assert not Synthetic(tmp_path).missing("a")
    published = study.file.with_suffix(".jsonl.xz")
    published.write_bytes(lzma.compress(study.file.read_bytes()))
    study.file.unlink()
    assert not Synthetic(tmp_path).missing("a")
    assert command.main(["--out", str(tmp_path), "--stage", "a", "--report-only"]) == 0
    assert "late-8, calls" in capsys.readouterr().out
    changed = tmp_path / "study.toml"
    changed.write_text(command.FILE.read_text() + "\n# changed\n")
    changed.with_suffix(".md").write_text("as before")
    with pytest.raises(DataError, match="fixed before its"):
        Study(tmp_path, changed)


def test_the_documentation_has_the_tables_of_the_published_runs() -> None:
    study = Study(findings.OUT)
    text = (tables.ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert findings.tables(study) in text, "python benchmarks/experiments/findings.py --publish"


PLANS = tuple(command.FILE.with_name(f"{name}.toml") for name in ("study", "teach", "width"))


@pytest.mark.parametrize(
    ("plan", "task"), [(p, task) for p in PLANS for task in Study(Path(), p).tasks]
)
def test_every_arm_of_a_study_is_a_valid_configuration(
    tmp_path: Path, plan: Path, task: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Study, "teacher", lambda *_: tmp_path)
    study = Study(tmp_path, plan)
    for arm in study.plan["arms"]:
        config = study.config(Cell(task, arm, 0.5, 900), configuration(task), tmp_path)
        built = build_config(TrainConfig, config, arm)
        assert arm.endswith(f"-{built.algorithm.group_size}x{built.queue.groups_per_step}")
        assert built.learner.learning_rate == 0.5 * configuration(task)["learner"]["learning_rate"]
