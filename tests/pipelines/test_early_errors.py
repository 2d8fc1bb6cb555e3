"""Errors are reported before the setup, the learner or an engine starts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.pool.pooled_engine import PooledEngineConfig
from agentenv.engines.scripted import ScriptedConfig
from agentenv.engines.vllm import VLLMConfig
from agentenv.errors import ConfigError
from agentenv.launchers import evaluate, sft, train
from agentenv.learners.deepspeed_learner import DeepSpeedLearner
from tests.support.warehouse import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 2
    return capsys.readouterr().err.replace("\n", " ")


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A learner, an engine or a set-up that starts fails the test."""

    def started(*_: object, **__: object) -> None:
        raise AssertionError("it was started")

    monkeypatch.setattr(DeepSpeedLearner, "start", started)
    for engine in (EmbeddedConfig, ScriptedConfig, PooledEngineConfig):
        monkeypatch.setattr(engine, "start", started)
    monkeypatch.setattr("agentenv.envs.quickstart_setup.prepare", started)


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("engine", "engine={name='embedded', max_model_len=2048}"),
        ("engine", "engine={name='vllm', max_model_len=2048, servers={python='/bin/sh'}}"),
        ("eval.engine", "eval.engine={name='embedded', max_model_len=2048}"),
    ],
)
def test_a_context_beyond_that_of_the_model(
    warehouse: Path,
    capsys: pytest.CaptureFixture[str],
    key: str,
    override: str,
    more: list[str],
) -> None:
    text = refused(capsys, train.main([str(warehouse), "run.name=long", override, *more]))
    assert f"{key}.max_model_len = 2048: " in text
    assert "has a context of 1024 tokens (prompt and response)" in text


def test_a_context_beyond_that_of_an_evaluated_model(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--env", "me/Warehouse-v0", f"data={warehouse.parent}/a.jsonl"]
    arguments += ["env.module=my_env", "engine={name='embedded', max_model_len=2048}"]
    arguments += ["--out", str(tmp_path / "e")]
    text = refused(capsys, evaluate.main([str(warehouse.parent / "model"), *arguments]))
    assert "engine.max_model_len = 2048" in text


def test_servers_apply_the_rope_scaling_of_a_model(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    raw = {"max_position_embeddings": 1024, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert VLLMConfig().max_context(tmp_path) == 4096
    assert VLLMConfig(max_model_len=3000).max_context(tmp_path) == 3000
    assert EmbeddedConfig().max_context(tmp_path) == 1024
    for too_long in (VLLMConfig(max_model_len=4097), EmbeddedConfig(max_model_len=1025)):
        with pytest.raises(ConfigError, match="max_model_len"):
            too_long.max_context(tmp_path)
    assert ScriptedConfig(max_model_len=9999).max_context(tmp_path) == 1024


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("env.id=agentenv/Quikstart-v0", "env.id: no environment is registered as"),
        ("env.module=nowhere", "env.module: 'nowhere' cannot be imported"),
        ("env.kwargs.corpsu=x", "env.kwargs.corpsu: unknown to agentenv/Quickstart-v0"),
        ("env.tools=[{name='nowhere:tool'}]", "env.tools[0].name: 'nowhere:tool' cannot be loaded"),
        ("grader.kind=custom", 'grader.kind = "custom" needs grader.path, a Python file'),
        ("data.train={folder}/rows.jsonl", "rows.jsonl, row 1: key 'question'"),
    ],
)
def test_mistakes_that_do_not_depend_on_the_setup_are_reported_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, told: str, more: list[str]
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"answer": 1}\n')
    runs = tmp_path / "runs"
    override = override.replace("{folder}", str(tmp_path))
    assert told in refused(capsys, train.main([QUICKSTART, f"run.dir={runs}", override, *more]))
    assert not runs.exists()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("model.path=/nowhere", "model.path: /nowhere is not a model directory"),
        ("grader={path='/nowhere.py'}", "grader.path: /nowhere.py: no such file"),
        ("run.setup=agentenv.envs.quickstart_setup:prepar", "run.setup: 'agentenv.envs.quickstart"),
        ("engine={name='vllm', servers={python='/nowhere'}}", "engine.servers.python: /nowhere"),
        ("engine={name='vllm', urls=['http://127.0.0.1:9']}",
         "engine.urls: no engine server answers at http://127.0.0.1:9 (Conn"),
    ],
)  # fmt: skip
def test_missing_parts_are_reported_before_the_setup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, told: str
) -> None:
    runs = tmp_path / "runs"
    assert told in refused(capsys, train.main([QUICKSTART, f"run.dir={runs}", override]))
    assert not runs.exists()


