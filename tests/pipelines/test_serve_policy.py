"""agentenv serve SUBJECT: an evaluation of the served policy is that of the policy itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentenv.launchers import evaluate
from agentenv.pipelines.evaluation.store import read_rows
from tests.support.served import KEY, KEY_ENV, ServedPolicy

ENGINES: dict[str, dict[str, Any]] = {
    "scripted": {"name": "scripted", "script": "tests.pipelines.evaluating:guessing"},
    "embedded": {"name": "embedded"},
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_rows_of_the_url_are_those_of_the_model(
    engine: str, warehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_ENV, KEY)
    monkeypatch.setattr(evaluate, "write_report", lambda *_: None)
    folder, keys = warehouse.parent, ENGINES[engine]

    def evaluated(subject: str, name: str, *more: str) -> int:
        arguments = [subject, "--env", "me/Warehouse-v0", "env.module=my_env", "num_samples=2"]
        arguments += ["--n", "6", f"data={folder}/a.jsonl", "--out", str(tmp_path / name)]
        limits = {"max_turn_tokens": 40, "max_prompt_tokens": 300, "max_response_tokens": 300}
        arguments += [f"limits.{key}={value}" for key, value in limits.items()]
        return evaluate.main([*arguments, *more])

    model = folder / "model"
    assert evaluated(str(model), "own", *[f"engine.{k}={v}" for k, v in keys.items()]) == 0
    with ServedPolicy(model, engine=keys, renderer={"name": "tags"}) as served:
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
