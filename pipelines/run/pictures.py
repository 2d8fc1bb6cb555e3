"""Pictures of runs and evaluations: panels with one look, drawn without a display; the learning
curve, figures by update, and entropy by position in a turn.

ARPO (arXiv 2507.19849) and AEPO (arXiv 2510.14545) rest on a rise of entropy in the first tokens
after a tool result; entropy.csv and entropy.png show whether the user's own policy has one.
"""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from agentenv.data_files import Row
from agentenv.disk import write_whole
from agentenv.metrics import EntropyProfile


def panels(
    num_rows: int, num_columns: int, size: tuple[float, float], title: str = ""
) -> tuple[Any, list[Any]]:
    """A figure of `size` (width and height in inches) and its axes, row by row, with a grid."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    found = list(figure.subplots(num_rows, num_columns, squeeze=False).flat)
    for axes in found:
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    if title:
        figure.suptitle(title)
    return figure, found


CHARS_PER_INCH = 19.0  # of a small font


def png(figure: Any, dpi: int = 110) -> bytes:
    """The figure as a PNG file; axes with labels and without a legend get one below them, where it
    covers no curve."""
    for axes in figure.axes:
        _, labels = axes.get_legend_handles_labels()
        if labels and axes.get_legend() is None:
            width, height = figure.get_size_inches() * axes.get_position().size
            fitting = int(CHARS_PER_INCH * width / (max(map(len, labels)) + 6))  # and its line
            axes.legend(
                fontsize="small",
                loc="upper center",
                bbox_to_anchor=(0.5, -(0.45 if axes.get_xlabel() else 0.25) / height),
                ncols=max(1, min(fitting, len(labels))),
                frameon=False,
            )
    file = BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return file.getvalue()


COLUMNS = ("curve", "position", "entropy", "turns")
SHOWN_SHARE = 0.05  # of a curve's turns; means over fewer are noise and are only in the table


def write_entropy(profile: EntropyProfile, folder: Path, name: str) -> None:
    """entropy.csv and entropy.png: mean entropy (nats) by token position from the start of a turn,
    of first turns and of turns after a tool result, by tool; beside it how many turns each point
    is the mean of."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, COLUMNS)
    table.writeheader()
    table.writerows(profile.rows())
    write_whole(folder / "entropy.csv", text.getvalue())
    _plot(profile, folder / "entropy.png", name)


def _plot(profile: EntropyProfile, target: Path, name: str) -> None:
    # Wide and pale below its tools, of which there may be but one.
    styles: dict[str, dict[str, Any]] = {
        "start": {"color": "black", "linestyle": "--"},
        "after_result": {"color": "black", "linewidth": 4, "alpha": 0.3},
    }
    titles = {"start": "first turn", "after_result": "after any tool result"}
    title = f"{name}: entropy by position, rollouts of the whole run"
    figure, (left, right) = panels(1, 2, (11, 4.2), title)
    for label, curve in profile.curves().items():
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
    write_whole(target, png(figure))


PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("trees waiting and in flight", ("queue/ready", "trees/in_flight")),
    ("staleness, in versions of the policy", ("staleness/max", "staleness/trained_mean")),
    ("forks and roots per step", ("rollout/forks", "rollout/roots")),
    ("failed trajectories, retried turns", ("failed/trajectories", "failed/retaken")),
    (
        "lengths of trajectories, tokens",
        ("length/offered_p50", "length/trained_p50", "length/offered_p90", "length/trained_p90"),
    ),
    ("turns and calls per trajectory", ("rollout/turns", "rollout/calls_per_trajectory")),
    ("shares of trained tokens clipped", ("learner/clipped_high", "learner/clipped_low")),
    ("KL, nats", ("learner/kl_to_proximal", "learner/kl_to_reference")),
    ("gradient norm", ("learner/grad_norm",)),
    ("entropy of sampled tokens, nats", ("rollout/entropy", "learner/entropy")),
)


def write_plots(metrics: Path, folder: Path, name: str) -> list[str]:
    """curve.png and training.png in `folder`; returns their names, none without a row."""
    if not metrics.is_file():
        return []
    lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
    rows = [json.loads(line) for line in lines if line.endswith("\n")]  # else it was cut off
    write_whole(folder / "curve.png", png(learning_curve(rows, name)))
    if not _steps(rows):
        return ["curve.png"]
    write_whole(folder / "training.png", png(training_figures(rows, name), dpi=100))
    return ["curve.png", "training.png"]


LEAST_HEIGHT = 0.05  # of a curve's axis, which begins at 0


