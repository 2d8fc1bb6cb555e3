"""The picture of `algorithms.py`: learning curves over tool calls, and ratios of calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.stats import Curve
from launchers.plots import panels, png

SHOWN = {"grpo": "tab:gray", "arpo": "tab:blue", "aepo": "tab:orange"}


def plot(result: dict[str, Any], target: Path, levels: Sequence[float], base: str) -> None:
    """Left: success of each seed (thin) and its mean (thick). Right: calls needed for a level, as
    a share of those that `base` needs, with the bootstrap interval."""
    figure, (left, right) = panels(1, 2, (11, 4.2))
    for arm, colour in SHOWN.items():
        if arm in result["runs"]:
            _curves(left, arm, colour, result["runs"][arm])
    left.set(xlabel="tool calls of training", ylabel="held-out success", ylim=(0, 1.02))
    left.legend(loc="lower right")
    _ratios(right, result["arms"], levels, base)
    target.write_bytes(png(figure, dpi=90))


def _curves(axes: Any, arm: str, colour: str, by_seed: dict[int, Any]) -> None:
    curves = [Curve.of(run["points"]) for run in by_seed.values()]
    shared = np.linspace(0, min(curve.calls[-1] for curve in curves), 100)
    for curve in curves:
        axes.plot(curve.calls, curve.success(), color=colour, alpha=0.25, lw=0.8)
    mean = np.mean([np.interp(shared, curve.calls, curve.success()) for curve in curves], 0)
    axes.plot(shared, mean, color=colour, lw=2.2, label=f"{arm}, {len(curves)} seeds")


def _ratios(axes: Any, arms: dict[str, Any], levels: Sequence[float], base: str) -> None:
    shown = [arm for arm in SHOWN if arms.get(arm, {}).get(f"against {base}")]
    for place, level in enumerate(levels):
        for number, arm in enumerate(shown):
            found = arms[arm][f"against {base}"][f"calls to {level}"]
            middle, spread = found["value"], (found["low"], found["high"])
            height = number + (place - (len(levels) - 1) / 2) * 0.22
            axes.plot(spread, (height, height), color=f"C{place}", lw=1.5)
            label = f"to reach {level}" if number == 0 else None
            axes.plot(middle, height, "o", color=f"C{place}", markersize=5, label=label)
    axes.axvline(1.0, color="black", lw=0.8)
    axes.set_yticks(range(len(shown)), shown)
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xlim(right=1.25)
    axes.set(xlabel=f"tool calls needed / those of {base} (95 % interval)")
    if shown:
        axes.legend(loc="center right", fontsize="small")
