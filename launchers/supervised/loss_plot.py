"""The curves of a supervised run, from its metrics.jsonl to loss.png."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SMOOTHING = 0.9  # of the running mean that is drawn over the steps


def plot_losses(run: Path, name: str, keys: tuple[str, ...]) -> None:
    """One panel a key: each step, their running mean, and the held-out rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    figure, panels = plt.subplots(
        1, len(keys), figsize=(5.5 * len(keys), 4.2), layout="constrained", squeeze=False
    )
    for axes, key in zip(panels[0], keys, strict=True):
        steps, values = _series(rows, f"{name}/{key}")
        axes.plot(steps, values, alpha=0.35, label="steps")
        axes.plot(steps, smoothed(values), color="C0", label="running mean")
        steps, values = _series(rows, f"eval/{key}")
        if steps:
            axes.plot(steps, values, "o-", color="C1", markersize=4, label="held out")
        axes.set(title=key, xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.suptitle(run.name)
    figure.savefig(run / "loss.png", dpi=110)
    plt.close(figure)


def smoothed(values: list[float]) -> list[float]:
    """Exponential running mean, corrected for its beginning."""
    mean, weight, means = 0.0, 0.0, []
    for value in values:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        weight = SMOOTHING * weight + 1 - SMOOTHING
        means.append(mean / weight)
    return means


def _series(rows: list[dict[str, Any]], key: str) -> tuple[list[int], list[float]]:
    found = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in found], [value for _, value in found]
