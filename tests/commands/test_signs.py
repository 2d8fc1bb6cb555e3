"""Signs of lost turns: their AUC by brute force, their values on a tree, the command on a run."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.lab.diagnosis.signs import NAMES, auc_within, figures, interval, turns
from agentenv.launchers import doctor
from agentenv.rollout.metrics import MeanCurve
from agentenv.rollout.unlearned import LONG, profile, surprise, surprise_by_depth, unlearned_lines
from tests.support.example_tree import example_tree

CASES = st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 2)), max_size=12)


@given(CASES)
def test_the_auc_counts_the_pairs_of_a_stratum(cases: list[tuple[int, bool, int]]) -> None:
    ranks = [
        0.5 if mine == other else float(mine > other)
        for mine, is_lost, stratum in cases
        for other, other_is_lost, other_stratum in cases
        if is_lost and not other_is_lost and stratum == other_stratum
    ]
    columns = [np.array(own) for own in zip(*cases, strict=True)] or [np.zeros(0)] * 3
    found = auc_within(columns[0].astype(float), columns[1].astype(float), columns[2])
    assert found == pytest.approx(np.mean(ranks) if ranks else math.nan, nan_ok=True)


def test_turns_of_failed_rollouts_have_no_outcome_and_shared_ones_the_best_below() -> None:
    tree = example_tree(lambda text: list(text.encode())).tree
    found = {tuple(one.signs): one for one in turns([tree])}
    assert [one.is_lost for one in turns([tree])] == [False, False, True, True, True]
    assert len(found) == 5
    assert {one.stratum for one in found.values()} == {"nuts 0", "nuts 1", "nuts 2"}
    wrong_call = [one for one in found.values() if one.signs[NAMES.index("error")]]
    assert [one.is_lost for one in wrong_call] == [True]
    won = next(one for one in found.values() if one.stratum == "nuts 1" and not one.is_lost)
    assert won.signs[NAMES.index("others")] == 1.0  # the two other trajectories failed
    assert figures("nuts", [*turns([tree])]).auc["error"][0] > 0.5


def test_the_surprise_of_a_depth_is_of_trees_with_a_failure_and_counts_shared_turns_once() -> None:
    tree = example_tree(lambda text: list(text.encode())).tree
    found = surprise_by_depth([tree, tree])
    own = {node.index: node for path in tree.trajectories() for node in path.turns}
    assert sum(found.count) == 2 * len(own)
    first = [surprise(node) for node in own.values() if node.parent == 0]
    assert found.mean[0] == pytest.approx(np.mean(first))
    for path in tree.trajectories():
        path.leaf.info["success"] = True
    assert surprise_by_depth([tree]) == MeanCurve()


@pytest.mark.parametrize(
    ("means", "counts", "where"),
    [
        ([0.1, 0.1, 1.0, 1.0], [9, 9, 9, 9], "late"),
        ([1.0, 1.0, 0.1, 0.1, 9.0], [9, 9, 9, 9, 1], "early"),  # few paths are that long
        ([1.0, 0.1, 1.0, 0.1, 1.0], [9] * 5, "even"),
        ([1.49, 0.09, 1.47, 0.36, 1.47, 0.34, 1.44, 0.29, 0.1], [9] * 9, "even"),  # mixed-8
        ([1.0], [9], ""),
        ([], [], ""),
    ],
)
def test_where_the_unlearned_turns_lie(means: list[float], counts: list[int], where: str) -> None:
    curve = MeanCurve(means, counts)
    assert profile(curve) == where
    lines = unlearned_lines(curve)
    assert len(lines) == (2 if where else 0)
    assert [("rescue" in line, "GRPO" in line) for line in lines[1:]] == [
        (len(means) >= LONG, True) for _ in lines[1:]
    ]


def test_intervals_are_those_of_groups() -> None:
    """Cases of a group are drawn together, so that more of the same say no more."""
    values = np.random.default_rng(0).normal(size=30)
    single = interval(range(30), lambda drawn: float(values[drawn].mean()))
    many = interval(np.repeat(range(30), 9), lambda drawn: float(values.repeat(9)[drawn].mean()))
    assert many == pytest.approx(single)
    assert math.isnan(interval([0] * 9, lambda drawn: float(values[drawn].mean()))[0])


def test_the_command_reads_the_trees_of_a_run(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main(["signs", str(finished)]) == 0
    assert "surprise" in capsys.readouterr().out
    assert doctor.main(["signs", str(finished), "--json", "--last", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found[0]["turns"] > 0
    assert set(found[0]["auc"]) == set(NAMES)


@pytest.mark.parametrize(
    ("arguments", "says"), [(["--first", "99"], "99"), (["--max-trees", "0"], "--max-trees")]
)
def test_bad_arguments_of_the_command(
    finished: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    try:
        code = doctor.main(["signs", str(finished), *arguments])
    except SystemExit as ended:
        code = int(str(ended.code))
    assert code == 2
    assert says in capsys.readouterr().err


def test_another_folder_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["signs", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err
