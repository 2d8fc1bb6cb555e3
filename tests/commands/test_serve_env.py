"""`agentenv serve-env` as a command: its lines, its end and its errors."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentenv.launchers.serve_env import main


def test_the_address_and_the_next_command_are_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "train.jsonl"
    rows.write_text(json.dumps({"question": "What is the capital of Peru?", "answer": "Lima"}))
    command = [sys.executable, "-m", "agentenv.launchers", "serve-env", "agentenv/WebSearch-v0"]
    command += [f"data.train={rows}", "port=0"]
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not re.search(r"\d+ s so far", line):  # on a slow machine
                lines.append(line.rstrip())
            if "data.train" in line:
                process.send_signal(signal.SIGINT)
    assert process.returncode == 0
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
        "stopping",
    ]
    assert max(map(len, lines)) <= 80


def test_a_subject_that_is_not_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    expected = f"error: {tmp_path}: not the folder of a run (no config.json in it)\n"
    assert capsys.readouterr().err == expected
    assert main(["runs/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: runs/nowhere: ")
