"""Plots of runs and evaluations, drawn without a display: the learning curve, and entropy by
position in a turn.

ARPO (arXiv 2507.19849) and AEPO (arXiv 2510.14545) rely on a rise of entropy in the first tokens
after a tool result; entropy.csv and entropy.png show whether the trained policy has one.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any

from agentenv.base.disk import write_whole
from agentenv.data.data_files import Row
from agentenv.rollout.metrics import EntropyProfile, profile_rows


def panels(num_columns: int, size: tuple[float, float], title: str = "") -> tuple[Any, list[Any]]:
    """A figure of `size` (width and height in inches) and its axes in one row, with a grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    found = list(figure.subplots(1, num_columns, squeeze=False).flat)
    for axes in found:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    return figure, found


CHARS_PER_INCH = 19.0  # of a small font


def png(figure: Any, dpi: int = 110) -> bytes:
    """The figure as a PNG file. Axes with labels but no legend get a legend below them, where it
    covers neither curves nor labels."""
    from matplotlib.transforms import ScaledTranslation

    inches = figure.dpi_scale_trans
    for axes in figure.axes:
        _, labels = axes.get_legend_handles_labels()
        if labels and axes.get_legend() is None:
            width = figure.get_size_inches()[0] * axes.get_position().width
            fitting = int(CHARS_PER_INCH * width / (max(map(len, labels)) + 6))  # 6: the line
            ncols = max(1, min(fitting, len(labels)))
            below = ScaledTranslation(0, -0.45 if axes.get_xlabel() else -0.25, inches)
            axes.legend(
                fontsize="small", loc="upper center", ncols=ncols, frameon=False,
                bbox_to_anchor=(0.5, 0), bbox_transform=axes.transAxes + below,
            )  # fmt: skip
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


APART = 0.015  # of the x-axis, between markers of one update; less between close updates
BEFORE = 0.1  # of the x-axis, between the evaluations before and after a cold start


def _evaluations(axes: Any, rows: Sequence[Row]) -> None:
    """Plot the success of sets with intervals, with markers next to each other instead of
    overlapping; if trajectories failed, also their share and the success with failures counted as
    wrong."""
    ends = ("/success", "/failed_share")  # without the first, all trajectories failed
    keys = {key for row in rows for key in row if key.startswith("eval/") and key.endswith(ends)}
    names = sorted({key.split("/")[1] for key in keys})
    steps = [row["step"] for row in rows if keys & row.keys()]
    span = max([1, *steps]) - min([0, *steps])
    is_cold = any(row.get("phase") == "after_sft" for row in rows)
    between = min((b - a for a, b in pairwise(sorted(set(steps)))), default=span)
    apart = min(APART * span, 0.6 * between / max(1, len(names)))
    for place, name in enumerate(names):
        shift = (place - (len(names) - 1) / 2) * apart

        def at(row: Row, shift: float = shift) -> float:
            is_before = is_cold and row.get("phase") == "before_sft"
            return float(row["step"]) + shift - (BEFORE * span if is_before else 0.0)

        _evaluation(axes, rows, name, at)
    if is_cold and steps:
        axes.axvline(-BEFORE / 2 * span, color="grey", linestyle=":", linewidth=1)
        axes.annotate(
            "cold start", (-BEFORE / 2 * span, 0.5), xycoords=("data", "axes fraction"),
            rotation=90, ha="right", va="center", fontsize="small", color="grey",
        )  # fmt: skip


def _evaluation(axes: Any, rows: Sequence[Row], name: str, at: Callable[[Row], float]) -> None:
    key = f"eval/{name}/success"
    measured = list({at(row): row for row in rows if key in row}.values())
    latest = {row["step"]: row for row in measured}  # without the one before a cold start
    joined = list(latest.values()) if len(latest) > 2 else []  # no line between only two points
    ends = [f"{row[key]:.2f}" for row in measured]
    label = f"{name}: {' to '.join([*ends[:1], *ends[1:][-1:]])}" if measured else name
    (drawn,) = axes.plot(
        [at(row) for row in measured], [row[key] for row in measured], "o", label=label,
        markersize=5,
    )  # fmt: skip
    color = drawn.get_color()
    axes.plot([at(row) for row in joined], [row[key] for row in joined], "-", color=color)
    known = [row for row in measured if f"{key}_high" in row]
    if known:
        bounds = [[max(0.0, row[key] - row[f"{key}_low"]) for row in known],
                  [max(0.0, row[f"{key}_high"] - row[key]) for row in known]]  # fmt: skip
        places, values = [at(row) for row in known], [row[key] for row in known]
        axes.errorbar(places, values, bounds, fmt="none", ecolor=color, capsize=3)
    failed = [row for row in rows if row.get(f"eval/{name}/failed_share")]
    for part, what, sign in (
        ("failed_share", "share of failed trajectories", "x"),
        ("success_if_failed_wrong", "success, failed as wrong", "v"),
    ):
        if failed:
            points = [(at(row), row[f"eval/{name}/{part}"]) for row in failed]
            axes.plot(*zip(*points, strict=True), sign, color=color, label=f"{name}: {what}")
