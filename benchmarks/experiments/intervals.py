"""Intervals over seeds of figures of learning curves: ratios of calls, success at a budget."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import fmean
from typing import Any

import numpy as np

from agentenv.evaluation import statistics
from agentenv.evaluation.sets import Curve, calls_to


def curve_of(points: Sequence[Mapping[str, Any]]) -> Curve:
    """The curve of stored points: calls so far, and a text of 0 and 1 for the questions."""
    calls = np.array([point["calls"] for point in points], float)
    return Curve(calls, np.array([[int(bit) for bit in p["right"]] for p in points], float), calls)


def success_at(calls: statistics.Floats, success: statistics.Floats, budget: float) -> float:
    """Success after `budget` calls; constant after the last evaluation."""
    return float(np.interp(budget, calls, success))


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval over seeds; None for one seed, or if all seeds have the same
    ratio. In `num_missed` of `num_seeds` seeds, an arm never reached the level."""

    value: float
    low: float | None
    high: float | None
    num_seeds: int
    num_missed: int = 0

    def __str__(self) -> str:
        spread = "" if self.low is None else f" [{self.low:.2f}, {self.high:.2f}]"
        return f"{self.value:.2f}{spread}"


Pairs = Sequence[tuple[Curve, Curve]]  # per seed: the arm and its baseline


def ratio_of_calls(pairs: Pairs, level: float) -> Estimate:
    """Calls that the first needs for `level`, divided by those of the second: geometric mean over
    seeds, with Student's interval for the logarithm. A run that never meets it counts with the
    calls of the longest one."""
    most = max(curve.calls[-1] for pair in pairs for curve in pair)
    found = [[calls_to(one.calls, one.success(), level, most) for one in pair] for pair in pairs]
    logs = [log(max(one, 1.0) / max(other, 1.0)) for (one, _), (other, _) in found]
    missed = sum(not all(met for _, met in pair) for pair in found)
    spread = statistics.ratio(logs)
    low, high = (None, None) if spread is None else map(float, np.exp(spread))
    return Estimate(exp(fmean(logs)), low, high, len(pairs), missed)


def difference_at(pairs: Pairs, budget: float) -> Estimate:
    """Success of the first minus that of the second after `budget` calls, mean over seeds."""
    at = [[success_at(curve.calls, curve.success(), budget) for curve in pair] for pair in pairs]
    return _difference([(other, one) for one, other in at], pairs)


def gain(curves: Sequence[Curve]) -> Estimate:
    """Success at the last evaluation minus that at the first, mean over seeds."""
    ends = [(float(curve.success()[0]), float(curve.success()[-1])) for curve in curves]
    return _difference(ends, [(curve, curve) for curve in curves])


def _difference(shares: Sequence[tuple[float, float]], pairs: Pairs) -> Estimate:
    """Mean over seeds of second - first. Seeds are drawn at random; the held-out questions are the
    samples of a seed."""
    first, second = np.array(shares).T
    low, high = statistics.difference(first, second, [one.right.shape[1] for one, _ in pairs])
    return Estimate(float((second - first).mean()), float(low), float(high), len(pairs))
