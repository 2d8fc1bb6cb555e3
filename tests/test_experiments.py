"""What the figures of the algorithms' benchmark rest on."""

from __future__ import annotations

import tomllib
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from agentenv.config import build_config
from agentenv.tree import Node, TrajectoryTree
from agentenv.types import Task
from experiments.algorithms import pairs_of, seeds_of
from experiments.chain import demonstration
from experiments.forks import fork_points
from experiments.runs import ARMS, NO_PARTS, arm_config, quickstart, start_config, to_toml
from experiments.signals import auc, auc_within, level, lift, ranks, rise, spearman, worth
from experiments.stats import (
    Curve,
    calls_to,
    difference_at,
    gain,
    ratio_of_calls,
    success_at,
)
from launchers.config import TrainConfig
from learners.aepo import AEPO

CALLS = np.array([0.0, 100.0, 300.0])


def curve(calls: list[float], shares: list[float], num_questions: int = 40) -> Curve:
    """Success as given; which questions are right grows from the first on."""
    right = [[float(i < share * num_questions) for i in range(num_questions)] for share in shares]
    return Curve(np.array(calls, float), np.array(right))


def test_calls_to_a_level_are_interpolated() -> None:
    assert calls_to(CALLS, np.array([0.2, 0.6, 0.8]), 0.7) == (pytest.approx(200.0), True)
    assert calls_to(CALLS, np.array([0.2, 0.6, 0.5]), 0.7) == (300.0, False)
    assert calls_to(CALLS, np.array([0.9, 0.6, 0.9]), 0.7) == (0.0, True)
    assert success_at(CALLS, np.array([0.2, 0.6, 0.8]), 200) == pytest.approx(0.7)


def test_twice_as_fast_is_a_ratio_of_a_half_with_an_interval_around_it() -> None:
    pairs = [
        (curve([0, 100, 200], [0.2, 0.6, 1.0]), curve([0, 200, 400], [0.2, 0.6, 1.0]))
        for _ in range(4)
    ]
    found = ratio_of_calls(pairs, 0.8, num_draws=200)
    assert found.value == pytest.approx(0.5)
    assert found.low <= 0.5 <= found.high
    assert (found.num_seeds, found.num_missed) == (4, 0)
    assert difference_at(pairs, 200, num_draws=200).value == pytest.approx(0.4)


def test_equal_arms_show_no_difference_because_questions_are_paired() -> None:
    same = curve([0, 100, 200], [0.1, 0.5, 0.9])
    found = difference_at([(same, same)] * 3, 150, num_draws=100)
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_an_arm_that_misses_the_level_is_counted() -> None:
    slow, fast = curve([0, 100], [0.1, 0.5]), curve([0, 100], [0.1, 0.9])
    assert ratio_of_calls([(slow, fast), (fast, fast)], 0.8, num_draws=50).num_missed == 1


def test_arms_are_compared_over_equally_many_updates() -> None:
    long, short = curve([0, 50, 90], [0.1, 0.2, 0.9]), curve([0, 60], [0.1, 0.3])
    ((one, other),) = pairs_of({"a": {7: long, 8: long}, "b": {7: short}}, "a", "b")
    assert (one.calls.tolist(), other.calls.tolist()) == ([0, 50], [0, 60])


def test_gain_is_last_minus_first() -> None:
    assert gain([curve([0, 9], [0.25, 0.75])], num_draws=50).value == pytest.approx(0.5)


def test_every_arm_is_a_valid_configuration(tmp_path: Path) -> None:
    raw = quickstart()
    start = start_config(raw, 3, 16)
    assert tomllib.loads(to_toml(start)) == start
    build_config(TrainConfig, start, "start")
    for arm in ARMS:
        config = arm_config(raw, arm, tmp_path, 3, 8, 16)
        assert tomllib.loads(to_toml(config)) == config
        built = build_config(TrainConfig, config, arm)
        assert built.sft is None
        assert built.data.train == f"{tmp_path}/data/train.jsonl"


