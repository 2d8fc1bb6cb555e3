"""A user's mistake is refused with its place and a way out, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launchers import evaluate, sft, train
from tests.support.warehouse import ROOT


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("queue.max_stalenes=2", "queue.max_stalenes: unknown key; did you mean "
         "queue.max_staleness?"),
        ("algorithm.name=arop", "'rloo'] or 'module:Class', got 'arop'; did you mean 'arpo'?"),
        ("algorithm.budget_beta=2", "unknown key for algorithm.name = 'arpo'"),
        ("engine.max_num_seqs=4", "unknown key for engine.name = 'scripted'"),
        ("queue.groups_per_step=many", "queue.groups_per_step: Expected `int`, got `str`: 'many'"),
        ("queue.groups_per_step=0", "queue.groups_per_step: Expected `int` >= 1"),
        ("queue.groups_per_step=3", "groups_per_minibatch = 2 does not divide"),
        ("train.num_epochs=1.0", "give exactly one of train.num_steps and train.num_epochs"),
        ("sampling.train.top_p=0.9", "sampling.train: training samples from the policy itself"),
        ("data.train=/nowhere/x.jsonl", "/nowhere/x.jsonl: there is no such dataset file"),
        ("model.path=/nowhere", "/nowhere is not a model directory: config.json is missing"),
        ("env.id=me/Warehose-v0", "no environment is registered as 'me/Warehose-v0'; did you mean "
         "me/Warehouse-v0"),
        ("env.module=nowhere", "env.module: 'nowhere' cannot be imported"),
        ("env.kwargs={size=3}", "me/Warehouse-v0 cannot be made with ['size']"),
        ("limits.max_response_tokens=100000", "exceed the engine's context of"),
        ("checkpoint.best_metric=dev/reward", "there is no evaluation set 'dev'"),
        ("run.setup=nowhere:prepare", "run.setup: 'nowhere:prepare' cannot be loaded"),
        ("run.dir=/dev/null/runs", "cannot be written"),
        ("nonsense", "'nonsense' is not of the form key.sub=value"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_configuration(
    warehouse: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    name = f"run.name=bad-{abs(hash(override))}"
    assert message in refused(capsys, train.main([str(warehouse), name, override]))
    # nothing is left that would be in the way of the next try
    assert message in refused(capsys, train.main([str(warehouse), name, override]))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the dataset is empty"),
        ([{"question": "q", "answer": "a"}, {"answer": "a"}], "row 2: key 'question'"),
        ([{"question": "q"}], "row 1: key 'answer'"),
    ],
)
def test_a_mistake_in_the_dataset(
    warehouse: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[object],
    message: str,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(warehouse), "run.name=bad-data", f"data.train={path}"]
    text = refused(capsys, train.main(arguments))
    assert f"{path}" in text
    assert message in text


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("nowhere.toml", ""),
        ("configs/quikstart.toml", "; did you mean configs/quickstart.toml?"),
        ("configs/quickstart", "; did you mean configs/quickstart.toml?"),
        ("run.seed=1", "; the file comes first, then key.sub=value"),
    ],
)
def test_a_configuration_file_that_is_not_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argument: str, hint: str
) -> None:
    monkeypatch.chdir(ROOT)
    told = refused(capsys, train.main([argument]))
    assert f"{argument}: there is no such configuration file{hint}" in told


def test_a_configuration_of_another_command(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, sft.main([str(ROOT / "configs" / "quickstart.toml")]))
    assert "env: unknown key; known: ['checkpoint', " in told
    assert "or is the file one of another command?" in told


def test_a_directory_that_is_something_else(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("do not touch")
    arguments = [str(warehouse), f"run.dir={tmp_path}", "run.name=mine"]
    assert "is not empty and no run: it holds 'thesis.tex'" in refused(
        capsys, train.main(arguments)
    )
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "do not touch"


def test_resuming_what_never_ran(warehouse: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(warehouse), "run.name=never", "--resume"]
    assert "holds no run to resume" in refused(capsys, train.main(arguments))


def test_evaluating_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(tmp_path), "--env", "agentenv/Quickstart-v0", "data=x.jsonl"]
    assert "is not a model directory" in refused(capsys, evaluate.main(arguments))
