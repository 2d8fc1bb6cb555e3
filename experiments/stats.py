"""Statistics of `algorithms.py`: learning curves over tool calls, paired by seed and
question, with intervals from a bootstrap over seeds and over questions within them.

A curve is held-out success at every evaluation against the tool calls of training so far,
joined by straight lines. `calls_to` is where it first meets a level; a curve that never does
counts with all its calls, which is less than it would need: such cases are counted and shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Curve:
    """`calls` [E] so far at each of E evaluations; `right` [E, Q] of 0 and 1 for Q questions."""

    calls: Floats
    right: Floats

    @classmethod
    def of(cls, points: Sequence[Mapping[str, Any]]) -> Curve:
        calls = np.array([point["calls"] for point in points], float)
        return cls(calls, np.array([[int(bit) for bit in p["right"]] for p in points], float))

    def first(self, num_evaluations: int) -> Curve:
        """The curve up to there."""
        return Curve(self.calls[:num_evaluations], self.right[:num_evaluations])

    def success(self, questions: NDArray[np.int64] | None = None) -> Floats:
        """[E], over the given questions (indices, repeats allowed) or all."""
        right = self.right if questions is None else self.right[:, questions]
        found: Floats = right.mean(1)
        return found


def calls_to(calls: Floats, success: Floats, level: float) -> tuple[float, bool]:
    """Tool calls at the first crossing of `level`, and whether there was one."""
    above = np.flatnonzero(success >= level)
    if not len(above):
        return float(calls[-1]), False
    last = above[0]
    if last == 0:
        return float(calls[0]), True
    rise = success[last] - success[last - 1]
    share = (level - success[last - 1]) / rise
    return float(calls[last - 1] + share * (calls[last] - calls[last - 1])), True


def success_at(calls: Floats, success: Floats, budget: float) -> float:
    """Success after `budget` calls; beyond the last evaluation its value."""
    return float(np.interp(budget, calls, success))


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % bootstrap interval; `num_missed` of `num_seeds` seeds had an arm
    that never met the level."""

    value: float
    low: float
    high: float
    num_seeds: int
    num_missed: int = 0

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


Pairs = Sequence[tuple[Curve, Curve]]  # by seed: the arm and what it is compared with
Figure = Callable[[Floats, Floats, Floats, Floats], float]  # calls and success of both


def ratio_of_calls(pairs: Pairs, level: float, num_draws: int = 2000) -> Estimate:
    """Calls of the first needed for `level` over those of the second: geometric mean over seeds
    of the ratio."""

    def log_ratio(calls: Floats, success: Floats, others: Floats, theirs: Floats) -> float:
        mine, its = calls_to(calls, success, level)[0], calls_to(others, theirs, level)[0]
        return float(np.log(max(mine, 1.0) / max(its, 1.0)))

    missed = sum(
        not all(calls_to(curve.calls, curve.success(), level)[1] for curve in pair)
        for pair in pairs
    )
    value, low, high = np.exp(_bootstrap(pairs, log_ratio, num_draws))
    return Estimate(float(value), float(low), float(high), len(pairs), missed)


def difference_at(pairs: Pairs, budget: float, num_draws: int = 2000) -> Estimate:
    """Success of the first minus that of the second after equally many calls, mean over seeds."""

    def difference(calls: Floats, success: Floats, others: Floats, theirs: Floats) -> float:
        return success_at(calls, success, budget) - success_at(others, theirs, budget)

    return Estimate(*_bootstrap(pairs, difference, num_draws), len(pairs))


def gain(curves: Sequence[Curve], num_draws: int = 2000) -> Estimate:
    """Success at the last evaluation minus that at the first, mean over seeds."""

    def difference(_c: Floats, success: Floats, _o: Floats, theirs: Floats) -> float:
        return float(success[-1] - theirs[0])

    return Estimate(*_bootstrap([(c, c) for c in curves], difference, num_draws), len(curves))


def _bootstrap(pairs: Pairs, figure: Figure, num_draws: int) -> tuple[float, float, float]:
    """Mean over seeds of `figure`, and its interval: seeds are drawn with replacement, and within
    each seed questions, the same for both curves and all evaluations."""

    def of(pair: tuple[Curve, Curve], questions: NDArray[np.int64] | None) -> float:
        one, other = pair
        return figure(one.calls, one.success(questions), other.calls, other.success(questions))

    rng = np.random.default_rng(0)
    draws = []
    for _ in range(num_draws):
        drawn = []
        for index in rng.integers(len(pairs), size=len(pairs)):
            size = pairs[index][0].right.shape[1]
            drawn.append(of(pairs[index], rng.integers(size, size=size)))
        draws.append(np.mean(drawn))
    value = float(np.mean([of(pair, None) for pair in pairs]))
    low, high = np.quantile(draws, [0.025, 0.975])
    return value, float(low), float(high)
