"""The keys of tools, prompt and renderer, from the command line to the context of the policy."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from agentenv.launchers import evaluate
from tests.commands.evaluating import arguments_of
from tests.support.json_files import rows_in


def repeating_policy(prompt: str, rng: Random) -> str:
    """Calls twice for a known item, then answers with the result."""
    if prompt.count("<result>") < 2:
        return "<think>look</think><stock>bolts</stock>"
    return "<think>done</think><answer>1240</answer>"


def evaluated(warehouse: Path, out: Path, *overrides: str) -> list[dict[str, Any]]:
    keys = ["--n", "2", "--out", str(out), f"data={warehouse.parent}/train.jsonl"]
    keys += ["limits.max_response_tokens=400", "limits.max_prompt_tokens=600"]
    keys += [f"engine.script={__name__}:repeating_policy", *overrides]
    assert evaluate.main(arguments_of(warehouse, *keys)) == 0
    return rows_in(out / "rows.jsonl")


def test_tools_limits_and_prompt_reach_the_policy(warehouse: Path, tmp_path: Path) -> None:
    rows = evaluated(
        warehouse,
        tmp_path,
        'env.tools=[{name = "stock", max_calls = 1}]',
        "limits.on_limit=result",
        "prompt.template=direct",
        "prompt.apply_chat_template=false",
    )
    for row in rows:
        text = json.dumps(row)
        assert "cannot be called" in text
        assert "Answer the question" in text
        assert "terminated" in text
        assert "im_start" not in text
