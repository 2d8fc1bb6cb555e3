"""Attacks on the host, on other sessions and on the sandbox itself, on each rung offered here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.base.errors import ConfigError
from agentenv.envs.sandbox.launch import Rung
from agentenv.lab.diagnosis.doctor import RUNGS
from tests.check_sandbox import read_attacks
from tests.support.escapes import FILES, MARK, attack_all, host_secrets, known_attacks
from tests.support.sandboxes import children
from tests.support.snippets import ran

ROOT = Path(__file__).resolve().parents[3]
ATTACKS = known_attacks()
GROUPS = read_attacks(FILES[1])
RARE = {"numbers_of_x32", "calls_of_32_bits"}  # few kernels have them


@pytest.mark.parametrize("rung", RUNGS)
async def test_no_attack_succeeds_on_any_rung(rung: Rung) -> None:
    assert len(ATTACKS) >= 40
    try:
        outcomes = await attack_all(ATTACKS, rung, timeout_s=1.0)
    except ConfigError as error:
        pytest.skip(f"not offered here: {error}")
    assert {name: one.hole for name, one in outcomes.items() if one.hole} == {}
    assert children() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="the kernel itself refuses much to ordinary users")
def test_each_group_of_attacks_succeeds_without_a_sandbox() -> None:
    """Otherwise its failure in a sandbox would show nothing."""
    stopped = []
    with host_secrets() as places:
        for name, code in GROUPS.items():
            # a shell between: of it are the processes that a snippet starts beside itself
            command = ["sh", "-c", '"$@"; exit', "sh", sys.executable, "-c", places.fill_in(code)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if MARK not in result.stdout and name not in RARE:
                stopped.append((name, result.stderr[-200:]))
    assert stopped == []
    assert children() == []


def test_the_command_reports_attacks_that_succeed(tmp_path: Path) -> None:
    snippets = {"holds": "open('{SECRET_FILE}'); print('PWNED')", "leaks": "print('PWNED')"}
    path = tmp_path / "attacks.json"
    for names, code in (({"holds"}, 0), ({"holds", "leaks"}, 1)):
        path.write_text(json.dumps({name: snippets[name] for name in sorted(names)}))
        result = ran(sys.executable, "tests/check_sandbox.py", path, expected=code)
        assert "stopped (raised)" in result.stdout
        assert ("THROUGH: it printed" in result.stdout) == ("leaks" in names)