A_GRADER = """
from agentenv import ToolEnv
class Wrong:
    async def grade(self, task): return 1.0
class Mine(ToolEnv):
    def __init__(self, task):
        super().__init__(task, tools=[], grader=Wrong())
"""


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ([], "the grader fails on the gold answer '1' of row rows-1: the grader Wrong raised "
         "TypeError: "),
        (["python.timeout_s=3"], "[python]: not used by graded_first:Mine; remove the table"),
    ],
)  # fmt: skip
def test_a_custom_environment_independent_of_the_setup_is_tried_before_it(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    keys: list[str],
    told: str,
    more: list[str],
) -> None:
    (tmp_path / "graded_first.py").write_text(A_GRADER)
    (tmp_path / "rows.jsonl").write_text('{"question": "?", "answer": 1}\n' * 16)
    monkeypatch.syspath_prepend(str(tmp_path))
    runs, rows = tmp_path / "runs", tmp_path / "rows.jsonl"
    arguments = [QUICKSTART, f"run.dir={runs}", "env={id='graded_first:Mine'}"]
    arguments += [f"data.train={rows}", f"eval.sets={{heldout={{path='{rows}'}}}}"]
    arguments += ["checkpoint.best_metric=''", *keys, *more]
    assert told in refused(capsys, train.main(arguments))
    assert not runs.exists()


def test_mistakes_found_only_after_the_setup_leave_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    arguments = [QUICKSTART, f"run.dir={runs}", "limits.max_prompt_tokens=1000"]
    assert "exceed the engine's context" in refused(capsys, train.main(arguments))
    assert not runs.exists()


def test_an_interrupted_setup_leaves_no_folder_and_offers_no_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(run: Path, seed: int) -> None:
        (run / "my-corpus").mkdir()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("agentenv.envs.quickstart_setup.prepare", prepare)
    runs = tmp_path / "runs"
    assert train.main([QUICKSTART, f"run.dir={runs}"]) == 130
    assert "interrupted; training had not started" in capsys.readouterr().out
    assert not runs.exists()


def test_files_of_a_fine_tuning_are_checked_before_its_setup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "agentenv.envs.quickstart_setup.prepare_chat", lambda *_: pytest.fail("it was run")
    )
    config, runs = str(ROOT / "configs" / "sft_quickstart.toml"), tmp_path / "runs"
    arguments = [config, f"run.dir={runs}", f"data.train={tmp_path}/nowhere.jsonl"]
    told = f"data.train: {tmp_path}/nowhere.jsonl: no such file or folder"
    assert told in refused(capsys, sft.main(arguments))
    assert not runs.exists()


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    "key", ["data.train", "eval.sets.heldout.path", "eval.sets.dev.path", "sft.data", "sft.gate"]
)
def test_a_file_that_the_setup_does_not_create(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    override = f"{key}={tmp_path}/nowhere.jsonl"
    code = train.main([QUICKSTART, f"run.dir={tmp_path}", override])
    captured = capsys.readouterr()
    assert code == 2
    told = captured.err.replace("\n", " ")
    assert f"{key}: {tmp_path}/nowhere.jsonl: no such dataset file" in told
    assert "Created at the start" not in captured.out
