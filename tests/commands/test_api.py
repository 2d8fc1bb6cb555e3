"""`train` and `evaluate` of agentenv: the commands' work, from Python."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import resource
import signal
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv import ConfigError, DataError, Task, ToolEnv, evaluate, tool, train
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import load_config, read_toml, to_plain
from agentenv.contract.env import forget_shared, shared, shared_stats
from agentenv.contract.env_registry import env_ids
from agentenv.envs.qa_grader import ExactMatch
from agentenv.evaluation import run as evaluation_run
from agentenv.launchers import train as command
from agentenv.training import api
from tests.support.warehouse import STOCK

pytestmark = pytest.mark.usefixtures("here")

ROWS = [
    {"question": f"How many {item} are there? ({n})", "answer": count, "kind": item}
    for n in range(4)
    for item, count in STOCK.items()
]
ASKED = {
    "engine": {"name": "scripted", "script": "tests.support.warehouse:warehouse_turn"},
    "limits": {"max_prompt_tokens": 300, "max_response_tokens": 300},
}


@tool
async def stock(item: str) -> str:
    "How many of an item there are."
    return str(STOCK.get(item, 0))


class Warehouse(ToolEnv):
    def __init__(self, task: Task) -> None:
        super().__init__(task, tools=[stock], grader=ExactMatch())


def short(warehouse: Path, tmp_path: Path, **more: Any) -> dict[str, Any]:
    """The content of the warehouse's file, for two updates below tmp_path."""
    raw = read_toml(warehouse)
    raw["run"] = {"dir": str(tmp_path)}
    raw["train"]["num_steps"] = 2
    return {**raw, **more}


def state() -> dict[str, Any]:
    """The process state that a run may change."""
    return {
        "signals": [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)],
        "handlers": list(logging.getLogger().handlers),
        "level": logging.getLogger().level,
        "paths": list(sys.path),
        "variables": dict(os.environ),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "environments": env_ids(),
    }


def test_a_class_rows_and_a_model_in_memory_train(warehouse: Path, tmp_path: Path) -> None:
    """In one process twice, the second time on the model that the first one made."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = warehouse.parent / "model"
    model, tokenizer = (one.from_pretrained(path) for one in (AutoModelForCausalLM, AutoTokenizer))
    raw = short(warehouse, tmp_path)
    for key in ("model", "env", "data"):
        del raw[key]
    before, content = state(), json.dumps(raw)
    for name in ("first", "second"):
        result = train(
            raw,
            {"run.name": name, "queue": {"groups_per_step": 2}},
            model=model,
            tokenizer=tokenizer,
            env=Warehouse,
            data=ROWS,
            held_out=ROWS[:6],
            is_quiet=True,
        )
        assert result.folder == tmp_path / name
        assert result.success is not None
        assert result.success.num_trajectories + result.success.num_failed == 6
        assert result.success.low <= result.success.value <= result.success.high
        assert str(result.success) in str(result)
        assert [row["step"] for row in result.metrics if "trees/offered" in row] == [1, 2]
        assert (result.checkpoint / "config.json").is_file()
        model, tokenizer = result.load()
    assert state() == before
    assert json.dumps(raw) == content  # the caller's own is as it was
    saved = json.loads((tmp_path / "second" / "config.json").read_text())
    assert saved["env"]["id"] == f"{__name__}:Warehouse"  # which a command finds, too
    found = evaluate(result, overrides=ASKED, data=ROWS[:5], out=tmp_path / "asked")
    assert found.success.num_trajectories == 5
    assert {row.question for row in found.rows} == {row["question"] for row in ROWS[:5]}
    assert state() == before


def test_rows_in_memory_replace_the_file_of_a_set(warehouse: Path, tmp_path: Path) -> None:
    """Its other keys, and other sets, stay."""
    file = str(warehouse.parent / "a.jsonl")
    sets = {"other": {"path": file, "max_tasks": 1}, "heldout": {"path": file, "num_samples": 2}}
    raw = short(warehouse, tmp_path, eval={"sets": sets})
    more = {"run.name": "own", "train.num_steps": 1}
    mixed = {"data.train": "", "data.mix": [{"path": file}]}
    result = train(raw, more | mixed, held_out=ROWS[:2], is_quiet=True)
    assert result.success is not None
    assert result.success.num_trajectories == 2 * 2
    assert any("eval/other/success" in row for row in result.metrics)


def test_the_struct_its_content_and_its_file_are_the_same(warehouse: Path) -> None:
    struct = load_config(TrainConfig, warehouse)
    plain = [api._read(one)[0] for one in (struct, to_plain(struct), read_toml(warehouse))]
    built = [api.resolve_config(TrainConfig, one, "x") for one in plain]
    assert built == [struct] * 3


def test_tools_in_memory_are_an_environment(
    warehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = state()

    class Never:
        async def grade(self, *_: Any) -> Any:
            from agentenv import Grade

            return Grade(0.0, False)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = warehouse.parent / "model"
    model, tokenizer = (one.from_pretrained(path) for one in (AutoModelForCausalLM, AutoTokenizer))
    right = evaluate(
        model, ASKED, env=[stock], data=ROWS, tokenizer=tokenizer, max_tasks=9, is_quiet=True
    )
    assert right.success.value is not None
    assert right.success.value > 0.2
    assert right.summary.overall.num_questions == len(right.rows) == 9
    wrong = evaluate(path, ASKED, env=[stock], grader=Never(), data=ROWS, out="never")
    assert wrong.success.value == 0
    assert right.folder.parent == Path(evaluation_run.FOLDER)
    assert state() == before


def test_a_local_class_is_an_environment_of_this_process_only(
    warehouse: Path, tmp_path: Path
) -> None:
    class Inner(Warehouse):
        pass

    path = str(warehouse.parent / "model")
    found = evaluate(path, ASKED, env=Inner, data=ROWS[:3], out=tmp_path / "inner")
    assert {row.env_id.rpartition(".")[2] for row in found.rows} == {"Inner"}
    assert not any("Inner" in one for one in env_ids())
    elsewhere = ["cluster.kind=processes", "cluster.workers=1"]
    with pytest.raises(ConfigError, match="of this process"):
        train(warehouse, elsewhere, env=Inner)


def test_mistakes_are_errors_with_the_text_of_the_command(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = state()
    wrong: list[tuple[str, type[Exception]]] = [
        ("learner.lr=1", ConfigError),
        ("model.path=nowhere", DataError),
        ("data.train=nowhere.jsonl", DataError),
        ("engine.script=nowhere:script", ConfigError),
    ]
    for override, kind in wrong:
        arguments = [override, f"run.dir={tmp_path}"]
        with pytest.raises(kind) as caught:
            train(warehouse, arguments, is_quiet=True)
        capsys.readouterr()
        assert command.main([str(warehouse), *arguments]) == 2
        shown = " ".join(capsys.readouterr().err.split())
        shown = shown.replace("on the command line", "in `overrides`")
        shown = shown.replace(" --help-keys", " agentenv train --help-keys")
        assert shown == f"error: {caught.value}"
    assert state() == before
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="such configuration file"):
        train("nowhere.toml")
    with pytest.raises(ConfigError, match="run, a checkpoint"):
        evaluate(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="not a tool"):
        train(warehouse, env=[print and ROWS[0]])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="tokenizer"):
        evaluate(warehouse.parent / "model", tokenizer=object(), env=Warehouse, data=ROWS)
    with pytest.raises(ConfigError, match="`max_tasks` -1"):
        evaluate(warehouse.parent / "model", ASKED, env=Warehouse, data=ROWS, max_tasks=-1)
    with pytest.raises(ConfigError, match="config: expected"):
        train(12)  # type: ignore[arg-type]
    for name, given in {"data": 3, "held_out": [], "env": 3}.items():
        with pytest.raises(ConfigError, match=f"^{name}: expected"):
            train(warehouse, **{name: given})  # type: ignore[arg-type]


def test_an_existing_run_is_refused_unless_resumed(warehouse: Path, finished: Path) -> None:
    with pytest.raises(ConfigError, match=r"already contains a.*with `resume`"):
        train(warehouse, {"run.name": finished.name}, is_quiet=True)
    with pytest.raises(ConfigError, match=r"^`model` and `tokenizer` require"):
        evaluate(warehouse.parent, model="m")


def test_train_works_inside_a_running_event_loop(warehouse: Path, tmp_path: Path) -> None:
    """As in a notebook, whose cells run in one; the caller's shared resources stay open."""

    class Counter:
        closed = False

        def stats(self) -> dict[str, float]:
            return {"mine": 1.0}

        def close(self) -> None:
            self.closed = True

    async def cell() -> api.TrainingResult:
        return train(warehouse, [f"run.dir={tmp_path}", "train.num_steps=1"], is_quiet=True)

    mine = shared("mine", Counter)
    try:
        assert asyncio.run(cell()).success is None  # the file has no evaluation set
        assert shared("mine", Counter) is mine
        assert not mine.closed
        assert shared_stats() == {"mine": 1.0}
    finally:
        forget_shared()


