"""A stand-in for Python ends like Python, and its fork ends with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest

from tests.support.forkserver import ForkServer

MODULE = """
import os, signal, sys, time
print(os.getpid(), os.environ["WORD"], *sys.argv[1:], flush=True)
if sys.argv[1] == "wait":
    time.sleep(60)
if sys.argv[1] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(3)
"""
Start = Callable[..., AbstractContextManager[subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts the stand-in for Python with its arguments; it forks the module `forked`."""
    (tmp_path / "forked.py").write_text(MODULE)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "WORD": "given"}
    server = ForkServer(sys.executable, [], os.environ)
    program = server.stand_in("forked")

    @contextmanager
    def started(*arguments: str) -> Iterator[subprocess.Popen[str]]:
        with subprocess.Popen(
            [program, *arguments], env=environment, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    yield started
    server.close()


def fork_of(process: subprocess.Popen[str]) -> tuple[psutil.Process, list[str]]:
    """The fork, and its report of its environment and arguments."""
    assert process.stdout is not None
    pid, *words = process.stdout.readline().split()
    return psutil.Process(int(pid)), words


@pytest.mark.parametrize(("word", "status"), [("end", 3), ("die", -signal.SIGKILL)])
def test_the_program_ends_with_the_status_of_the_fork(start: Start, word: str, status: int) -> None:
    with start("-u", "-m", "forked", word, "more") as process:
        assert process.stdout is not None
        pid, *words = process.stdout.read().split()
        assert words == ["given", word, "more"]
        assert process.wait(30) == status
        assert int(pid) != process.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_program_ends_the_fork(start: Start, number: int) -> None:
    with start("-m", "forked", "wait") as process:
        fork, _ = fork_of(process)
        process.send_signal(number)
        fork.wait(30)
        assert process.wait(30) == -number


def test_other_commands_are_run_by_python_itself(start: Start) -> None:
    with start("-c", "import os; print(os.getpid())") as process:
        assert process.stdout is not None
        assert int(process.stdout.read()) == process.pid
        assert process.wait(30) == 0
