"""launchers/serve.py: models next to the policy, until a signal. The server is a real process of a
few lines in place of vLLM, whose command lines tests/commands/test_remote_runs.py runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from agentenv.envs.quickstart.setup import build_model
from agentenv.launchers import serve
from tests.support.golden import Golden
from tests.support.small_server import SERVER


def test_models_are_served_until_interrupted(tmp_path: Path) -> None:
    build_model(tmp_path / "model", seed=0)
    program = tmp_path / "python"
    program.write_text(f"#!{sys.executable}\n{SERVER}")
    program.chmod(0o755)
    config = tmp_path / "servers.toml"
    config.write_text(
        f'run.dir = "{tmp_path}/runs"\n[roles.judge]\nmodel = "{tmp_path}/model"\n'
        f'python = "{program}"\ndevice = "cpu"\nmax_model_len = 512\n'
    )
    command = [sys.executable, "-m", "agentenv.launchers", "serve", str(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = next(line for line in process.stdout if line.startswith("judge is at "))
        url = said.split()[3].rstrip(":")
        assert f"'roles.judge={{url=\"{url}\"}}'" in said
        with urllib.request.urlopen(url, timeout=600) as answer:
            served = answer.read().decode()
        assert "--served-model-name judge" in served
        assert "--max-model-len 512" in served
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(60) == 0
    assert "stopping" in rest
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(url, timeout=600)


MISTAKES = [
    "[roles.critic]\nmodel = 'x'",
    "[roles.judge]\nurl = 'http://127.0.0.1:1'",
    "roles = {}",
    "[roles.judge]\nmodel = 'nowhere'\ndevice = 'cpu'",
]


@pytest.mark.golden("serve")
def test_models_that_cannot_be_served_are_refused(tmp_path: Path, golden: Golden) -> None:
    for number, text in enumerate(MISTAKES):
        path = tmp_path / f"servers-{number}.toml"
        path.write_text(text)
        golden.run(serve, path, status=2)
