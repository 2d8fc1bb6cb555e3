"""One process at a time trains in a directory, and leftovers of killed ones are removed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from pathlib import Path

import pytest

from agentenv.assembly.run.rundir import CONFIG_FILE, PROBE, RunDirectory
from agentenv.base.errors import ConfigError
from tests.support.snippets import ready_python


def begun(folder: Path) -> RunDirectory:
    run = RunDirectory(folder, resume=False)
    run.write_json(CONFIG_FILE, {})
    return run


@pytest.mark.parametrize("resume", [True, False])
def test_a_second_process_is_refused_and_the_owner_is_named(tmp_path: Path, resume: bool) -> None:
    run = RunDirectory(tmp_path / "run", resume=False)
    (run.path / "learner.log").write_text("mine")
    if resume:
        run.write_json(CONFIG_FILE, {})
    me = rf"in use by process {os.getpid()} on {socket.gethostname()} since 20.*run\.name"
    with pytest.raises(ConfigError, match=me):
        RunDirectory(tmp_path / "run", resume=resume)
    assert (run.path / "learner.log").read_text() == "mine"
    run.write_json(CONFIG_FILE, {})
    run.close()
    RunDirectory(tmp_path / "run", resume=True).close()


HOLD = """
import sys
from pathlib import Path
from agentenv.assembly.run.rundir import RunDirectory
run = RunDirectory(Path(sys.argv[1]), resume=False)
run.write_json("config.json", {})
print("ready", flush=True)
sys.stdin.read()
"""


def test_the_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    with ready_python(HOLD, tmp_path / "run", stdin=subprocess.PIPE) as (process, _):
        with pytest.raises(ConfigError, match=f"by process {process.pid} on"):
            RunDirectory(tmp_path / "run", resume=True)
        process.kill()
    run = RunDirectory(tmp_path / "run", resume=True)
    assert json.loads((run.path / "lock").read_text())["pid"] == os.getpid()
    run.close()
    assert (run.path / "lock").read_text() == ""


def test_a_process_killed_during_the_write_probe_leaves_no_run(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    (path / PROBE).write_bytes(b"0")
    RunDirectory(path, resume=False).close()
    assert not (path / PROBE).exists()


def test_the_lock_of_another_host_is_not_taken_over(tmp_path: Path) -> None:
    begun(tmp_path / "run").close()
    lock = tmp_path / "run" / "lock"
    lock.write_text('{"pid": 7, "host": "node-3", "since": "2026-11-22 20:00:00"}')
    with pytest.raises(ConfigError, match=rf"process 7 on node-3.* remove {lock}"):
        RunDirectory(tmp_path / "run", resume=True)
    lock.unlink()
    RunDirectory(tmp_path / "run", resume=True).close()


@pytest.mark.parametrize("log", ["learner.log", "learner-0.log", "servers/vllm-0.log"])
@pytest.mark.parametrize("text", ["", "out of memory\n"])
def test_a_run_that_never_started_leaves_only_a_nonempty_log(
    tmp_path: Path, log: str, text: str
) -> None:
    run = RunDirectory(tmp_path / "runs" / "run", resume=False)
    file = run.path / log
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    run.forget_unless_begun()
    run.close()
    assert file.exists() == bool(text)
    assert (tmp_path / "runs").exists() == bool(text)
