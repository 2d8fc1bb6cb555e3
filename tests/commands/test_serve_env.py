"""`agentenv serve-env` as a command: its lines, its end and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentenv.launchers.serve_env import main
from tests.support.retriever import interrupted


def test_the_address_and_the_next_command_are_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "train.jsonl"
    rows.write_text(json.dumps({"question": "What is the capital of Peru?", "answer": "Lima"}))
    command = ("serve-env", "agentenv/WebSearch-v0", f"data.train={rows}")
    lines = interrupted(*command, at="data.train")
    assert capfd.readouterr().err == ""
    assert lines[0].startswith("WebSearch-v0 is")
    url = lines[0].split()[-1]
    assert lines[1:] == [
        "Ctrl-C stops the server; in another terminal:",
        f"  curl {url}/metadata",
        "or in the configuration of a run (docs/openenv.md):",
        '  env.id = "agentenv/OpenEnv-v0"',
        f'  env.kwargs.url = "{url}"',
        f'  data.train = "openenv:{url}"',
    ]


def test_a_subject_that_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    expected = f"error: {tmp_path}: not the folder of a run (no config.json in it)\n"
    assert capsys.readouterr().err == expected
    assert main(["runs/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: runs/nowhere: ")
