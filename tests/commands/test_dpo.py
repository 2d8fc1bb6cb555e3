"""Preference training from the command to the checkpoint, from files and by own answers."""

from __future__ import annotations

import json
from math import log
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from agentenv.assembly.keys.supervised import DPORunConfig
from agentenv.base.config import build_config
from agentenv.base.errors import ConfigError
from agentenv.base.tree import TrajectoryTree, to_json
from agentenv.base.types import Task
from agentenv.launchers import dpo, train
from agentenv.training.supervised.data import pairs_of, read_pair_row
from tests.commands.supervised import make_supervised, run_small
from tests.support.golden import Golden, Said
from tests.support.runs import rows_of

pytestmark = pytest.mark.usefixtures("here")
TABLES = """\
[data]
train = "pairs"
eval = "pairs-heldout"
dataset_info = "{folder}/dataset_info.json"
max_samples = 64
max_length = 256
[dpo]
batch_size = 8
gradient_accumulation = 1
num_steps = 6
[learner]
learning_rate = 2e-3
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, preferences, and a configuration that the tests change by overrides."""
    return make_supervised(tmp_path_factory.mktemp("dpo"), TABLES)


@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_held_out_answers_are_preferred(workspace: Path, tuning: str) -> None:
    """Also by the policy itself: the chosen answer's log-prob rises over the rejected one's."""
    found = run_small(dpo, workspace, tuning, f"dpo.tuning={tuning}", "checkpoint.every=3")
    rows = rows_of(found)
    before, after = [row for row in rows if "eval/loss" in row]
    assert before["eval/loss"] == pytest.approx(log(2), abs=1e-5)
    assert (before["eval/accuracy"], before["eval/margin"]) == (0.0, 0.0)
    assert after["eval/accuracy"] > 0.9
    assert after["eval/margin"] > 0.2
    assert after["eval/reward_chosen"] > after["eval/reward_rejected"]
    gap = [row["eval/logprob_chosen"] - row["eval/logprob_rejected"] for row in (before, after)]
    assert gap[1] > gap[0] + 2.0, "nats; beta 0.1 makes a margin of 0.2 of them"
    steps = [row for row in rows if "dpo/loss" in row]
    assert steps[-1]["dpo/loss"] < steps[0]["dpo/loss"] - 0.1
    assert steps[-1]["dpo/accuracy"] > steps[0]["dpo/accuracy"]
    assert (found / "checkpoints" / "step-000006" / "adapter").is_dir() == (tuning == "lora")

    # resumes in the middle, with the same reference, to the same weights
    whole = found / "checkpoints" / "step-000006" / "model.safetensors"
    expected = load_file(whole)
    again = [str(workspace / "small.toml"), f"run.name={tuning}", f"dpo.tuning={tuning}"]
    resume = ["checkpoint.every=3", "--resume", str(found / "checkpoints" / "step-000003")]
    assert dpo.main([*again, *resume]) == 0
    weights = load_file(whole)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_contradictory_settings_are_refused() -> None:
    raw: dict[str, Any] = {"model": {"path": "m"}, "data": {"train": "t"}}
    config = build_config(DPORunConfig, raw, "t")
    assert config.learner.lora is not None
    assert (config.learner.lora.r, config.dpo.beta, config.data.max_length) == (8, 0.1, 8192)
    wrong = {"dpo": {"tuning": "full"}, "learner": {"lora": {"r": 4}}}
    with pytest.raises(ConfigError, match="set only one"):
        build_config(DPORunConfig, raw | wrong, "t")


BAD_PAIRS: list[dict[str, Any]] = [
    {"prompt": "a", "chosen": "b", "rejected": "b"},
    {"prompt": "a", "chosen": "b"},
    {key: [1] for key in ("prompt_ids", "chosen_ids", "rejected_ids", "rejected_mask")}
    | {"chosen_mask": []},
    {"prompt_ids": "x"},
    {"chosen": "me", "rejected": "no"},
    {"prompt": "Who?", "chosen": [{"role": "user", "content": "Who?"}], "rejected": "no"},
]


@pytest.mark.golden("dpo")
def test_bad_pairs_are_refused_with_file_and_row(tmp_path: Path, golden: Golden) -> None:
    config = make_supervised(tmp_path, TABLES) / "small.toml"
    for number, row in enumerate(BAD_PAIRS):
        path = tmp_path / f"bad-{number}.jsonl"
        path.write_text(json.dumps(row) + "\n")
        golden.run(dpo, config, f"data.train={path}", "data.dataset_info=", "data.eval=", status=2)


