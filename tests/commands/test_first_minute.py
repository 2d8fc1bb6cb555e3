"""The first minute with a command: the first line is its own, long phases are shown with the next
one, and the last lines are the next commands."""

from __future__ import annotations

import logging
import os
import pty
import subprocess
import sys
import time
import warnings
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from agentenv.assembly.run import terminal
from agentenv.assembly.run.exits import exit_code_of
from agentenv.assembly.run.tables import Table, as_rich
from agentenv.assembly.run.terminal import View
from agentenv.training.loop.brief_reports import PHASES, BriefFigures, BriefReport
from agentenv.training.loop.state import RunState
from agentenv.training.reports.recorder import brief_line, final_table

WIDTH = 80


def test_a_run_ends_with_the_next_commands(finished: Path) -> None:
    log = (finished / "run.log").read_text()
    typed = [line.split(" INFO ")[-1].split() for line in log.partition("next:\n")[2].splitlines()]
    assert [line for line in typed if line[0] == "agentenv"] == [
        ["agentenv", "view", str(finished)],
        ["agentenv", "evaluate", str(finished)],
        ["agentenv", "export", str(finished), "DIR"],
    ]


def test_warnings_of_other_packages_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """DeepSpeed logs one to standard output as soon as transformers is imported."""
    logger = logging.getLogger("DeepSpeed")
    handler = logging.StreamHandler(sys.stdout)
    logger.addHandler(handler)
    shown = warnings.showwarning

    def work(view: View) -> int:
        view.log_to(tmp_path / "run.log")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            logger.warning("Setting accelerator to CPU.")
            warnings.warn("something is deprecated", FutureWarning, stacklevel=1)
        logger.error("broken")
        view.log("ours")
        return 0

    try:
        assert exit_code_of(work, "it") == 0
    finally:
        logger.removeHandler(handler)
    found = capsys.readouterr()
    assert found.out == "broken\nours\n"
    assert "deprecated" not in found.err
    assert "something is deprecated" in (tmp_path / "run.log").read_text()
    assert warnings.showwarning is shown


def test_a_long_phase_is_reported_with_the_next_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "BUSY_S", 0.05)
    view = View()
    view.wait_for("getting ready", "the questions")
    time.sleep(0.5)
    view.end()
    told = capsys.readouterr().out
    assert "the questions" in told
    assert told.startswith("getting ready: 0 s")
    time.sleep(0.2)
    assert capsys.readouterr().out == ""
    view.close()


CODE = """
import logging, time
from agentenv.assembly.run.terminal import View
view = View()
view.wait_for("getting ready", "the questions")
time.sleep(0.4)
view.begin("evaluation", 4, then="the report")
view.warn("odd")
view.advance(2, "half")
time.sleep(0.4)
view.figures([("learner", "x" * 100), ("now", "y")])
time.sleep(0.4)
view.end()
view.log("done")
view.close()
"""


def test_in_a_terminal_the_progress_line_is_updated_and_removed() -> None:
    main, other = pty.openpty()
    environment = os.environ | {"COLUMNS": str(WIDTH), "LINES": "30", "TERM": "xterm"}
    process = subprocess.Popen(
        [sys.executable, "-c", CODE], stdout=other, stderr=other, env=environment
    )
    os.close(other)
    shown = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(main)
    assert process.wait(timeout=60) == 0
    text = shown.decode()
    assert "getting ready" in text
    assert "next: the questions" in text
    assert "next: the report" in text
    assert "learner" in text  # a title is not cut, its figures are
    assert "\x1b[2K" in text
    assert text.rstrip().endswith("done")
    (warned,) = [line for line in text.splitlines() if "odd" in line]
    assert "evaluation" not in warned  # it stands above the bar


def lines_at(table: Table, width: int = WIDTH) -> list[str]:
    out = StringIO()
    Console(file=out, width=width).print(as_rich(table))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_table_fits_a_narrow_terminal_and_breaks_no_figure() -> None:
    """Texts are folded in its place."""
    interval = "+10.123 [-10.123, +10.123]"
    columns = ["questions", "n", "A", "B", "B - A [95 %]", "p", "test"]
    row = ["a-set-of-many/questions-with-a-long-name", "1000", "0.123", "0.456", interval, "<0.001"]
    lines = lines_at(Table(title="t", columns=columns, rows=[[*row, "sign flip"]]))
    assert all(len(line) <= WIDTH for line in lines)
    text = "\n".join(lines)
    assert interval in text
    assert "…" not in text
    folded = "".join(line[1:].partition(" ")[0] for line in lines[4:] if line.strip())
    assert row[0] in folded


def test_a_long_name_leaves_room_for_the_texts_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    columns, name = ["question", "", "A", "A answered"], "questions_of_a_long_name/" * 3 + "17"
    row = [name, "How many bolts are there in the shop?", "0/1", "one thousand two hundred"]
    lines = lines_at(Table(title="t", columns=columns, rows=[row], left=[0, 1, 3]))
    assert all(len(line) <= WIDTH for line in lines)
    assert {"bolts", "shop?", "thousand", "answered"} <= set(" ".join(lines).split())
    assert "name/17" in "".join(lines)


def test_the_table_of_a_run_in_which_much_failed_fits_too() -> None:
    figures = BriefFigures(70, 30, 0.5, (0.4, 0.6), 0.35, 0.5, 1.5, 20.0)
    kinds = {"comparisons": figures, "sums": figures}
    report = BriefReport("heldout", (0, 1), figures, kinds)
    reports = {phase: {"heldout": report} for phase in PHASES}
    table = final_table(RunState(reports=reports), "heldout", cold_start=True)
    lines = lines_at(table)
    assert all(len(line) <= WIDTH for line in lines)
    (whole,) = [line for line in lines if line.startswith(" all  ")]
    assert whole.count("[") == whole.count("]") == 3
    assert lines[lines.index(whole) + 1].count("(30% failed)") == 3


def test_the_line_of_a_step_fits_too() -> None:
    row = {"step": 100, "rollout/trees": 128, "rollout/forks": 1234, "reward/mean": -0.123}
    row |= {"failed/share": 0.5, "time/sampled_tokens_per_s": 12345.0, "learner/num_trained": 128}
    assert len(brief_line(row, 400)) <= WIDTH
