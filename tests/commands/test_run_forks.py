"""Forks in whole runs: a state that they share, and algorithms that could fork but never did."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

import pytest

from agentenv.adapters.trial import COPY
from agentenv.base.types import Task
from agentenv.contract.env_registry import register
from agentenv.launchers import doctor, train
from tests import test_trial
from tests.support.toy_rank import toy_ranks

register("tests/Forks-v0", f"{__name__}:ForksEnv")


class ForksEnv(test_trial.AnswerEnv):
    def __init__(self, task: Task, tool: str) -> None:
        super().__init__(task, getattr(test_trial, tool)())


def keys_of(tool: str) -> list[str]:
    keys = ["env.id=tests/Forks-v0", f"env.module={__name__}", f"env.kwargs.tool={tool}"]
    return [*keys, f"engine.script={__name__}:turn"]


def turn(prompt: str, rng: Random) -> str:
    results = prompt.split("<result>\n")[1:]
    word = results[0].partition("<")[0].strip() if results else "?"
    call = json.dumps({"room": word, "hour": len(results) // 2})
    return f"<book>{call}</book>" if len(results) < 4 else f"<answer>{rng.random()}</answer>"


def test_a_state_that_forks_share_is_one_warning(
    warehouse: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["algorithm.base_probability=1", "train.num_steps=2", "run.name=vaulted"]
    with toy_ranks():
        assert train.main([str(warehouse), *keys, *keys_of("Vault")]) == 0
    (line,) = (one for one in capsys.readouterr().err.splitlines() if "num_shared_states" in one)
    assert "{'room': 'w" in line
    rows = (warehouse.parent / "runs" / "vaulted" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["env/num_shared_states"] > 0


ARMS = [("tree_grpo", "Single", True), ("tree_grpo", "Copied", False), ("gigpo", "Single", False)]


@pytest.mark.parametrize(("name", "tool", "never"), ARMS)
def test_a_run_names_its_algorithm_that_never_forked(
    warehouse: Path, name: str, tool: str, never: bool
) -> None:
    """`gigpo` has no forks by default."""
    run = f"{name}-{tool}"
    keys = [f"algorithm.name={name}", "train.num_steps=1", f"run.name={run}"]
    with toy_ranks():
        assert train.main([str(warehouse), *keys, *keys_of(tool)]) == 0
    log = (warehouse.parent / "runs" / run / "run.log").read_text()
    assert ("never forked" in log) is never


@pytest.mark.parametrize("name", ["arpo", "grpo"])
def test_dry_run_and_doctor_try_environments_of_any_algorithm(
    warehouse: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    keys = [*keys_of("Same"), f"algorithm.name={name}"]
    assert train.main([str(warehouse), *keys, "--dry-run"]) == 2
    assert COPY in capsys.readouterr().err
    assert train.main([str(warehouse), *keys, "--dry-run", "env.trial=false"]) == 0
    assert doctor.main(["--config", str(warehouse), *keys, "--quick", "--offline"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"FAIL\W+trials .*{COPY}", said)
