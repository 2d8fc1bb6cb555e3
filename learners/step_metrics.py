"""Metrics of an update from those of its micro-batches, its steps and its ranks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np

from learners.batch import ActionTokens, Floats
from learners.learner import Metrics


def over_steps(steps: Sequence[Metrics]) -> Metrics:
    """Counts add up, maxima stay maxima, the rest is averaged over the steps."""

    def reduce(name: str) -> float:
        values = [step[name] for step in steps]
        if name.startswith("num_"):
            return sum(values)
        return max(values) if name.endswith("_max") else sum(values) / len(values)

    return {name: reduce(name) for name in steps[0]} if steps else {}


def over_ranks(
    parts: Sequence[tuple[Counter[str], dict[str, float]]],
) -> tuple[Counter[str], dict[str, float]]:
    """Sums and maxima of all ranks; one without tokens has none."""
    sums: Counter[str] = Counter()
    maxima: dict[str, float] = {}
    for part, highest in parts:
        sums.update(part)
        maxima |= {n: max(value, maxima.get(n, -math.inf)) for n, value in highest.items()}
    return sums, maxima


def means(parts: Sequence[dict[str, tuple[float, int]]]) -> Metrics:
    """Means from the sums and counts of all ranks."""
    names = sorted({name for part in parts for name in part})
    found = {name: np.sum([part[name] for part in parts if name in part], axis=0) for name in names}
    return {name: float(total / count) for name, (total, count) in found.items()}


def behaviour_ratios(
    tokens: Sequence[ActionTokens], proximal: Sequence[Floats]
) -> dict[str, tuple[float, int]]:
    """Sum of proximal / behaviour over trained tokens, and their number, by staleness in
    published updates."""
    staleness = np.concatenate([part.staleness for part in tokens])
    log_ratio = np.concatenate(
        [ours - part.behaviour for part, ours in zip(tokens, proximal, strict=True)]
    )
    ratio = np.exp(np.clip(log_ratio, -20.0, 20.0))
    return {
        f"behaviour_ratio/staleness_{age}": (
            float(ratio[staleness == age].sum()),
            int((staleness == age).sum()),
        )
        for age in np.unique(staleness).tolist()
    }