def interrupting(prompt: str, rng: Random) -> str:
    """A policy that interrupts the process in its second update."""
    from tests.support.warehouse import warehouse_turn

    if next(calls) == 60:
        os.kill(os.getpid(), signal.SIGINT)
    return warehouse_turn(prompt, rng)


calls = itertools.count()


def test_an_interrupted_run_is_saved_and_resumes(warehouse: Path, tmp_path: Path) -> None:
    train(warehouse, {"run.dir": str(tmp_path), "train.num_steps": 1}, is_quiet=True)  # registers
    before = state()
    more = {"run.dir": str(tmp_path), "run.name": "stopped", "train.num_steps": 100}
    with pytest.raises(KeyboardInterrupt):
        train(warehouse, {**more, "engine.script": f"{__name__}:interrupting"}, is_quiet=True)
    assert state() == before
    (kept,) = (tmp_path / "stopped" / "checkpoints").glob("step-*[1-9]")
    number = int(kept.name.partition("-")[2])
    result = train(warehouse, {**more, "train.num_steps": number + 1}, resume=True, is_quiet=True)
    assert result.summary["num_steps"] == number + 1


def test_a_tool_that_blocks_the_loop_is_named(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def slow(task: Task) -> ToolEnv:
        if task.id.endswith("2"):
            time.sleep(1.6)
        return Warehouse(task)

    path = warehouse.parent / "model"
    evaluate(path, ASKED, env=slow, data=ROWS[:3], out=tmp_path / "slow", is_quiet=True)
    told = capsys.readouterr().err
    assert "blocks every rollout" in told or "waited for a" in told


def test_one_run_at_a_time_in_a_process(warehouse: Path, tmp_path: Path) -> None:
    def inside(task: Task) -> ToolEnv:
        with pytest.raises(ConfigError, match="another run is"):
            train(warehouse, [f"run.dir={tmp_path}"])
        return Warehouse(task)

    path = warehouse.parent / "model"
    found = evaluate(path, ASKED, env=inside, data=ROWS[:2], out=tmp_path / "outer")
    assert found.success.num_trajectories == 2


def test_the_core_exports_train_and_evaluate_lazily() -> None:
    import agentenv

    assert agentenv.train is api.train
    assert agentenv.evaluate is api.evaluate
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        agentenv.nothing  # noqa: B018
