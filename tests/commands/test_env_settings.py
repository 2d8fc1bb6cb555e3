"""The keys of tools, prompt and renderer, from the command line to the context of the policy."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.launchers import evaluate, train


def repeating_policy(prompt: str, rng: Random) -> str:
    """Calls twice for a known item, then answers with the result."""
    if prompt.count("<result>") < 2:
        return "<think>look</think><stock>bolts</stock>"
    return "<think>done</think><answer>1240</answer>"


def evaluated(warehouse: Path, out: Path, *overrides: str) -> list[dict[str, Any]]:
    arguments = [str(warehouse.parent / "model"), "--env", "me/Warehouse-v0", "--n", "2"]
    arguments += ["--out", str(out), f"data={warehouse.parent}/train.jsonl", "env.module=my_env"]
    arguments += [
        "engine.name=scripted",
        "limits.max_response_tokens=400",
        "limits.max_prompt_tokens=600",
    ]
    arguments += ["engine.script=tests.commands.test_env_settings:repeating_policy"]
    assert evaluate.main([*arguments, *overrides]) == 0
    lines = (out / "rows.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_tools_limits_and_prompt_reach_the_policy(warehouse: Path, tmp_path: Path) -> None:
    rows = evaluated(
        warehouse,
        tmp_path,
        'env.tools=[{name = "stock", max_calls = 1}]',
        "limits.on_limit=result",
        "prompt.template=direct",
    )
    for row in rows:
        text = json.dumps(row)
        assert "cannot be called" in text
        assert "Answer the question" in text
        assert "terminated" in text


def test_a_base_model_reads_plain_text(warehouse: Path, tmp_path: Path) -> None:
    (plain,) = {
        "im_start" in json.dumps(row)
        for row in evaluated(warehouse, tmp_path / "a", "prompt.apply_chat_template=false")
    }
    (chat,) = {"im_start" in json.dumps(row) for row in evaluated(warehouse, tmp_path / "b")}
    assert (plain, chat) == (False, True)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["renderer.name=native"], "ignores the list of tools"),
        (["renderer.style=hermes"], "renderer.style: unknown key for renderer.name = 'tags'"),
        (["prompt.template=serch"], "did you mean 'search'"),
        (['env.tools=[{name = "stok"}]'], "has no tool 'stok'"),
        (["limits.on_limit=stop"], "limits.on_limit"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_the_start(
    warehouse: Path, overrides: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train.main([str(warehouse), "run.name=refused", *overrides]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
