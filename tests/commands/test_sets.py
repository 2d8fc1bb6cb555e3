"""Sets of runs: a sweep trains arms and seeds and resumes after an interruption; a comparison pairs
them by seed and question."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentenv.base.errors import ConfigError, DataError
from agentenv.evaluation import sets
from agentenv.evaluation.sweep import Made, SweepConfig, check, grid, remember, runs_of, seeds_of
from agentenv.launchers import compare as compare_command
from agentenv.launchers import sweep as sweep_command
from tests.support.golden import Said
from tests.support.warehouse import ROOT


@pytest.mark.parametrize(
    ("text", "seeds"), [("0-2", [0, 1, 2]), ("7", [7]), ("3,1-2,3", [3, 1, 2]), ([5, 5], [5])]
)
def test_seeds_are_numbers_and_ranges(text: str, seeds: list[int]) -> None:
    assert seeds_of(text) == seeds


@pytest.mark.parametrize("text", ["", "a", "3-1", "1-", "-1", "1;2"])
def test_invalid_seeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 0-4,7"):
        seeds_of(text)


def test_an_arm_for_each_combination_of_values() -> None:
    arms = grid(["algorithm.name=arpo,grpo", "a.betas=[0.9, 0.95],[0.8]"])
    assert list(arms.values()) == [
        ["algorithm.name=arpo", "a.betas=[0.9, 0.95]"],
        ["algorithm.name=arpo", "a.betas=[0.8]"],
        ["algorithm.name=grpo", "a.betas=[0.9, 0.95]"],
        ["algorithm.name=grpo", "a.betas=[0.8]"],
    ]
    assert all(re.fullmatch(r"[\w.+=-]+", name) for name in arms)
    for wrong in ("algorithm.name", "=3", "a=", "a=1,,2"):
        with pytest.raises(ConfigError, match=r"expected key\.sub=value,value"):
            grid([wrong])


def quickstart(**keys: Any) -> SweepConfig:
    given = {"config": str(ROOT / "configs" / "quickstart.toml"), "seeds": "0-1", **keys}
    return SweepConfig(**{"arms": {"a": []}, **given})


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"arms": {}}, "needs at least one arm"),
        ({"arms": {"a b": []}}, "a name has letters"),
        ({"arms": {"start": []}}, "is not 'start'"),
        ({"arms": {"a": ["learner.lr=1"]}}, "did you mean"),
        ({"arms": {"a": ["model.path={start}"]}}, "requires the key `start`"),
        ({"baseline": "b"}, "baseline 'b' is not an arm"),
        ({"seeds": []}, "needs at least one"),
        ({"start": ["train.num_steps=x"]}, "train.num_steps"),
    ],
)
def test_mistakes_are_refused_before_anything_starts(keys: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        check(quickstart(**keys))


def test_runs_of_a_seed_have_its_number_and_its_start_run(tmp_path: Path) -> None:
    config = quickstart(
        start=["train.num_steps=0"], after_start=["model.path={start}"], arms={"a": [], "b": []}
    )
    runs = list(runs_of(tmp_path, check(config)))
    expected = [(arm, seed) for seed in (0, 1) for arm in ("start", "a", "b")]
    assert [(run.arm, run.seed) for run in runs] == expected
    assert runs[4].overrides == (f"model.path={tmp_path.resolve()}/start/seed-1",)


def test_a_folder_has_one_sweep_that_accepts_more_arms_and_seeds(tmp_path: Path) -> None:
    first = remember(tmp_path / "s", check(quickstart()))
    more = remember(tmp_path / "s", check(quickstart(seeds="1-2", arms={"b": ["run.seed=1"]})))
    assert (first.seeds, more.seeds, list(more.arms)) == ([0, 1], [0, 1, 2], ["a", "b"])
    with pytest.raises(ConfigError, match=r"arms\.b"):
        remember(tmp_path / "s", check(quickstart(arms={"b": []})))
    with pytest.raises(ConfigError, match="another sweep: overrides"):
        remember(tmp_path / "s", check(quickstart(overrides=["train.num_steps=3"])))
    (tmp_path / "s" / "sweep.json").write_text("{")
    with pytest.raises(DataError, match=r"sweep\.json"):
        remember(tmp_path / "s", check(quickstart()))


# Comparisons, of runs whose curves are made up.

NUM_QUESTIONS = 40


def make_run(folder: Path, arm: str, seed: int, calls: int, rise: float) -> Path:
    """A finished run of five updates of so many tool calls, each better by `rise`."""
    run = folder / arm / f"seed-{seed}"
    (run / "eval").mkdir(parents=True)
    config = {"run": {"seed": seed, "dir": str(folder)}, "algorithm": {"name": arm}}
    (run / "config.json").write_text(json.dumps(config))
    summary = {"evaluation_set": "heldout", "cpu_s": {"total": 9.0}}
    (run / "summary.json").write_text(json.dumps(summary))
    rng, lines = np.random.default_rng(seed), []
    for step in range(6):
        name = f"step-{step:06d}" if step else "before_sft"
        (run / "eval" / name).mkdir()
        right = rng.random(NUM_QUESTIONS) < min(1.0, 0.1 + rise * step)
        rows = [
            {
                "dataset": "heldout",
                "task": f"q{n}",
                "sample": 0,
                "end": "terminated",
                "success": bool(one),
            }
            for n, one in enumerate(right)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (run / "eval" / name / "rows.jsonl").write_text(text)
        if step:
            row = {"step": step, "rollout/tool_calls": calls, "rollout/sampled_tokens": 10 * calls}
            lines.append(json.dumps({**row, "rollout/led_calls": 0}) + "\n")
    (run / "metrics.jsonl").write_text("".join(lines))
    return run


@pytest.fixture
def made_up(tmp_path: Path) -> dict[str, dict[int, Path]]:
    """Three arms on four seeds: "half" learns as "base" does, by half the calls."""
    arms = {"base": (100, 0.2), "half": (50, 0.2), "slow": (100, 0.1)}
    return {
        arm: {seed: make_run(tmp_path, arm, seed, *keys) for seed in range(4)}
        for arm, keys in arms.items()
    }


def test_an_arm_that_needs_half_the_calls_has_a_ratio_of_one_half(
    made_up: dict[str, dict[int, Path]],
) -> None:
    found, curves = sets.compare(made_up, "base")
    half = found.arms["half"].calls_ratio["0.5"]
    assert half.value == pytest.approx(0.5)  # the same questions, answered alike
    assert half.low == pytest.approx(0.5) == half.high  # drawn alike in both arms
    slow = found.arms["slow"].calls_ratio["0.5"]
    assert slow.low is not None
    assert 1.0 < slow.low < slow.value < (slow.high or 0.0)
    assert found.arms["base"].calls_ratio == {}
    assert curves["half"][0].calls.tolist() == [0, 50, 100, 150, 200, 250]
    assert found.arms["slow"].seeds == [0, 1, 2, 3]
    low, high = found.arms["slow"].after_interval
    assert low < found.arms["slow"].after < high
    assert all(len(table.rows) > 2 for table in sets.tables(found))


def test_a_run_that_misses_a_level_needs_no_fewer_calls_than_the_longest_run() -> None:
    def curve(calls: list[float], success: list[float]) -> sets.Curve:
        right = np.array([[1.0] * round(8 * one) + [0.0] * (8 - round(8 * one)) for one in success])
        return sets.Curve(
            np.array(calls), right, np.array(calls) * 10, is_forkless=not any(success)
        )

    learned = {seed: curve([0, 100, 200, 300], [0.0, 0.25, 0.5, 0.75]) for seed in (1, 2)}
    gave_up = {seed: curve([0, 20, 22, 23], [0.0, 0.0, 0.0, 0.0]) for seed in (1, 2)}
    found = sets.compare_curves({"grpo": learned, "collapsed": gave_up}, "grpo", (0.5,))
    assert sets.tables(found)[0].rows[1][0].endswith("never forked: 2")
    ratio = found.arms["collapsed"].calls_ratio["0.5"]
    assert ratio.value == pytest.approx(300 / 200)
    assert ratio.low is not None
    assert ratio.low >= 1.0
    assert found.arms["collapsed"].calls_to["0.5"] == 300


def test_a_level_that_is_never_reached_is_counted(made_up: dict[str, dict[int, Path]]) -> None:
    found, _ = sets.compare(made_up, "base", levels=(0.5, 0.95))
    assert found.arms["slow"].missed == {"0.5": 0, "0.95": 4}
    assert found.arms["slow"].calls_ratio["0.95"].num_missed == 4
    assert "(4 never)" in str(sets.tables(found)[1].rows)


def test_one_seed_has_no_interval_over_seeds(made_up: dict[str, dict[int, Path]]) -> None:
    found, _ = sets.compare({arm: {0: runs[0]} for arm, runs in made_up.items()}, "base")
    ratio = found.arms["slow"].calls_ratio["0.5"]
    assert (ratio.low, ratio.high, ratio.p) == (None, None, None)


def test_holm_corrects_for_the_number_of_arms() -> None:
    found = [sets.Ratio(1.0, None, None, 5, 0, p) for p in (0.04, 0.01, 0.03)]
    sets._holm(found)
    assert [one.p for one in found] == pytest.approx([0.06, 0.03, 0.06])


def test_arms_are_the_keys_in_which_runs_differ(made_up: dict[str, dict[int, Path]]) -> None:
    runs = [path for seeds in made_up.values() for path in seeds.values()]
    arms = sets.arms_by_keys(runs)
    assert list(arms) == [f'algorithm.name="{name}"' for name in made_up]
    assert all(list(seeds) == [0, 1, 2, 3] for seeds in arms.values())
    with pytest.raises(DataError, match="same arm with"):
        sets.arms_by_keys([runs[0], runs[0].parent / "seed-0" / "."])


@pytest.mark.parametrize(
    ("missing", "error"),
    [
        ("summary.json", "is not a finished run: it has no summary.json"),
        ("eval/before_sft/rows.jsonl", "needs evaluations of set 'heldout' before and after"),
    ],
)
def test_a_run_without_a_curve_is_named(
    made_up: dict[str, dict[int, Path]], missing: str, error: str
) -> None:
    (made_up["half"][2] / missing).unlink()
    with pytest.raises(DataError, match=f"half/seed-2.*{error}"):
        sets.compare(made_up, "base")


def test_a_comparison_is_printed_in_80_columns_and_written(
    made_up: dict[str, dict[int, Path]], tmp_path: Path, said: Said
) -> None:
    arms: dict[str, list[str]] = {arm: [] for arm in made_up}
    seeds = [*range(4), 9]
    made = Made(config="c", config_digest="", overrides=[], arms=arms, seeds=seeds, baseline="base")
    remember(tmp_path, made)
    out = said(compare_command.main, tmp_path)
    shown = out.partition("wrote ")[0]
    assert max(map(len, shown.splitlines())) <= 80
    assert "0.50-0.50" in shown
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "comparison.json").read_bytes())["baseline"] == "base"
    for arguments, error in (
        (["--baseline", "none"], "there is no finished run of 'none'"),
        (["--set", "other"], "needs evaluations of set 'other'"),
    ):
        assert error in said(compare_command.main, tmp_path, *arguments, status=2)


# Whole sweeps, of runs with a scripted policy.


def command(warehouse: Path, out: Path, *more: str) -> list[str]:
    here = warehouse.parent
    return [
        str(warehouse), "train.num_steps=2", f"eval.sets.a.path={here}/a.jsonl",
        "eval.sets.a.every=1", "eval.sets.a.max_tasks=4", "--seeds", "0-1", "--out", str(out),
        "--vary", "algorithm.group_size=2,4", *more,
    ]  # fmt: skip


@pytest.fixture
def importable(warehouse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment and the script of the runs."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{warehouse.parent}")


@pytest.mark.usefixtures("importable")
def test_a_killed_sweep_resumes_and_is_compared(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    arguments = command(warehouse, out)
    assert sweep_command.main([*arguments, "--dry-run"]) == 0
    assert "4 of 4" in capsys.readouterr().out
    assert not out.exists()
    process = subprocess.Popen(
        [sys.executable, "-m", "agentenv.launchers", "sweep", *arguments],
        cwd=warehouse.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    first = out / "group_size=2" / "seed-0"
    end = time.monotonic() + 200
    while not (first / "summary.json").exists() and time.monotonic() < end:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=200)[0]
    assert process.returncode == 130, said
    before = (first / "summary.json").stat().st_mtime_ns
    assert sweep_command.main(arguments) == 0
    assert (first / "summary.json").stat().st_mtime_ns == before
    said = capsys.readouterr().out
    assert "(4 of 4)" in said
    assert f"next: agentenv compare {out}" in said.replace("\n", " ")
    assert compare_command.main([str(out)]) == 0
    assert "group_size=4" in capsys.readouterr().out


@pytest.mark.usefixtures("importable")
def test_a_failed_run_is_listed_and_the_others_are_trained(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "sweep"
    arguments = command(warehouse, out, "--jobs", "2", "--vary", "env.id=me/Warehouse-v0,no/Env-v0")
    arguments[arguments.index("0-1")] = "0"
    arguments = [one for one in arguments if one != "algorithm.group_size=2,4"]
    arguments.remove("--vary")
    arguments.append("limits.max_turns=1")
    assert sweep_command.main(arguments) == 1
    said = capsys.readouterr()
    assert "env.id" in said.out + said.err or "id=no_Env-v0 seed 0" in said.out
    assert "id=me_Warehouse-v0 seed 0" in said.out
    assert "never forked" in said.out