def tree() -> TrajectoryTree:
    """A shared first turn, then a right and two wrong answers; a fourth trajectory failed."""
    grown = TrajectoryTree(Task("t", "env", "?", ("a",)))
    root = grown.add(None, observation_ids=[1, 2])
    turn = grown.add(root, action_ids=[3], logprobs=[-1.0], observation_ids=[4, 5])
    for token, reward in ((6, 1.1), (7, 0.0), (8, 0.9)):
        grown.add(turn, action_ids=[token, 9], logprobs=[0, 0], reward=reward, end="terminated")
    grown.add(turn, action_ids=[10], logprobs=[0], end="failed")
    return grown


def test_answers_of_a_tree_are_paired_by_reward() -> None:
    pairs = list(pairs_of(tree(), 1.0, 4, Random(0)))
    assert [pair.chosen_ids for pair in pairs] == [[3, 4, 5, 6, 9]] * 2
    assert sorted(pair.rejected_ids for pair in pairs) == [[3, 4, 5, 7, 9], [3, 4, 5, 8, 9]]
    assert pairs[0].chosen_mask == [1, 0, 0, 1, 1], "tool results are not the policy's"
    assert len(list(pairs_of(tree(), 1.0, 1, Random(0)))) == 1
    assert not list(pairs_of(tree(), 2.0, 4, Random(0))), "no answer is good enough"
    assert not list(pairs_of(tree(), -1.0, 4, Random(0))), "none is bad enough"


def test_a_file_of_trees_is_a_file_of_pairs() -> None:
    row = json.loads(to_json(tree()))
    assert len(read_pair_row(row, 1.0, 4, Random(0))) == 2


CRITIC = ["self_critic={every=2, num_questions=4, num_samples=6, batch_size=4, num_epochs=2, "
          'optimizer={optimizer="adamw", learning_rate=2e-3}}']  # fmt: skip


def test_the_self_critic_alone_prefers_the_answers_that_the_reward_finds_right(
    warehouse: Path, workspace: Path
) -> None:
    arguments = [str(warehouse), "run.name=critic", *CRITIC]
    assert dpo.main([*arguments, "--self-critic", "2"]) == 0
    found = warehouse.parent / "runs" / "critic"
    rounds = [row for row in rows_of(found) if "self_critic/num_pairs" in row]
    assert [row["policy_version"] for row in rounds] == [1, 2]
    for row in rounds:
        assert row["self_critic/num_pairs"] >= 4
        assert row["self_critic/num_mixed"] >= 1
        assert row["self_critic/num_steps"] == 2 * -(-row["self_critic/num_pairs"] // 4)
        assert row["self_critic/loss"] < log(2) - 0.05
        assert row["self_critic/accuracy"] > 0.9
    # its pairs train the same way from a file
    files = str(found / "pairs" / "round-000000.jsonl")
    keys = [f"data.train={files}", "data.dataset_info=", "data.eval=", "data.max_length=512"]
    again = run_small(dpo, workspace, "of-rounds", *keys, "dpo.num_steps=3")
    losses = [row["dpo/loss"] for row in rows_of(again)]
    assert losses[-1] < losses[0] - 0.05


def test_rounds_between_updates_do_not_increase_the_policy_version(warehouse: Path) -> None:
    one = "self_critic.pairs_per_question=1"
    assert train.main([str(warehouse), "run.name=critical", "train.num_steps=5", *CRITIC, one]) == 0
    found = warehouse.parent / "runs" / "critical"
    steps = [row for row in rows_of(found) if "trees/offered" in row]
    rounds = [row for row in steps if "self_critic/num_pairs" in row]
    assert [row["step"] for row in rounds] == [3, 5]
    assert all(row["self_critic/num_pairs"] == row["self_critic/num_mixed"] for row in rounds)
    assert all(row["self_critic/loss"] < log(2) for row in steps if "self_critic/loss" in row)
    versions = [row["policy_version"] for row in steps]
    assert versions[-1] <= 5
    assert max(row["staleness/max"] for row in steps) <= 1
    assert len(list((found / "pairs").iterdir())) == 2
    assert (found / "trajectories" / "self-critic-000002.jsonl").is_file()


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_the_self_critic_needs_its_table(warehouse: Path, said: Said, more: list[str]) -> None:
    assert "--self-critic requires the" in said(
        dpo.main, warehouse, "run.name=none", "--self-critic", "1", *more, status=2
    )
    assert not (warehouse.parent / "runs" / "none").exists()


@pytest.mark.parametrize("rounds", ["0", "-1", "many"])
def test_rounds_are_counted_from_one(
    warehouse: Path, capsys: pytest.CaptureFixture[str], rounds: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        dpo.main([str(warehouse), "--self-critic", rounds, *CRITIC])
    assert "--self-critic" in capsys.readouterr().err
