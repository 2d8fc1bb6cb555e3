"""`launchers/new.py` makes an environment that keeps its contract and trains as it is."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from agentenv.lab.diagnosis.audit import audit
from agentenv.launchers import doctor, new, train
from tests.support.golden import Said
from tests.support.snippets import ran

# as it is, but for sizes: a few steps of each phase
SMALL = [
    "train.num_steps=2",
    "queue.groups_per_step=2",
    "learner.groups_per_minibatch=2",
    "algorithm.group_size=4",
    'sft.stages=[{rows="clean", num_steps=4, until_gate=true}, {rows="mixed", num_steps=2}]',
    "sft.gate_every=2",
    "sft.missed_gate=warn",
    "eval.sets.heldout.max_tasks=4",
]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("My-Env", "a letter first; did you mean my_env?"),
        ("1st", "a letter first"),
        ("class", "expected a name for a Python package"),
        ("../up", "expected a name for a Python package"),
        ("json", "is already imported by that name; choose another"),
        ("envs", "is already imported by that name; choose another"),
    ],
)
def test_a_name_that_no_package_can_have_is_refused(
    name: str, told: str, tmp_path: Path, said: Said
) -> None:
    assert told in said(new.main, name, "--folder", tmp_path, status=2)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_overwritten(tmp_path: Path, said: Said) -> None:
    (tmp_path / "dice_game").mkdir()
    assert "dice_game already exists" in said(new.main, "dice_game", "--folder", tmp_path, status=2)
    assert "no such folder" in said(new.main, "other", "--folder", tmp_path / "none", status=2)
    assert [path.name for path in tmp_path.iterdir()] == ["dice_game"]


def test_the_next_commands_are_printed(tmp_path: Path, said: Said) -> None:
    told = said(new.main, "dice_game", "--folder", tmp_path)
    assert "created " in told
    for command in (
        "-m pytest dice_game",
        "--config dice_game/train.toml --quick",
        f"cd {tmp_path}",
    ):
        assert command in told
    text = "".join(path.read_text() for path in (tmp_path / "dice_game").iterdir())
    assert "class DiceGameEnv(ToolEnv)" in text
    assert "NAME" not in text


@pytest.mark.parametrize(("kind", "number"), [("env", 2), ("state", 3)])
def test_the_generated_test_passes(kind: str, number: int, tmp_path: Path) -> None:
    new.make_folder("dice_tested", tmp_path, kind)
    words = ("pytest", "-q", "-p", "no:cacheprovider", "dice_tested")
    assert f"{number} passed" in ran(sys.executable, "-m", *words, cwd=tmp_path).stdout


def test_the_doctor_finds_no_fault_in_a_generated_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    new.make_folder("dice_examined", tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = ["--config", "dice_examined/train.toml", "--quick", "--offline"]
    status, told = doctor.main(words), capsys.readouterr().out
    assert status == 0, told
    assert "reformatted ones correct" in " ".join(told.split())


@pytest.mark.parametrize(("kind", "algorithm"), [("env", "grpo"), ("state", "arpo")])
def test_a_generated_environment_trains(
    kind: str,
    algorithm: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    here: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A state is tried before forks, and its rewards are not graded again without it."""
    name = f"dice_{kind}"
    options = ["--state"] if kind == "state" else []
    assert new.main([name, "--folder", str(tmp_path), *options]) == 0
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    words = [f"{name}/train.toml", *SMALL, f"algorithm.name={algorithm}"]
    assert train.main([*words, "--dry-run"]) == 0
    assert train.main([*words, "sft.missed_gate=end", "run.name=ended"]) == 2
    ended = capsys.readouterr()
    assert train.main(words) == 0
    shown = capsys.readouterr()
    for told in (ended.err, shown.out + shown.err):
        assert re.search(r"0\.7:.*0\.00, 0\.00\)", told)
    run = tmp_path / "runs" / name
    assert json.loads((run / "summary.json").read_text())["algorithm"] == algorithm
    assert (run / "checkpoints" / "step-000002").is_dir()
    regraded, _ = asyncio.run(audit(run, 4))
    assert regraded.state == ("passed" if kind == "env" else "skipped"), regraded
