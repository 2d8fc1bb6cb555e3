"""Plots of runs and evaluations, drawn without a display: the learning curve, and entropy by
position in a turn.

ARPO (arXiv 2507.19849) and AEPO (arXiv 2510.14545) rely on a rise of entropy in the first tokens
after a tool result; entropy.csv and entropy.png show whether the trained policy has one.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from agentenv.base.disk import write_whole
from agentenv.data.data_files import Row
from agentenv.rollout.metrics import EntropyProfile, profile_rows


def panels(num_columns: int, size: tuple[float, float], title: str = "") -> tuple[Any, list[Any]]:
    """A figure of `size` (width and height in inches) and its axes in one row, with a grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    found = [part.subplots() for part in figure.subfigures(1, num_columns, squeeze=False).flat]
    for axes in found:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    return figure, found


def png(figure: Any, dpi: int = 110) -> bytes:
    """The figure as a PNG file, with a legend below axes that have labels."""
    for axes in figure.axes:
        lines, labels = axes.get_legend_handles_labels()
        if labels:
            where = {"loc": "outside lower center", "ncols": 2, "frameon": False}
            axes.figure.legend(lines, labels, fontsize="small", **where)
    file = BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return file.getvalue()


COLUMNS = ("curve", "position", "entropy", "turns")
SHOWN_SHARE = 0.05  # of a curve's turns; means over fewer are noise, and only in the table


def write_entropy(profile: EntropyProfile, folder: Path, name: str) -> None:
    """Write entropy.csv and entropy.png: mean entropy (nats) and number of turns by token position
    in a turn, for first turns and for turns after a tool result, by tool."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, COLUMNS)
    table.writeheader()
    table.writerows(profile_rows(profile))
    write_whole(folder / "entropy.csv", text.getvalue())
    _plot(profile, folder / "entropy.png", name)


def _plot(profile: EntropyProfile, target: Path, name: str) -> None:
    # Wide and pale, below the curves of the tools: with one tool, they coincide.
    styles: dict[str, dict[str, Any]] = {
        "start": {"color": "black", "linestyle": "--"},
        "after_result": {"color": "black", "linewidth": 4, "alpha": 0.3},
    }
    titles = {"start": "first turn", "after_result": "after any tool result"}
    title = f"{name}: entropy by position, rollouts of the whole run"
    figure, (left, right) = panels(2, (11, 4.2), title)
    for label, curve in profile.items():
        if not curve.count:
            continue
        style = styles.get(label, {})
        length = sum(count >= SHOWN_SHARE * curve.count[0] for count in curve.count)
        for axes, values in ((left, curve.mean[:length]), (right, curve.count)):
            axes.plot(values, label=titles.get(label, label.replace("/", " ")), **style)
    left.set(
        title="mean entropy, nats, up to the length of the longest 5 % of turns",
        xlabel="token of the turn",
        ylim=(0, None),
    )
    right.set(title="turns of at least that length", xlabel="token of the turn", ylim=(0, None))
    for axes in (left, right):
        axes.locator_params(axis="x", integer=True)
    write_whole(target, png(figure))


def read_metrics(run: Path) -> list[Row]:
    """The rows of metrics.jsonl, without a truncated last one."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write_curve(run: Path) -> None:
    """Write curve.png of a run, if it has metrics."""
    if (run / "metrics.jsonl").is_file():
        write_whole(run / "curve.png", png(learning_curve(read_metrics(run), run.name)))


MIN_HEIGHT = 0.05  # of the y-axis, which begins at 0


def learning_curve(rows: Sequence[Row], name: str) -> Any:
    """A figure of training reward and success by step, and of evaluation success. The y-axes fit
    the values and include 0."""
    steps = [row for row in rows if "trees/offered" in row]
    figure, (left, right) = panels(2, (11, 5), name)
    curves = [("reward/success", "success", "-"), ("reward/mean", "reward", "--")]
    if all(row.get("reward/success") == row.get("reward/mean") for row in steps):
        curves = [("reward/success", "success, which is the reward", "-")]
    if any(row.get("failed/share") for row in steps):
        curves += [
            ("failed/share", "share of failed trajectories", ":"),
            ("reward/success_if_failed_wrong", "success, failed as wrong", "-."),
        ]
    marker = "." if len(steps) < 3 else ""
    for key, label, style in curves:
        values = [row.get(key) for row in steps]
        left.plot([row["step"] for row in steps], values, style + marker, label=label)
    left.set(title="training rollouts (sampled)", xlabel="update")
    _evaluations(right, rows)
    right.set(title="evaluation success (sampled), 95 % intervals", xlabel="update")
    for axes in (left, right):
        axes.locator_params(axis="x", integer=True)
        axes.margins(x=0.04)
        low, high = min(0.0, axes.dataLim.y0), max(MIN_HEIGHT, axes.dataLim.y1)
        margin = 0.04 * (high - low)
        axes.set_ylim(low - margin, high + margin)
    return figure


BEFORE = 0.1  # of the x-axis, between the evaluations before and after a cold start


def _evaluations(axes: Any, rows: Sequence[Row]) -> None:
    """Plot the success of sets with intervals; if trajectories failed, also their share and the
    success with failures counted as wrong."""
    ends = ("/success", "/failed_share")  # without the first, all trajectories failed
    keys = {key for row in rows for key in row if key.startswith("eval/") and key.endswith(ends)}
    last = max([1, *(row["step"] for row in rows if keys & row.keys())])
    is_cold = any(row.get("phase") == "after_sft" for row in rows)

    def at(row: Row) -> float:
        is_before = is_cold and row.get("phase") == "before_sft"
        return float(row["step"]) - (BEFORE * last if is_before else 0.0)

    for number, name in enumerate(sorted({key.split("/")[1] for key in keys})):
        key, color = f"eval/{name}/success", f"C{number % 10}"
        if measured := {at(row): row for row in rows if key in row}:
            values = [row[key] for row in measured.values()]
            bounds = [
                [max(0.0, row[key] - row.get(f"{key}_low", row[key])) for row in measured.values()],
                [
                    max(0.0, row.get(f"{key}_high", row[key]) - row[key])
                    for row in measured.values()
                ],
            ]
            label = f"{name}: {' to '.join(f'{one:.2f}' for one in (values[0], *values[1:][-1:]))}"
            axes.errorbar(
                [*measured], values, bounds, fmt="o-", color=color, label=label, capsize=3
            )
        failed = [row for row in rows if row.get(f"eval/{name}/failed_share")]
        for part, what, sign in (
            ("failed_share", "share of failed trajectories", "x"),
            ("success_if_failed_wrong", "success, failed as wrong", "v"),
        ):
            if failed:
                points = [(at(row), row[f"eval/{name}/{part}"]) for row in failed]
                axes.plot(*zip(*points, strict=True), sign, color=color, label=f"{name}: {what}")
