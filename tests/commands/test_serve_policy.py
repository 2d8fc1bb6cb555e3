"""agentenv serve SUBJECT: an evaluation of the served policy is that of the policy itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.evaluation.store import read_rows
from agentenv.launchers import evaluate
from tests.support.chat_models import QWEN3
from tests.support.served import KEY, KEY_ENV, ServedPolicy
from tests.support.warehouse import STOCK


def search_policy(prompt: str, rng: Random) -> str:
    """Thinks, makes two calls, one of them such that it cannot be read, and guesses."""
    if "<tool_response>" in prompt:
        return f"<think>\nso\n</think>\n\n<answer>{rng.choice([*STOCK.values(), 'none'])}</answer>"
    item = rng.choice(list(STOCK))
    calls = (f'{{"name": "stock", "arguments": {{"item": "{item}"}}}}', '{"name": "stock", ')
    written = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    return f"<think>\n{rng.random()}\n</think>\n\nI look.\n{written}"


ENGINES: dict[str, dict[str, Any]] = {
    "scripted": {"name": "scripted", "script": "tests.commands.evaluating:guessing"},
    "embedded": {"name": "embedded"},
    "native": {"name": "scripted", "script": f"{__name__}:search_policy"},
}


@pytest.mark.parametrize("engine", ENGINES)
def test_an_evaluation_of_the_url_has_the_rows_of_the_model(
    engine: str, warehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)
    folder, keys = warehouse.parent, ENGINES[engine]
    protocol, model = "tags", folder / "model"
    if engine == "native":
        protocol, model = "native", shutil.copytree(model, tmp_path / "model")
        (model / "chat_template.jinja").write_text(QWEN3)

    def evaluated(subject: str, name: str, *more: str) -> int:
        arguments = [subject, "--env", "me/Warehouse-v0", "env.module=my_env", "num_samples=2"]
        arguments += ["--n", "6", f"data={folder}/a.jsonl", "--out", str(tmp_path / name)]
        limits = {"max_prompt_tokens": 500, "max_response_tokens": 500}
        limits["max_turn_tokens"] = 200 if protocol == "native" else 40
        arguments += [f"limits.{key}={value}" for key, value in limits.items()]
        return evaluate.main([*arguments, *more])

    given = [f"renderer.name={protocol}", *[f"engine.{k}={v}" for k, v in keys.items()]]
    assert evaluated(str(model), "own", *given) == 0
    with ServedPolicy(model, engine=keys, renderer={"name": protocol}) as served:
        assert evaluated(served.url, "url", f"engine.api_key_env={KEY_ENV}") == 0
    own, by_url = ({row.key: row for row in read_rows(tmp_path / name)} for name in ("own", "url"))
    assert len(own) == 12
    assert by_url.keys() == own.keys()
    for key, row in own.items():
        other = by_url[key]
        said = [part["policy"] for part in row.segments if "policy" in part]
        assert [part["policy"] for part in other.segments if "policy" in part] == said
        assert (other.success, other.reward, other.end) == (row.success, row.reward, row.end)
        assert other.action_tokens == row.action_tokens
        assert engine == "embedded" or len(said) == 2
