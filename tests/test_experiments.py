"""What the figures of the algorithms' benchmark rest on."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from random import Random

import numpy as np
import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import build_config
from agentenv.base.errors import DataError
from agentenv.base.types import Message, Task
from agentenv.envs.grading.reward import ToolReward
from agentenv.envs.quickstart.world import PEOPLE
from agentenv.evaluation.sets import Curve, calls_to
from benchmarks.experiments import chain
from benchmarks.experiments.algorithms import against_best
from benchmarks.experiments.intervals import difference_at, ratio_of_calls, success_at
from benchmarks.experiments.runs import ARMS, arm_config, quickstart, start_config, to_toml, train

CALLS = np.array([0.0, 100.0, 300.0])


def curve(calls: list[float], shares: list[float], num_questions: int = 40) -> Curve:
    """Success as given; which questions are right grows from the first on."""
    right = [[float(i < share * num_questions) for i in range(num_questions)] for share in shares]
    return Curve(np.array(calls, float), np.array(right), np.array(calls, float))


def test_calls_to_a_level_are_interpolated() -> None:
    assert calls_to(CALLS, np.array([0.2, 0.6, 0.8]), 0.7) == (pytest.approx(200.0), True)
    assert calls_to(CALLS, np.array([0.2, 0.6, 0.5]), 0.7) == (300.0, False)
    assert calls_to(CALLS, np.array([0.9, 0.6, 0.9]), 0.7) == (0.0, True)
    assert success_at(CALLS, np.array([0.2, 0.6, 0.8]), 200) == pytest.approx(0.7)


def test_twice_as_fast_is_a_ratio_of_a_half_with_an_interval_around_it() -> None:
    pairs = [
        (curve([0, 100 + i, 200], [0.2, 0.6, 1.0]), curve([0, 200, 400], [0.2, 0.6, 1.0]))
        for i in range(-2, 3)
    ]
    found = ratio_of_calls(pairs, 0.8)
    assert found.value == pytest.approx(0.5, abs=0.001)
    assert 0.49 < found.low < found.value < found.high < 0.51
    assert (found.num_seeds, found.num_missed) == (5, 0)
    assert difference_at(pairs, 200).value == pytest.approx(0.4, abs=0.002)


def test_equal_arms_show_no_difference_and_how_far_that_is_known() -> None:
    same = curve([0, 100, 200], [0.1, 0.5, 0.9])
    found = difference_at([(same, same)] * 3, 150)
    assert found.value == 0.0
    assert found.low < 0 < found.high
    assert ratio_of_calls([(same, same)] * 3, 0.5).low is None
    assert ratio_of_calls([(same, curve([0, 90], [0.1, 0.5]))], 0.5).low is None  # of one seed


def test_a_run_that_collapses_early_is_not_the_cheaper_one() -> None:
    whole, collapsed = curve([0, 200, 400], [0.2, 0.6, 0.8]), curve([0, 20], [0.2, 0.0])
    assert ratio_of_calls([(collapsed, whole)], 0.6).value == pytest.approx(400 / 200)
    assert ratio_of_calls([(collapsed, whole)], 0.9).value == 1.0  # neither meets it


def test_the_baseline_is_the_grpo_that_needs_the_fewest_calls_to_the_level() -> None:
    """Small groups are ahead early and never come to 0.9, as a lucky few calls would have it."""
    curves = {
        "grpo": {1: curve([0, 400, 800], [0.2, 0.7, 0.95]), 2: curve([0, 400, 800], [0.2, 0.7, 1])},
        "grpo-4": {seed: curve([0, 100, 300], [0.2, 0.7, 0.85]) for seed in (1, 2)},
        "grpo-5": {1: curve([0, 10, 20], [0.2, 0.9, 1.0])},  # not on all seeds
        "arpo": {seed: curve([0, 150, 600], [0.2, 0.7, 0.95]) for seed in (1, 2)},
    }
    found = against_best(curves, "arpo")
    assert (found["calls to 0.7"]["base"], found["calls to 0.9"]["base"]) == ("grpo-4", "grpo")
    assert found["calls to 0.7"]["value"] == pytest.approx(1.5)
    assert found["calls to 0.9"]["value"] < 1
    assert found["success at 250"]["base"] == "grpo-4"
    assert found["success at 250"]["value"] < 0


def test_every_arm_is_a_valid_configuration(tmp_path: Path) -> None:
    raw = quickstart()
    start = start_config(raw, 3, 16)
    assert tomllib.loads(to_toml(start)) == start
    build_config(TrainConfig, start, "start")
    for arm in ARMS:
        config = arm_config(raw, ARMS[arm], tmp_path, 3, 8, 16)
        assert tomllib.loads(to_toml(config)) == config
        built = build_config(TrainConfig, config, arm)
        assert built.sft is None
        assert built.data.train == f"{tmp_path}/data/train.jsonl"


@pytest.mark.parametrize("shows", [False, True])
async def test_one_form_of_a_query_is_understood(tmp_path: Path, shows: bool) -> None:
    world = chain.World(Random(5), shows)
    (tmp_path / "facts.json").write_text(json.dumps(world.results), encoding="utf-8")
    env = chain.ChainEnv(Task("t", "bench/Chain-v0", "q", ("a",)), str(tmp_path / "facts.json"))
    await env.reset(seed=0)
    search = env.tools["search"]
    assert set(world.forms.values()) == set(range(len(chain.FORMS)))
    for relation, person in list(world.values)[:: len(PEOPLE) // 3]:
        right = chain.say(relation, person, world.values[relation, person])
        for form in range(len(chain.FORMS)):
            result = await search.call({"query": chain.query(form, relation, person)}, None)
            assert (result.text == right) == (form == world.forms[relation])
            assert (result.text == chain.NOTHING) == (shows and result.text != right)
    await env.close()


async def test_a_share_of_the_rewards_is_the_wrong_way_round_and_no_success_is() -> None:
    grader, task = chain.Noisy(ToolReward(), 0.1), Task("t", "e", "q", ("7",))
    flipped = 0
    for number in range(400):
        right = number % 2 == 0
        text = rf"<think>{number}</think><answer>\boxed{{{7 if right else 8}}}</answer>"
        grade = await grader.grade(task, [Message("assistant", text)], {})
        assert grade.success == right
        flipped += grade.reward != float(right)
    assert 20 <= flipped <= 65


def test_a_run_of_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    (tmp_path / "arpo").mkdir()
    (tmp_path / "arpo" / "summary.json").write_text("{}")
    (tmp_path / "arpo.toml").write_text("[run]\n")
    assert train(tmp_path, "arpo", {"run": {}})
    with pytest.raises(DataError, match="with other settings"):
        train(tmp_path, "arpo", {"run": {"seed": 1}})
