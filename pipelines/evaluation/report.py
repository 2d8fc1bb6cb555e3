"""Writes the report of a stored evaluation: DIR/summary.json, report.md and plots/*.png."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from agentenv.disk import write_whole
from agentenv.env import close_shared
from agentenv.offload import in_thread
from agentenv.pipelines.evaluation.figures import Estimate, QuestionRows, Summary, summarise
from agentenv.pipelines.evaluation.scores import Compat, Scorer, make_scorer, stored_rows
from agentenv.pipelines.evaluation.store import load_saved
from agentenv.pipelines.evaluation.tables import groups_of, tables_of, terminal_tables_of
from agentenv.pipelines.run.pictures import panels, png
from agentenv.pipelines.run.records import EvalRow
from agentenv.pipelines.run.terminal import View, lines_of, markdown, plain

# The plots of a report, as PNG.

MIN_BARS, MAX_BARS = 10, 40
MAX_LABEL = 32
RIGHT, WRONG, LINE = "#2a7f62", "#c8553d", "#33658a"


def plots_of(summary: Summary, questions: Sequence[QuestionRows]) -> dict[str, bytes]:
    """PNG files by name: accuracy by group, pass@k, tool calls, tokens, latency; none on the base
    installation, which does not draw."""
    if find_spec("matplotlib") is None:
        return {}
    plots = {"groups": _groups(summary)}
    if summary.num_samples > 1:
        plots["pass_at_k"] = _pass_at_k(summary)
    if done := [row for question in questions for row in question.done]:
        calls, tokens = [len(row.tool_calls) for row in done], [row.action_tokens for row in done]
        plots["tool_calls"] = _histogram(done, "tool calls", calls, whole=True)
        plots["tokens"] = _histogram(done, "sampled tokens", tokens, whole=True)
        plots["seconds"] = _histogram(done, "seconds", [row.seconds for row in done])
    return plots


def _figure(height: float = 3.8) -> tuple[Any, Any]:
    figure, (axes,) = panels(1, 1, (7, height))
    return figure, axes


def _label(text: str) -> str:
    """Text that is not ours: no control characters, no formulas, not too long."""
    text = plain(text).replace("$", r"\$")
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 3] + "..."


def _groups(summary: Summary) -> bytes:
    bars = [
        (_label(label), estimate)
        for _, label, figures in groups_of(summary)
        if (estimate := figures.estimates.get("success")) is not None
    ]
    bars = [*bars[: MAX_BARS - 1], bars[-1]] if len(bars) > MAX_BARS else bars
    figure, axes = _figure(max(3.8, 1.2 + 0.32 * len(bars)))
    for place, (label, estimate) in enumerate(reversed(bars)):
        value, low, high = _bounds(estimate)
        axes.barh(place, value, color=LINE if label == "all" else "#86bbd8", height=0.7)
        axes.plot([low, high], [place, place], color="black", linewidth=1.2)
        axes.text(min(high, 1.0) + 0.015, place, f"{value:.3f}", va="center", fontsize=8)
    axes.set_yticks(range(len(bars)), [label for label, _ in reversed(bars)], fontsize=9)
    axes.set(xlim=(0, 1.1), xlabel="success, 95 % interval", title="success by group")
    return png(figure)


def _pass_at_k(summary: Summary) -> bytes:
    figure, axes = _figure()
    overall = summary.overall
    for label, estimates, colour, style in (
        ("pass@k", overall.pass_at, LINE, "o-"),
        ("maj@k", overall.majority_at, WRONG, "s--"),
    ):
        ks = list(estimates)
        bounds = np.array([_bounds(estimates[k]) for k in ks]).reshape(len(ks), 3)
        axes.plot(ks, bounds[:, 0], style, color=colour, label=label)
        axes.fill_between(ks, bounds[:, 1], bounds[:, 2], color=colour, alpha=0.18, linewidth=0)
    ks = list(overall.pass_at)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ks, [str(k) for k in ks])
    axes.minorticks_off()
    axes.set(ylim=(0, 1.02), xlabel="k", title="right within k samples; by a vote among k")
    return png(figure)


def _histogram(
    done: Sequence[EvalRow], unit: str, values: Sequence[float], *, whole: bool = False
) -> bytes:
    """`whole`: the values are whole numbers."""
    pairs = list(zip(done, values, strict=True))
    sides = [[value for row, value in pairs if row.success is right] for right in (True, False)]
    labels = [f"{name} ({len(own)})" for name, own in zip(("right", "wrong"), sides, strict=True)]
    figure, axes = _figure()
    bins = whole_bins(int(min(values)), int(max(values))) if whole else MAX_BARS
    axes.hist(sides, bins=bins, stacked=True, color=[RIGHT, WRONG], label=labels)
    for percent, label, style in ((50, "median", "-"), (95, "95th percentile", ":")):
        place = float(np.percentile(values, percent))
        axes.axvline(place, color="black", linestyle=style, linewidth=1.2, label=label)
    axes.xaxis.get_major_locator().set_params(integer=whole)
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel=unit, ylabel="trajectories", title=f"{unit} of a trajectory")
    return png(figure)


def whole_bins(least: int, most: int) -> list[float]:
    """Edges of at most MAX_BARS bars, each of equally many whole numbers, from 0 where one of each
    fits; some lie below the least, so that a single number is no bar of the whole width."""
    least = 0 if most < MAX_BARS else min(least, most - MIN_BARS + 1)
    width = -(-(most - least + 1) // MAX_BARS)
    return [edge - 0.5 for edge in range(least, most + width + 1, width)]


def _bounds(estimate: Estimate) -> tuple[float, float, float]:
    value = estimate.value or 0.0
    return value, estimate.low or 0.0, estimate.high or 0.0


SUMMARY_FILE, MARKDOWN_FILE, PLOTS = "summary.json", "report.md", "plots"


def write_report(
    folder: Path, view: View, *, ks: Sequence[int] = (), compat: Compat = ""
) -> Summary:
    """Compute the figures of the rows in `folder`, show the tables and write the files. `ks` are
    those of pass@k and maj@k. Raises DataError without rows. Not to be called in an event loop."""

    async def report() -> Summary:
        try:
            scorer = make_scorer(view.say, compat)
            async with stored_rows(folder, scorer) as rows:
                found = await figures(folder, rows, scorer, ks)
            return await show_report(folder, *found, view)
        finally:
            await close_shared()

    return asyncio.run(report())


async def figures(
    folder: Path, rows: Sequence[EvalRow], scorer: Scorer, ks: Sequence[int] = ()
) -> tuple[Summary, list[QuestionRows]]:
    """The summary of these rows of the evaluation in `folder`, and its questions; scores and votes
    are filled into the rows."""
    name = f"{folder.name}: {load_saved(folder).subject.get('name', '')}".rstrip(": ")
    again = bool(scorer.compat)  # stored scores are those without it
    return await summarise(name, rows, scorer, ks=ks, again=again)


async def show_report(
    folder: Path, summary: Summary, questions: Sequence[QuestionRows], view: View
) -> Summary:
    """Show the tables and write the files, newer than the rows: the viewer takes its figures from
    summary.json only then."""
    for table in terminal_tables_of(summary):
        view.show(table)
    await in_thread(_write, folder, summary, questions)
    view.say(f"written to {folder}: {SUMMARY_FILE}, {MARKDOWN_FILE}, {PLOTS}/")
    return summary


def _write(folder: Path, summary: Summary, questions: Sequence[QuestionRows]) -> None:
    plots, overall = plots_of(summary, questions), summary.overall
    (folder / PLOTS).mkdir(exist_ok=True)
    for name, data in plots.items():
        write_whole(folder / PLOTS / f"{name}.png", data)
    subtitle = (
        f"{overall.num_questions} questions, {overall.num_trajectories} graded trajectories, "
        f"{overall.num_failed} failed{_weights_of(load_saved(folder).subject)}"
    )
    head = f"# {markdown(summary.name)}\n\n{markdown(subtitle)}"
    text = f"{head}\n\n{lines_of(tables_of(summary))}\n"
    text += "## Plots\n\n" + "".join(f"![{name}]({PLOTS}/{name}.png)\n\n" for name in plots)
    write_whole(folder / MARKDOWN_FILE, text.encode("utf-8", "replace"))
    encoded = msgspec.json.format(msgspec.json.encode(summary), indent=2)
    write_whole(folder / SUMMARY_FILE, encoded + b"\n")


def _weights_of(subject: Mapping[str, Any]) -> str:
    """The weights of a run that were asked; those of a model directory are named by it alone."""
    if "step" not in subject:
        return ""
    return f", after step {subject['step']} (policy version {subject['policy_version']})"
