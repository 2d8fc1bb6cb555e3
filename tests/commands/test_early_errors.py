"""Errors are reported before the setup, the learner or an engine starts."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from agentenv.base.errors import ConfigError
from agentenv.engines.embedded.embedded_config import EmbeddedConfig
from agentenv.engines.pool.pooled_engine import PooledEngineConfig
from agentenv.engines.scripted import ScriptedConfig
from agentenv.engines.vllm import VLLMConfig
from agentenv.launchers import sft, train
from agentenv.learners.ranks.deepspeed_learner import DeepSpeedLearner
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
    monkeypatch.setattr("agentenv.envs.quickstart.setup.prepare", started)


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
        ("data.train={folder}/rows.jsonl", "rows.jsonl, row 1: key 'question'"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, told: str, more: list[str]
) -> None:
    """By a run and by a dry run; every check: test_checks.py."""
    (tmp_path / "rows.jsonl").write_text('{"answer": 1}\n')
    runs = tmp_path / "runs"
    override = override.replace("{folder}", str(tmp_path))
    assert told in refused(capsys, train.main([QUICKSTART, f"run.dir={runs}", override, *more]))
    assert not runs.exists()


def test_an_interrupted_setup_leaves_no_folder_and_offers_no_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(run: Path, seed: int) -> None:
        (run / "my-corpus").mkdir()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr("agentenv.envs.quickstart.setup.prepare", prepare)
    runs = tmp_path / "runs"
    assert train.main([QUICKSTART, f"run.dir={runs}"]) == 130
    assert "interrupted; training had not started" in capsys.readouterr().out
    assert not runs.exists()


def test_files_of_a_fine_tuning_are_checked_before_its_setup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "agentenv.envs.quickstart.setup.prepare_chat", lambda *_: pytest.fail("it was run")
    )
    config, runs = str(ROOT / "configs" / "sft_quickstart.toml"), tmp_path / "runs"
    arguments = [config, f"run.dir={runs}", f"data.train={tmp_path}/nowhere.jsonl"]
    told = f"data.train: {tmp_path}/nowhere.jsonl: no such file or folder"
    assert told in refused(capsys, sft.main(arguments))
    assert not runs.exists()
