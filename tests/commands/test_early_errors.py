"""Errors are reported before the setup, the learner or an engine starts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from agentenv.base.errors import ConfigError
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.scripted import ScriptedConfig
from agentenv.engines.vllm import VLLMConfig
from agentenv.launchers import evaluate, sft, train
from tests.support.warehouse import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.toml")


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 2
    return capsys.readouterr().err.replace("\n", " ")


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
