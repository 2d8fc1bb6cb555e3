"""Pictures of a run, drawn from metrics.jsonl at its end, also when it was interrupted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]

PANELS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "queue: trees, and staleness in versions",
        ("queue/ready", "trees/in_flight", "staleness/max"),
    ),
    ("lengths, tokens", ("rollout/response_tokens", "rollout/response_tokens_max")),
    ("turns and calls of a trajectory", ("rollout/turns", "rollout/calls_per_trajectory")),
    ("shares of trained tokens clipped", ("learner/clipped_high", "learner/clipped_low")),
    ("KL, nats", ("learner/kl_to_proximal", "learner/kl_to_reference")),
    ("gradient norm", ("learner/grad_norm",)),
    ("entropy of sampled tokens, nats", ("rollout/entropy", "learner/entropy")),
)


def write_plots(metrics: Path, folder: Path, name: str) -> list[str]:
    """curve.png and training.png in `folder`; returns their names, none without a row."""
    if not metrics.is_file():
        return []
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    learning_curve(rows, folder / "curve.png", name)
    return ["curve.png", *_training(_steps(rows), folder / "training.png", name)]


def learning_curve(rows: Sequence[Row], target: Path, name: str) -> None:
    """Plot training reward and success by step, and the evaluations."""
    plt, steps = _pyplot(), _steps(rows)
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for key, label in (("reward/success", "success"), ("reward/mean", "reward")):
        left.plot([r["step"] for r in steps], [r.get(key) for r in steps], label=label)
    left.set(title="training rollouts (sampled)", xlabel="update", ylim=(-1.05, 1.15))
    left.legend(loc="lower right")
    eval_keys = _eval_keys(rows)
    for key, style in eval_keys:
        points = [(row["step"], row[key]) for row in rows if key in row]
        label = key.removeprefix("eval/").removesuffix("/success")
        right.plot(*zip(*points, strict=True), style, label=label, markersize=4)
    right.set(title="evaluation success (sampled)", xlabel="update", ylim=(-0.02, 1.02))
    if eval_keys:
        right.legend(loc="lower right", fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.suptitle(name)
    figure.savefig(target, dpi=110)
    plt.close(figure)


def _eval_keys(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Success keys with a line style: whole sets solid, kinds of questions dotted."""
    keys = sorted({k for row in rows for k in row if k.startswith("eval/")})
    keys = [key for key in keys if key.endswith("/success")]
    return [(key, "o-" if key.count("/") == 2 else "o:") for key in keys]


def _training(steps: Sequence[Row], target: Path, name: str) -> list[str]:
    """Everything beside the reward, by step: queue, lengths, tools, learner, seconds."""
    if not steps:
        return []
    plt = _pyplot()
    figure, axes = plt.subplots(3, 3, figsize=(13, 9.5), layout="constrained")
    places = iter(axes.flat)
    calls = sorted({key for row in steps for key in row if _is_tool(key, ("calls", "errors"))})
    for title, keys in (*PANELS, ("tool calls a step", calls)):
        _panel(next(places), title, steps, keys)
    _seconds(next(places), steps)
    figure.suptitle(f"{name}: by update")
    figure.savefig(target, dpi=100)
    plt.close(figure)
    return [target.name]


def _panel(axes: Any, title: str, steps: Sequence[Row], keys: Sequence[str]) -> None:
    for key in keys:
        points = [(row["step"], row[key]) for row in steps if key in row]
        if points:
            label = key.removeprefix("tool/")
            dotted = ":" if key.endswith("/errors") else "-"
            marker = "." if len(points) < 3 else ""
            axes.plot(*zip(*points, strict=True), dotted + marker, label=label)
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize="small")


def _seconds(axes: Any, steps: Sequence[Row]) -> None:
    """Wall seconds of a step, stacked by what the learner did."""
    parts = sorted({k for row in steps for k in row if k.startswith("time/") and k.endswith("_s")})
    parts = [key for key in parts if key != "time/sampled_tokens_per_s"]
    values = [[row.get(key, 0.0) for row in steps] for key in parts]
    labels = [key.removeprefix("time/").removesuffix("_s") for key in parts]
    if parts:
        axes.stackplot([row["step"] for row in steps], values, labels=labels)
        axes.legend(fontsize="small", loc="upper left")
    axes.set_title("seconds of a step, by part", fontsize="medium")
    axes.grid(alpha=0.3)


def _is_tool(key: str, figures: Sequence[str]) -> bool:
    return key.startswith("tool/") and key.rpartition("/")[2] in figures


def _steps(rows: Sequence[Row]) -> list[Row]:
    """The rows of updates."""
    return [row for row in rows if "trees/offered" in row]


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
