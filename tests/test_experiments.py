"""What the figures of the algorithms' benchmark rest on."""

from __future__ import annotations

import json
import tomllib
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import build_config
from agentenv.base.errors import DataError
from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Message, Task
from agentenv.envs.grading.reward import ToolReward
from agentenv.envs.quickstart.world import PEOPLE
from agentenv.evaluation.sets import Curve, calls_to
from agentenv.learners.algorithms.aepo import AEPO
from benchmarks.experiments import algorithms, chain, tables
from benchmarks.experiments.algorithms import against_best, seeds_of
from benchmarks.experiments.forks import fork_points
from benchmarks.experiments.intervals import difference_at, gain, ratio_of_calls, success_at
from benchmarks.experiments.runs import (
    ARMS,
    NO_PARTS,
    arm_config,
    num_updates,
    quickstart,
    start_config,
    to_toml,
    train,
)
from benchmarks.experiments.signals import (
    auc,
    auc_within,
    interval,
    level,
    lift,
    rise,
    spearman,
    worth,
)
from benchmarks.experiments.tables import BEGIN, END, publish

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


def test_an_arm_that_misses_the_level_is_counted() -> None:
    slow, fast = curve([0, 100], [0.1, 0.5]), curve([0, 100], [0.1, 0.9])
    assert ratio_of_calls([(slow, fast), (fast, fast)], 0.8).num_missed == 1


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


def test_small_groups_make_as_many_trajectories() -> None:
    assert [num_updates(arm, 12) for arm in ("grpo", "grpo-6", "grpo-5", "grpo-4", "arpo")] == [
        *(12, 16, 20, 24, 12)
    ]


def test_gain_is_last_minus_first() -> None:
    found = gain([curve([0, 9], [0.25, 0.75])])
    assert found.value == pytest.approx(0.5)
    assert found.low < 0.5 < found.high


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
    signal, positive = np.array([1.0, 2.0, 3.0, 4.0]), np.array([0.0, 0.0, 1.0, 1.0])
    assert auc(signal, positive) == 1.0
    assert auc(-signal, positive) == 0.0
    assert auc(np.zeros(4), positive) == 0.5
    assert spearman(signal, signal**3) == pytest.approx(1.0)
    assert lift(signal, positive) == pytest.approx(2.0)
    assert lift(np.zeros(4), positive) == pytest.approx(1.0)


@pytest.mark.parametrize("shows", [False, True])
def test_a_demonstration_looks_a_chain_up_link_by_link(shows: bool) -> None:
    mistakes = 0
    for seed in range(20):
        demo = chain.demonstration(Random(seed), 3, "practice", chain.any_form(shows))
        calls = [turn for turn in demo["turns"] if turn["result"]]
        found = [turn for turn in calls if turn["result"] != chain.NOTHING]
        mistakes += len(calls) - len(found)
        assert len(found) == 3
        assert len(calls) <= chain.LIMITS["max_turns"]
        for before, after in pairwise(found):
            value = before["result"].rpartition(" is ")[2].removesuffix(".")
            assert value in after["action"]
        assert (
            found[-1]["result"]
            .removesuffix(".")
            .endswith(demo["turns"][-1]["action"].partition("{")[2].partition("}")[0])
        )
    assert (mistakes > 0) == shows


@pytest.mark.parametrize("name", chain.HABITS)
def test_at_least_half_of_the_habitual_look_ups_take_a_wrong_form(name: str) -> None:
    habits, shows = chain.HABITS[name], name == "mend"
    forms, rng = chain.World(Random(1), shows).forms, Random(2)
    tries = [chain.poor_form(forms, habits, shows)(rng, "price")[0][0] for _ in range(1000)]
    right = sum(form == forms["price"] for form in tries) / 1000
    assert right == pytest.approx(habits.right, abs=0.05)
    assert habits.right <= 0.5


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


def test_a_question_asks_for_the_last_value_of_its_chain() -> None:
    world = chain.World(Random(5), True)
    row = world.question(Random(6), PEOPLE, 3)
    *relations, start = row["question"].removeprefix("What is the ").removesuffix("?").split(" of ")
    person = start
    for relation in reversed(relations):
        person = world.values[relation.removeprefix("the "), person]
    assert row["answer"] == person


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


def test_an_interval_that_no_draw_moves_is_unknown() -> None:
    rows = [{"run": "r", "question": str(i)} for i in range(3)]
    assert np.isnan(interval(rows, lambda _: 1.0, 20)).all()


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


def test_a_report_of_nothing_says_so(tmp_path: Path, capsys: Any) -> None:
    assert algorithms.main(["--out", str(tmp_path), "--report-only"]) == 1
    assert "no finished arm" in capsys.readouterr().err


def study(tmp_path: Path, arms: tuple[str, ...]) -> dict[str, Any]:
    """A report of two evaluations of each arm on seed 7."""
    rows = [(0, "10000000"), (1, "11111111")]
    calls = {"arpo": 80, "grpo-4": 100}
    for arm in arms:
        run = tmp_path / "study" / "seed-7" / arm
        run.mkdir(parents=True)
        (run / "summary.json").write_text('{"forks_total": 3, "cpu_s": {"rl": 1.5}}')
        (run / "metrics.jsonl").write_text(
            json.dumps({"step": 1, "rollout/tool_calls": calls[arm]}) + "\n"
        )
        for step, bits in rows:
            folder = run / "eval" / (f"step-{step:06d}" if step else "before_sft")
            folder.mkdir(parents=True)
            found = [
                {"dataset": "heldout", "task": str(place), "sample": 0, "success": bit == "1"}
                for place, bit in enumerate(bits)
            ]
            (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return algorithms.report(tmp_path / "study")


def test_tables_take_their_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = study(tmp_path, ("grpo-4", "arpo"))
    assert result["runs"]["arpo"][7]["points"][1] == {"step": 1, "calls": 80, "right": "1" * 8}
    (tmp_path / "docs" / "img").mkdir(parents=True)
    page = tmp_path / "docs" / "experiments.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    (tmp_path / "a.png").write_bytes(b"picture")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    publish(result, tmp_path / "a.png")
    assert "old" not in page.read_text()
    assert "0.12 | 1.00" in page.read_text()
    assert page.read_text().endswith("after\n")
    assert (tmp_path / "docs" / "img" / "algorithms.png").read_bytes() == b"picture"
    page.write_text("nothing\n")
    with pytest.raises(DataError, match=r"experiments.md.*0"):
        publish(result, tmp_path / "a.png")


def test_tables_of_arpo_alone_are_not_published(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs the arm"):
        publish(study(tmp_path, ("arpo",)), tmp_path / "a.png")


def test_a_run_of_other_settings_is_not_taken_for_this_one(tmp_path: Path) -> None:
    study(tmp_path, ("arpo",))
    folder = tmp_path / "study" / "seed-7"
    (folder / "arpo.toml").write_text("[run]\n")
    assert train(folder, "arpo", {"run": {}})
    with pytest.raises(DataError, match="with other settings"):
        train(folder, "arpo", {"run": {"seed": 1}})
