"""Each command of benchmarks/experiments/, small, from a fresh clone of the last commit: two
updates, eight questions. Minutes long, so that `make long` runs it: `pytest tests/study.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.snippets import ran

ROOT = Path(__file__).resolve().parents[1]
SMALL = ("--seeds", "7", "--updates", "2", "--questions", "8")


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("clone") / "agentenv"
    subprocess.run(["git", "clone", "-q", str(ROOT), str(target)], check=True)
    return target


def command(clone: Path, script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    script = f"benchmarks/experiments/{script}.py"
    return ran(sys.executable, script, *arguments, cwd=clone, env=env, timeout=None)


@pytest.fixture(scope="module")
def study(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One seed of ARPO, then one of GRPO with groups of 4, published."""
    out = tmp_path_factory.mktemp("study")
    command(clone, "algorithms", "--out", out, *SMALL, "--arms", "arpo")
    first = (out / "seed-7" / "arpo" / "metrics.jsonl").stat()
    command(clone, "algorithms", "--out", out, *SMALL, "--arms", "arpo", "grpo-4")
    assert (out / "seed-7" / "arpo" / "metrics.jsonl").stat() == first  # finished runs are kept
    return out


def test_curves_have_a_point_for_each_update(study: Path) -> None:
    result = json.loads((study / "results.json").read_text())
    points = result["runs"]["arpo"]["7"]["points"]
    assert [point["step"] for point in points] == [0, 1, 2]
    assert {len(point["right"]) for point in points} == {8}
    assert 0 < points[1]["calls"] < points[2]["calls"]
    assert len(result["runs"]["grpo-4"]["7"]["points"]) == 1 + 4
    assert "against the best" in result["arms"]["arpo"]
    assert (study / "algorithms.png").stat().st_size > 10_000


def test_the_study_is_published(clone: Path, study: Path) -> None:
    command(clone, "algorithms", "--out", study, "--report-only", "--publish")
    status = subprocess.check_output(["git", "status", "--porcelain"], cwd=clone, text=True)
    changed = sorted(line[3:] for line in status.splitlines())
    assert changed == ["docs/experiments.md", "docs/img/algorithms.png"]


def test_the_longer_task_runs(clone: Path, tmp_path: Path) -> None:
    task = ("--task", "chain", "--arms", "grpo-4")
    command(clone, "algorithms", "--out", tmp_path, *SMALL, *task)


SMALL_PLAN = """
levels = [0.1]
questions = 8
epochs = 2
first_rate = 2.0
rates = [2.0]
most_rates = 0
num_sizes = 1
baseline = "grpo"
[tasks]
late-3 = { calls = 60, every = 2 }
[arms]
grpo-4x2 = { name = "grpo", group_size = 4 }
rescue-16x2 = { name = "benchmarks.experiments.rescue:Rescue" }
[stages]
a = { seeds = [7] }
b = { seeds = [7] }
c = { seeds = [7, 9] }
d = { seeds = [10] }
e = { seeds = [9] }
"""


def test_all_stages_of_the_study_and_equal_runs_of_a_seed(clone: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(SMALL_PLAN)
    found = []
    for out in ("one", "two"):
        done = command(clone, "study", "--out", tmp_path / out, "--plan", plan)
        assert "late-3, calls" in done.stdout
        lines = (tmp_path / out / "results.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 2 * (2 + 1 + 1)  # a run of stage a is one of b and c too
        found.append([[(p["calls"], p["led"], p["right"]) for p in row["points"]] for row in rows])
    assert found[0] == found[1]
