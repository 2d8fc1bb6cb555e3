"""Signals at fork points versus the value of forks there; see forks.py."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pvariance
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentenv.lab.diagnosis.signs import auc, auc_within, interval
from agentenv.learners.algorithms.arpo import relative_rise

Row = dict[str, Any]
Floats = NDArray[np.float64]
WINDOWS = (1, 2, 5, 10, 20, 50)
BETA = 0.2  # the published weight


def level(row: Row, window: int) -> float:
    """Mean entropy of the first tokens after the result, nats."""
    return fmean(row["after"][:window])


def rise(row: Row, window: int) -> float:
    """The paper's signal: the level over that of the first turn."""
    return level(row, window) - fmean(row["first"][:window])


def relative(row: Row, window: int) -> float:
    """The criterion "relative"."""
    return relative_rise(level(row, window), fmean(row["first"][:window]))


def signals(rows: Sequence[Row]) -> dict[str, Floats]:
    """By name, one value per fork point."""
    found: dict[str, Floats] = {}
    for window in WINDOWS:
        found[f"rise {window}"] = np.array([rise(row, window) for row in rows])
        found[f"level {window}"] = np.array([level(row, window) for row in rows])
        found[f"relative {window}"] = np.array([relative(row, window) for row in rows])
    return found


def worth(rows: Sequence[Row]) -> tuple[Floats, Floats]:
    """Variance of the siblings' returns, and 1.0 where they differ in success."""
    variance = np.array([pvariance(row["returns"]) for row in rows])
    differ = np.array([0.0 < fmean(row["right"]) < 1.0 for row in rows], float)
    return variance, differ


def table(rows: Sequence[Row], num_draws: int = 200) -> list[dict[str, Any]]:
    """One row per signal. `within` is the AUC among fork points of the same kind of question and
    depth, which controls for both; `shift` is the change of the fork probability per standard
    deviation of the signal, at the published weight."""
    _, differ = worth(rows)
    places = [f"{row['kind']} {row['depth']}" for row in rows]
    strata = np.unique(places, return_inverse=True)[1]
    unit = math.log(rows[0]["vocab_size"])
    result = []
    for name, signal in signals(rows).items():

        def of_drawn(drawn: NDArray[np.int64], signal: Floats = signal) -> float:
            return auc_within(signal[drawn], differ[drawn], strata[drawn])

        low, high = interval(((row["run"], row["question"]) for row in rows), of_drawn, num_draws)
        has_scale = name.startswith("relative")
        result.append(
            {
                "signal": name,
                "auc": auc(signal, differ),
                "within": (auc_within(signal, differ, strata), low, high),
                "shift": BETA * float(signal.std()) / (1.0 if has_scale else unit),
            }
        )
    return result


def show(rows: Sequence[Row]) -> None:
    """Print the table of each step, over all runs, and the value of forks by depth."""
    for step in sorted({row["step"] for row in rows}):
        chosen = [row for row in rows if row["step"] == step]
        print(f"\nafter {step} updates, {len({row['run'] for row in chosen})} runs")
        for depth in (None, *sorted({row["depth"] for row in chosen})):
            part = [row for row in chosen if depth in (None, row["depth"])]
            print(f"  {'all results' if depth is None else f'result {depth}'}: {_value(part)}")
        for line in table(chosen):
            within = "{:.2f} [{:.2f}, {:.2f}]".format(*line["within"])
            print(
                f"  {line['signal']:<16} AUC {line['auc']:.2f}  within {within}  "
                f"shift {line['shift']:.4f}"
            )


def _value(rows: Sequence[Row]) -> str:
    variance, differ = worth(rows)
    from_root = fmean(row["root_variance"] for row in rows)
    calls, root_calls = (fmean(row[key] for row in rows) for key in ("calls", "root_calls"))
    return (
        f"{len(rows)} fork points, siblings differ at {differ.mean():.0%}; variance of returns "
        f"{variance.mean():.3f} for {calls:.2f} calls a sibling, from scratch {from_root:.3f} for "
        f"{root_calls:.2f}"
    )
