"""The plots of a report, as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from typing import Any

import numpy as np

from launchers.evaluation.figure_types import Estimate, Summary
from launchers.evaluation.figures import Question
from launchers.evaluation.report_tables import groups_of
from launchers.evaluation.tables import plain

MAX_BARS = 40
MAX_LABEL = 32
RIGHT, WRONG, LINE = "#2a7f62", "#c8553d", "#33658a"


def plots_of(summary: Summary, questions: Sequence[Question]) -> dict[str, bytes]:
    """PNG files by name: accuracy by group, pass@k, tool calls, tokens, latency."""
    import matplotlib

    matplotlib.use("Agg")
    plots = {"groups": _groups(summary)}
    if summary.num_samples > 1:
        plots["pass_at_k"] = _pass_at_k(summary)
    if summary.overall.num_trajectories:
        plots["tool_calls"] = _tool_calls(questions)
        plots["tokens"] = _histogram(questions, "action_tokens", "sampled tokens")
        plots["seconds"] = _histogram(questions, "seconds", "seconds")
    return plots


def _figure(height: float) -> tuple[Any, Any]:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, height), layout="constrained")
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Any) -> bytes:
    from matplotlib import pyplot as plt

    file = BytesIO()
    figure.savefig(file, format="png", dpi=110)
    plt.close(figure)
    return file.getvalue()


def _label(text: str) -> str:
    """Text that is not ours: no control characters, no formulas, not too long."""
    text = plain(text).replace("$", r"\$")
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 3] + "..."


def _groups(summary: Summary) -> bytes:
    bars = [
        (_label(value if name in ("", "dataset", "kind") else f"{name} {value}"), estimate)
        for name, value, figures in groups_of(summary)
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
    return _png(figure)


def _pass_at_k(summary: Summary) -> bytes:
    figure, axes = _figure(3.8)
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
    axes.legend(loc="lower right")
    return _png(figure)


def _tool_calls(questions: Sequence[Question]) -> bytes:
    done = [row for question in questions for row in question.done]
    calls = {
        "right": [len(row.tool_calls) for row in done if row.success],
        "wrong": [len(row.tool_calls) for row in done if not row.success],
    }
    most = max((len(row.tool_calls) for row in done), default=0)
    edges = np.arange(most + 2) - 0.5 if most <= 40 else np.linspace(-0.5, most + 0.5, 41)
    figure, axes = _figure(3.8)
    axes.hist(
        list(calls.values()), bins=edges.tolist(), stacked=True, color=[RIGHT, WRONG],
        label=[f"{name} ({len(values)})" for name, values in calls.items()],
    )  # fmt: skip
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set(xlabel="tool calls", ylabel="trajectories", title="tool calls of a trajectory")
    axes.legend()
    return _png(figure)


def _histogram(questions: Sequence[Question], name: str, unit: str) -> bytes:
    done = [row for question in questions for row in question.done]
    values = [
        [getattr(row, name) for row in done if row.success is right] for right in (True, False)
    ]
    figure, axes = _figure(3.8)
    axes.hist(values, bins=40, stacked=True, color=[RIGHT, WRONG], label=["right", "wrong"])
    for percent, label, style in ((50, "median", "-"), (95, "95th percentile", ":")):
        place = float(np.percentile([value for own in values for value in own], percent))
        axes.axvline(place, color="black", linestyle=style, linewidth=1.2, label=label)
    axes.set(xlabel=unit, ylabel="trajectories", title=f"{unit} of a trajectory")
    axes.legend(fontsize="small")
    return _png(figure)


def _bounds(estimate: Estimate) -> tuple[float, float, float]:
    value = estimate.value or 0.0
    return value, estimate.low or 0.0, estimate.high or 0.0
