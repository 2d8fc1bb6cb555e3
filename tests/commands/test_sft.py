"""Supervised fine-tuning from the command to the checkpoint, on the quick start's model."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from agentenv.assembly.keys.supervised import LoopConfig, SFTRunConfig
from agentenv.base.config import build_config
from agentenv.base.errors import ConfigError, DataError
from agentenv.launchers import sft
from agentenv.training.supervised.data import split
from agentenv.training.supervised.run import rows_of_step, smoothed
from tests.commands.supervised import make_supervised, run_small
from tests.support.golden import Golden, Said
from tests.support.runs import rows_of

pytestmark = pytest.mark.usefixtures("here")
PNG = b"\x89PNG"


TABLES = """\
[data]
train = "{folder}/sharegpt.jsonl"
eval = "{folder}/sharegpt-heldout.jsonl"
max_samples = 120
max_length = 512
[sft]
batch_size = 4
gradient_accumulation = 1
num_steps = 20
[learner]
optimizer = "muon_adamw"
learning_rate = 1e-2
muon_learning_rate = 1.2e-2
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, dialogues, and a configuration that the tests change by overrides."""
    return make_supervised(tmp_path_factory.mktemp("sft"), TABLES)


def test_the_loss_on_held_out_dialogues_falls(workspace: Path) -> None:
    found = run_small(sft, workspace, "falls", "sft.eval_every=10", "checkpoint.every=10")
    rows = rows_of(found)
    losses = [row["eval/loss"] for row in rows if "eval/loss" in row]
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 10, 20]
    assert losses[0] > 4
    assert losses[2] < losses[1] < losses[0] - 2
    steps = [row for row in rows if "sft/loss" in row]
    assert [row["step"] for row in steps] == list(range(1, 21))
    assert steps[-1]["sft/loss"] < steps[0]["sft/loss"] - 2
    rates = [row["learning_rate"] for row in steps]
    assert rates[0] == pytest.approx(5e-3), "warm-up over a tenth of the steps"
    assert max(rates) == rates[1] == rates[2] == pytest.approx(1e-2)
    assert rates[-1] < 1e-3, "cosine"
    assert (found / "loss.png").read_bytes().startswith(PNG)
    summary = json.loads((found / "summary.json").read_text())
    assert summary["after"]["loss"] == losses[2]
    assert summary["after"]["token_accuracy"] > summary["before"]["token_accuracy"] + 0.3
    names = sorted(path.name for path in (found / "checkpoints").iterdir())
    assert names == ["step-000010", "step-000020"]
    model = AutoModelForCausalLM.from_pretrained(found / "checkpoints" / "step-000020")
    began = json.loads((workspace / "model" / "config.json").read_text())
    assert model.config.vocab_size == began["vocab_size"]


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    return load_file(checkpoint / "model.safetensors")


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_a_resumed_run_ends_with_the_same_weights(workspace: Path, kind: str) -> None:
    keys = ["sft.num_steps=4", "checkpoint.every=2", "data.max_length=256"]
    if kind == "lora":
        keys += ["learner.optimizer=adamw", "learner.lora={r=4}"]
    found = run_small(sft, workspace, f"resumed-{kind}", *keys)
    first, whole = found / "checkpoints" / "step-000002", found / "checkpoints" / "step-000004"
    expected, rows = weights(whole), rows_of(found)
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(weights(first)[name], expected[name])
    arguments = [str(workspace / "small.toml"), f"run.name=resumed-{kind}", *keys]
    assert sft.main([*arguments, "--resume", str(first)]) == 0
    told = (found / "run.log").read_text()
    assert "resuming" in told
    assert "changed since" not in told
    again = weights(whole)
    assert all(torch.equal(again[name], expected[name]) for name in expected)
    assert [row["step"] for row in rows_of(found)] == [row["step"] for row in rows]
    losses = [[row.get("sft/loss") for row in part] for part in (rows, rows_of(found))]
    assert losses[0] == losses[1]


def test_a_run_killed_before_its_first_checkpoint_logs_each_step_once(workspace: Path) -> None:
    whole = run_small(sft, workspace, "before-checkpoint", "sft.num_steps=2")
    told = [row["step"] for row in rows_of(whole)]
    shutil.rmtree(whole / "checkpoints")
    run_small(sft, workspace, "before-checkpoint", "sft.num_steps=2", "--resume")
    assert [row["step"] for row in rows_of(whole)] == told


def test_bad_rows_can_be_skipped_and_a_split_is_evaluated(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = (workspace / "sharegpt.jsonl").read_text().splitlines()[:9]
    path = workspace / "some-bad.jsonl"
    path.write_text("\n".join([*good[:4], "{}", *good[4:]]) + "\n")
    keys = [f"data.train={path}", "data.eval=", "data.eval_split=0.34", "data.skip_bad_rows=true"]
    found = run_small(sft, workspace, "some-bad", *keys, "sft.num_steps=1")
    assert "1 invalid rows" in capsys.readouterr().out
    assert "5: no dialogue" in (found / "run.log").read_text()
    summary = json.loads((found / "summary.json").read_text())
    assert summary["num_rows"] == 6
    assert summary["after"]["loss"] > 0


@pytest.mark.golden("sft")
def test_mistakes_in_the_configuration(tmp_path: Path, golden: Golden) -> None:
    config = make_supervised(tmp_path, TABLES) / "small.toml"
    for override in (
        "learner.groups_per_minibatch=4",
        "data.eval_split=0.1",
        "sft.num_epochs=1.0",
        "sft.bath_size=1",
        "data.train=/nowhere.jsonl",
        "data.max_length=2",
    ):
        golden.run(sft, config, "run.name=wrong", override, status=2)


def test_sequences_longer_than_the_model_are_refused(workspace: Path, said: Said) -> None:
    turns = [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "Zorvex " * 1100}]
    path = workspace / "long.jsonl"
    path.write_text(json.dumps({"conversations": turns}) + "\n")
    keys = ["run.name=long", f"data.train={path}", "data.max_length=15000"]
    assert "1024; set data.max_length=1024" in said(
        sft.main, workspace / "small.toml", *keys, status=2
    ).replace("\n", " ")


def test_each_epoch_uses_every_row_once_in_its_own_order() -> None:
    steps = [rows_of_step(10, 4, 0, step) for step in range(6)]
    epochs = [[*chain(*steps[:3])], [*chain(*steps[3:])]]
    assert [sorted(epoch) for epoch in epochs] == [list(range(10))] * 2
    assert epochs[0] != epochs[1]
    assert rows_of_step(10, 4, 0, 1) == steps[1], "any step can be asked again"


def test_steps_are_counted_in_epochs_or_given() -> None:
    assert LoopConfig(batch_size=4, gradient_accumulation=2).count_steps(20) == 9
    assert LoopConfig(batch_size=8, gradient_accumulation=1, num_epochs=0.5).count_steps(64) == 4
    assert LoopConfig(num_steps=7).count_steps(1) == 7


def test_a_split_is_a_share_or_a_number_of_rows() -> None:
    for size in (0.2, 2.0):
        learned, held = split(list(range(10)), size, seed=3)
        assert len(held) == 2
        assert sorted(learned + held) == list(range(10))
    with pytest.raises(DataError, match="none of 10"):
        split(list(range(10)), 10.0, seed=3)


def test_defaults_are_those_of_the_published_recipe() -> None:
    raw = {"model": {"path": "m"}, "data": {"train": "t"}}
    config = build_config(SFTRunConfig, raw, "t")
    assert config.data.max_length == 15_000
    learner = config.learner
    assert (learner.learning_rate, learner.schedule, learner.warmup_ratio) == (7e-6, "cosine", 0.1)
    assert config.sft.rows_per_step == 16
    assert config.sft.count_steps(54_000) == 3 * 3375
    with pytest.raises(ConfigError, match=r"checkpoint.keep_best"):
        build_config(SFTRunConfig, raw | {"checkpoint": {"keep_best": True}}, "t")


def test_the_running_mean_is_right_from_its_first_value() -> None:
    assert smoothed([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smoothed([1.0, 2.0]) == pytest.approx([1.0, (0.09 + 0.2) / 0.19])
