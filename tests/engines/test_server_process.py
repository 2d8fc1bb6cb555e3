"""Servers that tests start leave no process. The servers here are processes of a few lines."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.server_process import ServerProcess
from tests.support.small_server import alive, assert_ended, processes, script
from tests.support.warehouse import ROOT

HOLDER = """
import sys, time
from pathlib import Path
from tests.engines.test_server_process import started
started(Path(sys.argv[1]))
print("ready", flush=True)
time.sleep(600)
"""


def started(folder: Path, stop_s: float = 5.0) -> ServerProcess:
    command = [sys.executable, str(script(folder))]
    server = ServerProcess(command, folder / "log", {}, ready="/", start_s=60.0, stop_s=stop_s)
    server.wait_ready()
    return server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    server = started(tmp_path)
    yield server
    server.kill()


@pytest.mark.parametrize("how", ["stop", "kill"])
def test_all_processes_of_a_server_end(server: ServerProcess, how: str) -> None:
    pids = processes(server.log)
    assert sorted(process.pid for process in server.processes()) == sorted(pids)
    assert len(alive(pids)) == 2
    for _ in range(2):
        getattr(server, how)()
        assert alive(pids) == server.processes() == []


def test_kill_does_not_wait_for_the_grace_period(tmp_path: Path) -> None:
    server = started(tmp_path, stop_s=600.0)
    server.processes()[0].suspend()  # so that it does not react to SIGTERM
    server.kill()
    assert alive(processes(server.log)) == []


def test_an_error_of_an_ended_server_quotes_its_log(tmp_path: Path) -> None:
    broken = script(tmp_path, "raise RuntimeError('no memory for the cache')")
    command = [sys.executable, str(broken)]
    server = ServerProcess(command, tmp_path / "log", {}, ready="/", start_s=60.0, stop_s=5.0)
    with pytest.raises(pytest.fail.Exception, match="no memory for the cache"):
        server.wait_ready()
    assert server.processes() == []


def test_no_process_survives_a_killed_pytest(tmp_path: Path) -> None:
    """As on a time limit: no fixture is torn down."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        pids = processes(tmp_path / "log")
        assert len(alive(pids)) == 2
        holder.kill()
    assert_ended(pids)