def test_parts_of_aepo_are_switched_on_one_at_a_time() -> None:
    off = AEPO(**NO_PARTS)  # type: ignore[arg-type]
    for arm in (arm for arm in ARMS if arm.startswith("arpo+")):
        changed = {name for name in NO_PARTS if ARMS[arm][name] != getattr(off, name)}
        assert len(changed) == 1


def test_seeds_are_read_as_ranges() -> None:
    assert seeds_of("200-202,7") == [200, 201, 202, 7]


def row(after: list[float], first: list[float] | None = None) -> dict[str, Any]:
    return {"after": after, "first": first or [0.1, 0.1]}


def test_signals_by_hand() -> None:
    assert rise(row([0.3, 0.5, 9.0]), 2) == pytest.approx(0.3)
    assert level(row([0.3, 0.5, 9.0]), 2) == pytest.approx(0.4)


def test_rank_statistics_by_hand() -> None:
    assert ranks(np.array([3.0, 1.0, 3.0])).tolist() == [2.5, 1.0, 2.5]
    signal, positive = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 0.0, 1.0, 1.0])
    assert auc(signal, positive) == 1.0
    assert auc(-signal, positive) == 0.0
    assert auc(np.zeros(4), positive) == 0.5
    assert spearman(signal, signal**3) == pytest.approx(1.0)
    assert lift(signal, positive) == pytest.approx(2.0)
    assert lift(np.zeros(4), positive) == pytest.approx(1.0)


@pytest.mark.parametrize("habit", ["clean", "refuse", "quit", "slip"])
def test_a_chain_is_looked_up_link_by_link(habit: str) -> None:
    for seed in range(20):
        demo = demonstration(Random(seed), 4, "mixed", habit)
        calls = [turn for turn in demo["turns"] if turn["result"]]
        assert len(calls) in {"clean": [4], "refuse": [0], "quit": [1, 2, 3]}.get(
            habit, range(1, 5)
        )
        for before, after in pairwise(calls):
            person = after["action"].removesuffix("</search>").rpartition(" of ")[2]
            assert f" is {person}." in before["result"]
        gives_up = r"\boxed{unknown}" in demo["turns"][-1]["action"]
        assert gives_up == (habit in ("refuse", "quit"))


def test_what_the_stratum_says_alone_is_no_information_within_it() -> None:
    signal = np.array([1.0, 1.0, 5.0, 5.0])
    positive = np.array([0.0, 1.0, 1.0, 1.0])
    assert auc(signal, positive) > 0.5
    assert auc_within(signal, positive, ["a", "a", "b", "b"]) == 0.5
    assert auc_within(np.array([1.0, 2.0, 5.0, 5.0]), positive, ["a", "a", "b", "b"]) == 1.0


def test_a_fork_point_is_worth_what_its_siblings_bring() -> None:
    tree = TrajectoryTree(Task("t", "toy", "q", ("a",)))
    prompt = tree.add(None, observation_ids=[1])

    def turn(above: Node, branch: str, entropy: float, **fields: Any) -> Node:
        ids = {"action_ids": [1], "entropies": [entropy]}
        return tree.add(above, branch=branch, **ids, **fields)

    call = {"tool_calls": [{"name": "search"}]}
    first = turn(prompt, "0", 0.125, observation_ids=[2], info=call)
    turn(first, "0", 0.75, end="terminated", reward=9.0)
    for number, reward in enumerate([0.0, 1.0], 1):
        right = {"success": reward > 0}
        turn(first, f"0.1+{number}", 0.2, end="terminated", reward=reward, info=right)
    turn(prompt, "1", 0.3, end="terminated", reward=2.0)
    (row,) = fork_points(tree)
    assert (row["first"], row["after"]) == ([0.125], [0.75])
    assert row["returns"] == [0.0, 1.0]  # not that of the trajectory whose entropies are the signal
    assert worth([row])[1].tolist() == [1.0]
    assert (row["tool"], row["depth"], row["calls"]) == ("search", 1, 0.0)