def learning_curve(rows: Sequence[Row], name: str) -> Any:
    """A figure of training reward and success by step, and of the evaluations; scaled to them, with
    0 in view."""
    steps = _steps(rows)
    figure, (left, right) = panels(1, 2, (11, 5), name)
    # Often equal, so that the one must not cover the other.
    curves = [("reward/success", "success", "-"), ("reward/mean", "reward", "--")]
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
    for key, style in _eval_keys(rows):
        _evaluation(right, rows, key, style)
    right.set(title="evaluation success (sampled)", xlabel="update")
    for axes in (left, right):
        axes.locator_params(axis="x", integer=True)
        low, high = min(0.0, axes.dataLim.y0), max(LEAST_HEIGHT, axes.dataLim.y1)
        margin = 0.04 * (high - low)
        axes.set_ylim(low - margin, high + margin)
    return figure


def _evaluation(axes: Any, rows: Sequence[Row], key: str, style: str) -> None:
    """Success of a set, or of a kind of its questions; of a set with its interval and, where some
    failed, their share and the success if they were wrong."""
    place = key.removesuffix("/success")
    label = place.removeprefix("eval/")
    measured = [row for row in rows if key in row]  # else all trajectories failed
    steps, values = [row["step"] for row in measured], [row[key] for row in measured]
    latest = dict(zip(steps, values, strict=True))  # what came before a cold start stands by itself
    joined = len(latest) > 2  # which two points alone are not: nobody looked in between
    curve = style if joined else style[0]
    (line,) = axes.plot(latest.keys(), latest.values(), curve, label=label, markersize=5)
    axes.plot(steps, values, style[0], color=line.get_color(), markersize=5)
    if key.count("/") > 2:
        return
    known = [row for row in rows if f"{place}/success_high" in row]
    bounds = [[row[f"{place}/success_{end}"] for row in known] for end in ("low", "high")]
    axes.vlines([row["step"] for row in known], *bounds, color=line.get_color(), alpha=0.5)
    failed = [row for row in rows if row.get(f"{place}/failed_share")]
    for name, what, marker in (
        ("failed_share", "share of failed trajectories", "x"),
        ("success_if_failed_wrong", "success, failed as wrong", "v"),
    ):
        if failed:
            points = [(row["step"], row[f"{place}/{name}"]) for row in failed]
            axes.plot(*zip(*points, strict=True), marker, color=line.get_color(),
                      label=f"{label}: {what}")  # fmt: skip


def _eval_keys(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Success keys with marker and line: whole sets solid; kinds of questions dotted, where a set
    has several."""
    keys = sorted({k for row in rows for k in row if k.startswith("eval/")})
    places = [key.rpartition("/")[0] for key in keys if key.endswith(("/success", "/failed_share"))]
    keys = [f"{place}/success" for place in dict.fromkeys(places)]
    kinds = Counter(key.split("/")[1] for key in keys if key.count("/") > 2)
    styles = {key: "o-" if key.count("/") == 2 else ".:" for key in keys}
    return [(key, style) for key, style in styles.items()
            if style == "o-" or kinds[key.split("/")[1]] > 1]  # fmt: skip


def training_figures(rows: Sequence[Row], name: str) -> Any:
    """A figure of all beside the reward, by step: trees, lengths, tools, learner, seconds."""
    steps = _steps(rows)
    figure, axes = panels(4, 3, (13, 14), f"{name}: by update")
    places = iter(axes)
    calls = sorted({key for row in steps for key in row if _is_tool(key, ("calls", "errors"))})
    for title, keys in (*PANELS, ("tool calls per step", calls)):
        _panel(next(places), title, steps, keys)
    _seconds(next(places), steps)
    return figure


def _panel(axes: Any, title: str, steps: Sequence[Row], keys: Sequence[str]) -> None:
    for key in keys:
        points = [(row["step"], row[key]) for row in steps if key in row]
        if points:
            label = key.removeprefix("tool/")
            dotted = ":" if key.endswith("/errors") else "-"
            marker = "." if len(points) < 3 else ""
            axes.plot(*zip(*points, strict=True), dotted + marker, label=label)
    axes.set_title(title, fontsize="medium")
    axes.locator_params(axis="x", integer=True)


def _seconds(axes: Any, steps: Sequence[Row]) -> None:
    """Wall seconds of a step, stacked by what the learner did."""
    parts = sorted({k for row in steps for k in row if k.startswith("time/") and k.endswith("_s")})
    parts = [key for key in parts if not key.endswith("tokens_per_s")]
    values = [[row.get(key, 0.0) for row in steps] for key in parts]
    labels = [key.removeprefix("time/").removesuffix("_s") for key in parts]
    if parts:
        axes.stackplot([row["step"] for row in steps], values, labels=labels)
    axes.set_title("seconds per step, by part", fontsize="medium")
    axes.locator_params(axis="x", integer=True)


def _is_tool(key: str, figures: Sequence[str]) -> bool:
    return key.startswith("tool/") and key.rpartition("/")[2] in figures


def _steps(rows: Sequence[Row]) -> list[Row]:
    """The rows of updates."""
    return [row for row in rows if "trees/offered" in row]
