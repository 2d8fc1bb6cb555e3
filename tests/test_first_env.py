"""docs/first-env.md: its blocks are one module and one configuration, which train."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv import Task, ToolEnv
from agentenv.adapters.testing import check_tool_env
from agentenv.launchers import evaluate, new, train
from agentenv.launchers.__main__ import COMMANDS
from tests.support.warehouse import ROOT

TEXT = (ROOT / "docs" / "first-env.md").read_text(encoding="utf-8")
SMALL = ["train.num_steps=1", "queue.groups_per_step=2", "learner.groups_per_minibatch=2"]
SMALL += ["algorithm.group_size=4", "sft.gate_every=2", "eval.sets.heldout.max_tasks=2"]
SMALL += ['sft.stages=[{rows="clean", num_steps=2, until_gate=true}]', "checkpoint.every=1"]


def blocks(language: str) -> list[str]:
    """The blocks of a language; "" for commands."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
    return [body for told, body in found if told == language]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the blocks are saved as prices.py and prices.toml."""
    (tmp_path / "prices.py").write_text("\n".join(blocks("python")), encoding="utf-8")
    (config,) = blocks("toml")
    (tmp_path / "prices.toml").write_text(config, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "prices", raising=False)
    return tmp_path


def test_the_code_is_right(folder: Path) -> None:
    prices: Any = importlib.import_module("prices")
    prices.test_prices()
    rows = prices.demonstrate(prices.PricesEnv, [prices.question(Random(1))], prices.solve)
    assert rows[0]["reward"] == 1.0
    (row,) = [json.loads(block) for block in blocks("json")]
    answer = "<answer>1311</answer>"
    (played,) = prices.demonstrate(prices.PricesEnv, [row], lambda task, results: answer)
    assert played["success"]


async def test_the_stateful_tools_keep_the_contract(folder: Path) -> None:
    prices: Any = importlib.import_module("prices")

    class BasketEnv(ToolEnv):
        def __init__(self, task: Task) -> None:
            tools = [prices.BasketTool(), prices.CountTool(), prices.divide]
            super().__init__(task, tools=tools, grader=prices.grader)

    put, task = '<put>{"item": "Nexor", "count": 2}</put>', Task("t", "e", "?", ("2",))
    quotient = '<divide>{"a": 4, "b": 0}</divide>'
    await check_tool_env(BasketEnv, task, [put, "<count></count>", quotient, put, "2"])


def test_the_model_is_trained_and_evaluated(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.support.rank_here import rank_here  # loads torch

    assert train.main(["prices.toml", "--dry-run"]) == 0
    with rank_here():
        assert train.main(["prices.toml", *SMALL]) == 0
    assert (folder / "runs" / "prices" / "checkpoints" / "step-000001").is_dir()
    capsys.readouterr()
    commands = [
        line
        for block in blocks("")
        for line in block.splitlines()
        if line.startswith("agentenv evaluate")
    ]
    assert len(commands) == 1
    for command in commands:
        words = shlex.split(command.partition("  #")[0])
        assert evaluate.main(words[2:]) == 0
        assert "success" in capsys.readouterr().out


def test_the_commands_exist() -> None:
    commands = {
        word for block in blocks("") for word in re.findall(r"^ *agentenv ([a-z]+)", block, re.M)
    }
    assert commands == {"new", "train", "evaluate"}
    assert all(name in COMMANDS for name in commands)
    assert new.NAME.fullmatch("dice")
