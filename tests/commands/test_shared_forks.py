"""A state that forks share, which only the policy's own calls reach, in a whole run."""

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
from tests.support.toy_rank import toy_ranks
from tests.test_trial import AnswerEnv, Same, Vault

register("tests/Vault-v0", f"{__name__}:VaultEnv")
register("tests/Same-v0", f"{__name__}:SameEnv")


class VaultEnv(AnswerEnv):
    def __init__(self, task: Task) -> None:
        super().__init__(task, Vault())


class SameEnv(AnswerEnv):
    def __init__(self, task: Task) -> None:
        super().__init__(task, Same())


def turn(prompt: str, rng: Random) -> str:
    results = prompt.split("<result>\n")[1:]
    word = results[0].partition("<")[0].strip() if results else "?"
    call = json.dumps({"room": word, "hour": len(results) // 2})
    return f"<book>{call}</book>" if len(results) < 4 else f"<answer>{rng.random()}</answer>"


def test_a_state_that_forks_share_is_one_warning(
    warehouse: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ["env.id=tests/Vault-v0", f"env.module={__name__}", f"engine.script={__name__}:turn"]
    keys += ["algorithm.base_probability=1", "train.num_steps=2", "run.name=vaulted"]
    with toy_ranks():
        assert train.main([str(warehouse), *keys]) == 0
    (line,) = (one for one in capsys.readouterr().err.splitlines() if "num_shared_states" in one)
    assert "{'room': 'w" in line
    rows = (warehouse.parent / "runs" / "vaulted" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(rows[-1])["env/num_shared_states"] > 0


@pytest.mark.parametrize("name", ["arpo", "grpo"])
def test_dry_run_and_doctor_try_environments_of_any_algorithm(
    warehouse: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    text = warehouse.read_text().replace('"arpo"', f'"{name}"').replace("entropy_window = 4", "")
    (config := warehouse.with_name(f"same-{name}.toml")).write_text(text)
    keys = ["env.id=tests/Same-v0", f"env.module={__name__}", f"engine.script={__name__}:turn"]
    assert train.main([str(config), *keys, "--dry-run"]) == 2
    assert COPY in capsys.readouterr().err
    assert train.main([str(config), *keys, "--dry-run", "env.trial=false"]) == 0
    assert doctor.main(["--config", str(config), *keys, "--quick", "--offline"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"FAIL\W+trials of environments .*{COPY}", said)
