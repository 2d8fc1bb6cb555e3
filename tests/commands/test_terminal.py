"""The output of a command reaches its terminal, and with a log file nothing depends on the
terminal."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from agentenv.assembly.run.terminal import LogFile, View
from tests.support.snippets import run_python

TELLING = """
import sys
from pathlib import Path
from agentenv.assembly.run.exits import exit_code_of

def work(view):
    if len(sys.argv) > 1:
        view.log_to(Path(sys.argv[1]))
    for number in range(3):
        view.log(f"line {number}")
        view.warn(f"warning {number}")

sys.exit(exit_code_of(work, "it"))
"""


def test_an_output_on_a_full_disk_ends_only_a_command_without_a_log(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    with open("/dev/full", "w") as full:
        for arguments, code in (([str(log)], 0), ([], 1)):
            done = run_python(TELLING, *arguments, expected=code, stdout=full)
            assert "Traceback" not in done.stderr
    assert "no space left" in done.stderr
    said = log.read_text()
    assert [f"line {number}" in said for number in range(3)] == [True] * 3
    assert said.count("could not be written") == 1


def test_a_closed_output_pipe_does_not_end_a_command(tmp_path: Path) -> None:
    """As with `| head`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as out:
        done = run_python(TELLING, tmp_path / "run.log", stdout=out)
    assert "BrokenPipe" not in done.stderr
    assert "line 2" in (tmp_path / "run.log").read_text()


def test_messages_and_warnings_use_the_current_streams(capsys: pytest.CaptureFixture[str]) -> None:
    view = View()
    view.log("to the first")
    assert capsys.readouterr().out == "to the first\n"
    view.warn("to the second")
    assert capsys.readouterr().err.startswith("warning: ")


def test_warnings_of_parts_for_people_and_their_errors_are_on_the_terminal(tmp_path: Path) -> None:
    code = """
import logging, sys
from pathlib import Path
from agentenv.base.errors import SHOWN
from agentenv.assembly.run.exits import exit_code_of

part = logging.getLogger("agentenv.part")

def work(view):
    part.warning("before the log")
    view.log_to(Path(sys.argv[1]))
    part.warning("for the log")
    part.warning("for people\\nwith more in the log", extra=SHOWN)
    part.error("an error")

exit_code_of(work, "it")
"""
    log = tmp_path / "run.log"
    shown = ["warning: before the log", "warning: for people", "error: an error"]
    assert run_python(code, log).stderr.splitlines() == shown
    assert [f"{one} the log" in log.read_text() for one in ("before", "for")] == [True, True]


HANGING = """
import sys, time
from pathlib import Path
from agentenv.assembly.run.exits import exit_code_of

def work(view):
    view.log_to(Path(sys.argv[1]))
    began = time.monotonic()
    for number in range(int(sys.argv[2])):
        view.log(f"line {number} " + 90 * ".")
    sys.stderr.write(f"said in {time.monotonic() - began:.3f} s\\n")

sys.exit(exit_code_of(work, "it"))
"""


@pytest.mark.parametrize("num_lines", [2000, LogFile.MAX_LINES + 2000])
def test_a_hanging_disk_delays_neither_the_output_nor_the_exit(
    tmp_path: Path, num_lines: int
) -> None:
    """A pipe without a reader accepts no more than its buffer, like a hanging disk."""
    log = tmp_path / "run.log"
    os.mkfifo(log)
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    done = run_python(HANGING, log, num_lines)
    assert re.search(r"\d+ lines are .*run\.log", done.stderr)
    assert len(done.stdout.splitlines()) == num_lines
    os.close(reader)


def test_the_last_lines_are_in_the_log(tmp_path: Path) -> None:
    view = View()
    view.log_to(tmp_path / "run.log")
    for number in range(2000):
        view.log(f"line {number}")
    view.warn_at_once("the end")
    lines = (tmp_path / "run.log").read_text().splitlines()
    assert len(lines) == 2001
    assert lines[-1].endswith("WARNING the end")
    view.close()
    view.close()


def test_lines_lost_to_a_full_disk_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.log").symlink_to("/dev/full")
    view = View()
    view.log_to(tmp_path / "run.log")
    view.log("one")
    view.log("two")
    view.close()
    assert "2 lines are" in capsys.readouterr().err
