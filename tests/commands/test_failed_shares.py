"""The failed share next to each success, in lines, tables, summary and pictures; and the progress
of a command without a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from agentenv.assembly.reports.pictures import learning_curve
from agentenv.assembly.reports.records import EvalRow
from agentenv.assembly.run import terminal
from agentenv.assembly.run.terminal import PLAIN_S, View
from agentenv.training.loop.brief_reports import BriefReport
from agentenv.training.loop.evaluations import brief_report, consider_best
from agentenv.training.loop.state import RunSaver, RunState
from agentenv.training.reports.recorder import (
    final_table,
    report_line,
    report_metrics,
    rollouts_line,
    step_line,
    summarize,
)


def report_of(num_right: int, num_wrong: int, num_failed: int) -> BriefReport:
    ends = ["right"] * num_right + ["wrong"] * num_wrong + ["failed"] * num_failed
    rows = [
        EvalRow(
            dataset="held",
            task=str(number),
            sample=0,
            end="failed" if end == "failed" else "terminated",
            error="EnvError: closed" if end == "failed" else None,
            success=end == "right",
        )
        for number, end in enumerate(ends)
    ]
    return brief_report("held", rows)


@pytest.fixture
def state() -> RunState:
    """Of a run whose evaluation at the end is of 11 trajectories of 100."""
    state = RunState(reports={"before_sft": {"held": report_of(0, 100, 0)}})
    state.reports["after_rl"] = {"held": report_of(2, 9, 89)}
    state.totals.num_trajectories, state.totals.num_failed = 1177, 1223
    state.totals.sampled_tokens, state.wall_s["rl"] = 5000, 4.0
    return state


def test_trajectories_with_refused_calls_are_no_success(state: RunState) -> None:
    state.totals.num_refused = 7
    summary = summarize(state, "held", 0, [])
    summary["tokens"]["sampled_per_s"] = 1.0
    assert "(7 with refused" in rollouts_line(summary)
    assert "forked" not in rollouts_line(summary)
    assert "forked" in rollouts_line(summary | {"never_forked": True})


def test_the_final_table_has_the_failed_share_next_to_each_success(state: RunState) -> None:
    table = final_table(state, "held", cold_start=False)
    rows = {row[0]: row[1:] for row in table.rows}
    assert rows["all"][1].startswith("0.18 [")
    assert rows["all"][1].endswith("(89% failed)")
    assert "failed" not in rows["all"][0]
    assert rows["failed"] == ["0 of 100", "89 of 100"]
    assert rows["all, failed as wrong"] == ["0.00", "0.02"]


def test_the_summary_has_shares_and_the_rate_of_the_run(state: RunState) -> None:
    found = summarize(state, "held", 0, ["1223 x EnvError: closed"])
    assert found["failed_share"]["after_rl"] == pytest.approx(0.89)
    assert found["success_if_failed_wrong"]["after_rl"] == pytest.approx(0.02)
    assert found["rollouts"]["failed_share"] == pytest.approx(1223 / 2400)
    assert found["rollouts"]["causes"] == ["1223 x EnvError: closed"]
    assert found["tokens"]["sampled_per_s"] == state.sampling_rate() == 1250.0


def test_the_summary_of_a_run_without_failures_or_without_rollouts_has_shares_of_zero() -> None:
    for num_done in (0, 12):
        state = RunState(reports={})
        state.totals.num_trajectories = num_done
        found = summarize(state, "held", 0)
        assert found["rollouts"]["failed_share"] == 0.0
        assert found["failed_share"] == dict.fromkeys(found["failed_share"])
        assert found["tokens"]["sampled_per_s"] == 0.0


def test_the_line_of_a_step_reports_the_failed_share() -> None:
    row = {"step": 3, "rollout/trees": 1, "rollout/tool_calls": 1, "rollout/forks": 0}
    assert "(51% failed)" in step_line(row | {"reward/success": 0.98, "failed/share": 0.51}, 9)
    assert "failed" not in step_line(row | {"reward/success": 0.98, "failed/share": 0.0}, 9)


@pytest.mark.parametrize(
    ("counts", "cell", "line"),
    [
        ((9, 1, 0), "0.90 [", "success 0.900 ["),
        ((2, 9, 89), "(89% failed)", "(89%; success 0.020"),
        ((990, 9, 1), "(<1% failed)", "1 failed (<1%; success 0.990"),
        ((1, 0, 999), "(>99% failed)", "999 failed (>99%; success 0.001"),
        ((0, 0, 5), "-\n(100% failed)", "success - of 0, 5 failed (100%; success 0.000"),
        ((0, 0, 0), "-", "success - of 0, reward"),
    ],
)
def test_unmeasured_shares_and_successes_are_not_reported(
    counts: tuple[int, int, int], cell: str, line: str
) -> None:
    report = report_of(*counts)
    assert line in report_line(report, "after RL")
    state = RunState(reports={"before_sft": {"held": report_of(1, 1, 0)}})
    state.reports["after_rl"] = {"held": report}
    rows = {row[0]: row[1:] for row in final_table(state, "held", cold_start=False).rows}
    assert cell in rows["all"][1]
    assert ("failed" in rows) is bool(counts[2])
    assert ("failed" in rows["all"][1]) is bool(counts[2])
    drawn, row = labels([{"step": 2, **report_metrics(report)}]), report_metrics(report)
    assert ("held: share of failed trajectories" in drawn) is bool(counts[2])
    was_measured = counts[0] + counts[1] > 0
    for figure in ("success", "success_low", "success_high", "reward", "tool_calls"):
        assert (f"eval/held/{figure}" in row) is was_measured
        assert (f"eval/held/all/{figure}" in row) is was_measured
    assert row["eval/held/trajectories"] == counts[0] + counts[1]
    assert row["eval/held/failed"] == counts[2]
    assert (report.overall.success is None) is not was_measured


def labels(rows: list[dict[str, Any]]) -> set[str]:
    figure = learning_curve(rows, "run")
    return {label for axes in figure.axes for label in axes.get_legend_handles_labels()[1]}


def test_the_learning_curve_shows_the_failed_share() -> None:
    step = {"trees/offered": 1, "reward/success": 0.9, "reward/mean": 0.8, "failed/share": 0.5}
    steps = [step | {"step": n, "reward/success_if_failed_wrong": 0.45} for n in (1, 2)]
    evaluated = {"step": 2, "phase": "after_rl", **report_metrics(report_of(2, 9, 89))}
    expected = {
        "success", "reward", "share of failed trajectories", "success, failed as wrong",
        "held: 0.18", "held: share of failed trajectories", "held: success, failed as wrong",
    }  # fmt: skip
    assert labels([*steps, evaluated]) == expected
    fine = [row | {"failed/share": 0.0} for row in steps]
    found = labels([*fine, {"step": 2, **report_metrics(report_of(9, 2, 0))}])
    assert found == {"success", "reward", "held: 0.82"}


def test_without_a_terminal_lines_report_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    view = View()
    view.console = Console(file=(written := io.StringIO()))
    view.begin("evaluation", 320)
    for done in range(0, 321, 8):
        view.advance(done, "success 0.500")
        now[0] += 1.0
    lines = written.getvalue().splitlines()
    assert len(lines) == 40 // PLAIN_S
    assert lines[0] == "evaluation: 80 of 320, success 0.500; 10 s so far, about 30 s left"
    view.log("another line")
    view.advance(320)
    assert written.getvalue().splitlines()[-1] == "another line", "nothing so soon after it"
    view.end()
    now[0] += 60.0
    view.advance(320)
    assert written.getvalue().splitlines()[-1] == "another line", "it is over"


def test_a_line_without_progress_names_the_wait_and_no_remaining_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [100.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    view = View()
    view.console = Console(file=(written := io.StringIO()), width=200)
    view.longest_wait = lambda: "47 rollouts wait for the tool 'order'"
    view.begin("evaluation", 320)
    for done in (0, 80, 80, 90):
        now[0] += PLAIN_S
        view.advance(done)
    assert written.getvalue().splitlines() == [
        "evaluation: 0 of 320; 10 s so far; 47 rollouts wait for the tool 'order'",
        "evaluation: 80 of 320; 20 s so far, about 60 s left",
        "evaluation: 80 of 320; 30 s so far; 47 rollouts wait for the tool 'order'",
        "evaluation: 90 of 320; 40 s so far, about 102 s left",
    ]


async def test_an_evaluation_that_measured_nothing_is_never_the_best() -> None:
    saver = object.__new__(RunSaver)
    saver.state = RunState(best=-0.5)
    await consider_best(saver, report_of(0, 0, 5), "held/reward")  # neither saved nor kept
    assert saver.state.best == -0.5
