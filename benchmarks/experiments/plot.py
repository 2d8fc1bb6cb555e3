"""The picture of `algorithms.py`: learning curves over tool calls, and ratios of calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from agentenv.assembly.reports.pictures import panels, png
from benchmarks.experiments.intervals import curve_of
from benchmarks.experiments.tables import BEST

SHOWN = {
    "grpo": "black",
    "grpo-6": "dimgray",
    "grpo-5": "darkgray",
    "grpo-4": "lightgray",
    "arpo": "tab:blue",
    "aepo": "tab:orange",
}


def plot(result: dict[str, Any], target: Path) -> None:
    """Left: success of each seed (thin) and its mean (thick). Right: calls needed for a level,
    divided by those of the best GRPO, with the interval over seeds."""
    figure, (left, right) = panels(2, (11, 4.2))
    for arm, color in SHOWN.items():
        if arm in result["runs"]:
            _curves(left, arm, color, result["runs"][arm])
    left.set(xlabel="tool calls of training", ylabel="held-out success", ylim=(0, 1.02))
    if left.lines:
        left.legend(loc="lower right", fontsize="small")
    _ratios(right, result)
    target.write_bytes(png(figure, dpi=90))


def _curves(axes: Any, arm: str, color: str, by_seed: dict[int, Any]) -> None:
    curves = [curve_of(run["points"]) for run in by_seed.values()]
    shared = np.linspace(0, min(curve.calls[-1] for curve in curves), 100)
    for curve in curves:
        axes.plot(curve.calls, curve.success(), color=color, alpha=0.25, lw=0.8)
    mean = np.mean([np.interp(shared, curve.calls, curve.success()) for curve in curves], 0)
    axes.plot(shared, mean, color=color, lw=2.2, label=f"{arm}, {len(curves)} seeds")


def _ratios(axes: Any, result: dict[str, Any]) -> None:
    levels = result["levels"]
    shown = [arm for arm, row in result["arms"].items() if row.get(BEST)]
    for place, level in enumerate(levels):
        for number, arm in enumerate(shown):
            found = result["arms"][arm][BEST][f"calls to {level}"]
            height = number + (place - (len(levels) - 1) / 2) * 0.2
            if found["low"] is not None:
                spread = (found["low"], found["high"])
                axes.plot(spread, (height, height), color=f"C{place}", lw=1.5)
            label = f"to reach {level}" if number == 0 else None
            axes.plot(found["value"], height, "o", color=f"C{place}", markersize=5, label=label)
    axes.axvline(1.0, color="black", lw=0.8)
    axes.set(xlabel="tool calls needed / those of the best GRPO (95 % interval)")
    if shown:
        axes.set_yticks(range(len(shown)), shown)
        axes.set_ylim(len(shown) - 0.5, -0.5)
        axes.legend(loc="center right", fontsize="small")
