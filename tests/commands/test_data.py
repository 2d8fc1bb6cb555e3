"""The keys of [data] and [eval.sets.NAME] reach the loader, in training and in evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.parts.assembly import load_set
from agentenv.base.config import build_config, load_config, to_plain
from agentenv.base.errors import AgentEnvError
from agentenv.base.types import Task
from agentenv.data.dataset import TaskMix
from agentenv.data.rows import ColumnsConfig
from agentenv.evaluation.subject import Subject, of_run
from agentenv.launchers import evaluate, train
from agentenv.rollout.actor import Actor
from tests.support.golden import Said
from tests.support.json_files import write_rows


def configured(warehouse: Path, *overrides: str) -> TrainConfig:
    return load_config(TrainConfig, warehouse, overrides)


async def training(warehouse: Path, *overrides: str) -> tuple[list[Task], list[str]]:
    said: list[str] = []
    config = configured(warehouse, *overrides)
    return list(await load_set(config.data, "env", Path, said.append)), said


async def test_the_keys_of_data_reach_the_loader(warehouse: Path, tmp_path: Path) -> None:
    row = {"q": "q", "answer": "a", "ability": "math"}
    write_rows(tmp_path / "1.jsonl", [row, {"answer": "b"}, row])
    write_rows(tmp_path / "2.jsonl", [row])
    tasks, said = await training(
        warehouse,
        f"data.train=['{tmp_path}/1.jsonl', '{tmp_path}/2*']",
        "data.columns.question=q",
        "data.env_by.math=me/Warehouse-v0",
        "data.skip_bad_rows=true",
        "data.max_samples=3",
    )
    assert [task.id for task in tasks] == ["1-1", "1-3", "2-1"]
    assert {task.env_id for task in tasks} == {"me/Warehouse-v0"}
    assert "data: " in said[0]
    assert "'q', which columns.question" in said[0]


async def test_a_mix_replaces_data_train(warehouse: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "x.jsonl", [{"question": "q", "answer": "a"}])
    config = configured(
        warehouse,
        'data.train=""',
        f'data.mix=[{{path = "{path}", weight = 3}}, {{path = ["{path}"], env_id = "other"}}]',
    )
    mix = await load_set(config.data, "env", Path, lambda _: None)
    assert isinstance(mix, TaskMix)
    assert [task.env_id for task in mix] == ["env", "other"]
    assert sorted(mix.pattern) == [0, 0, 0, 1]
    assert build_config(TrainConfig, to_plain(config), "saved") == config  # as a run saves it


def test_prompts_that_are_all_too_long_cannot_be_skipped(warehouse: Path, said: Said) -> None:
    keys = ("limits.max_prompt_tokens=20", "data.overlong_prompt=skip")
    assert "skipped all 24" in " ".join(
        said(train.main, warehouse, "run.name=bad-rows", *keys, status=2).split()
    )


def test_an_environment_that_rows_choose_must_exist(
    warehouse: Path, tmp_path: Path, said: Said
) -> None:
    row = {"question": "How many bolts are there?", "answer": 1240, "ability": "stock"}
    path = write_rows(tmp_path / "x.jsonl", [row, {**row, "env_id": "me/Warehose-v0"}])
    arguments = [str(warehouse), "run.name=bad-env", f"data.train={path}"]
    assert "registered as 'me/Warehose-v0'" in said(train.main, *arguments, status=2)
    write_rows(tmp_path / "x.jsonl", [row])
    assert "data.env_by.stock: no environment" in said(
        train.main, *arguments, "data.env_by.stock=me/None-v0", status=2
    )


def test_an_evaluation_reads_the_rows_of_a_run_as_the_run_did(
    warehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = {"ask": "How many bolts are there?", "answer": "1240", "source": "shelf"}
    path = write_rows(tmp_path / "x.jsonl", [stock, {"answer": 1}, {**stock, "ask": "bolts " * 99}])
    columns = '{question = "ask", kind = "source"}'
    config = configured(
        warehouse,
        f'eval.sets.a={{path = ["{path}"], columns = {columns}, skip_bad_rows = true, '
        f'overlong_prompt = "skip"}}',
    )
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.json").write_text(json.dumps(to_plain(config)))
    raw = of_run(run, ["a"])
    assert raw["sets"]["a"]["columns"] == to_plain(ColumnsConfig(question="ask", kind="source"))
    seen: list[Task] = []

    async def rollout(self: Actor, task: Task, *_: Any, **__: Any) -> Any:
        seen.append(task)
        raise AgentEnvError("enough was seen")

    monkeypatch.setattr(Actor, "rollout", rollout)
    subject = Subject("run", raw, run, warehouse.parent / "model")
    monkeypatch.setattr(evaluate, "subject_of", lambda *_, **__: subject)
    assert evaluate.main([str(run), "--out", str(tmp_path / "out")]) == 1
    assert [(task.question, task.kind, task.id) for task in seen] == [
        ("How many bolts are there?", "shelf", "x-1")
    ]
