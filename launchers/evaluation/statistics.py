"""Statistics of an evaluation: pass@k, maj@k, intervals over questions, paired tests.

A question is what is drawn at random, its samples are not independent of each other: so intervals
come from resampling whole questions (cluster bootstrap).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 2000
NUM_FLIPS = 20_000
MAX_EXACT_FLIPS = 14  # differences; up to 2 ** 14 sign patterns are all counted
_CHUNK = 1_000_000  # drawn indices at a time

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a right one, without bias:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374, equation 1)."""
    _check_k(num_samples, k)
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


@lru_cache(maxsize=100_000)
def majority_at_k(
    num_right: int, wrong: tuple[int, ...], num_blank: int, ks: tuple[int, ...]
) -> tuple[float, ...]:
    """Chance that a vote among k of the samples, drawn without replacement, elects the right
    answer, for each of `ks`; the exact mean over all subsets.

    `wrong` counts the samples of each wrong answer. The `num_blank` samples without an answer do
    not vote. Of answers with equally many votes one is drawn at random; a vote that nobody casts
    elects none.
    """
    total = num_right + sum(wrong) + num_blank
    for k in ks:
        _check_k(total, k)
    chances = [Fraction(0)] * len(ks)
    for votes in range(1, min(num_right, max(ks, default=0)) + 1):
        ways = _ways_below(wrong, num_blank, votes, max(ks) - votes)
        for place, k in enumerate(ks):
            if k < votes:
                continue
            shared = sum(
                (Fraction(count, 1 + ties) for ties, count in ways[k - votes].items()),
                Fraction(0),
            )
            chances[place] += math.comb(num_right, votes) * shared
    return tuple(float(chance / math.comb(total, k)) for chance, k in zip(chances, ks, strict=True))


def _ways_below(
    wrong: tuple[int, ...], num_blank: int, votes: int, room: int
) -> list[dict[int, int]]:
    """[drawn][ties]: ways to draw so many samples with no wrong answer above `votes`, and as many
    of them at `votes`."""
    ways: list[dict[int, int]] = [{} for _ in range(room + 1)]
    for blank in range(min(num_blank, room) + 1):
        ways[blank][0] = math.comb(num_blank, blank)
    for count in wrong:
        longer: list[dict[int, int]] = [{} for _ in range(room + 1)]
        for drawn, by_ties in enumerate(ways):
            for more in range(min(count, votes, room - drawn) + 1):
                choices, tie = math.comb(count, more), more == votes
                into = longer[drawn + more]
                for ties, number in by_ties.items():
                    into[ties + tie] = into.get(ties + tie, 0) + number * choices
        ways = longer
    return ways


def _check_k(num_samples: int, k: int) -> None:
    if not 1 <= k <= num_samples:
        raise ValueError(f"k = {k} of {num_samples} samples")


def resamples(num_questions: int, num_resamples: int, seed: int) -> Iterator[Ints]:
    """Drawn question numbers, with replacement: blocks of shape [resample, question]."""
    rng = np.random.default_rng(seed)
    step = max(1, _CHUNK // max(1, num_questions))
    for start in range(0, num_resamples, step):
        size = (min(step, num_resamples - start), num_questions)
        yield rng.integers(0, num_questions, size=size)


def bootstrap(
    numerators: Floats,
    denominators: Floats,
    *,
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Floats:
    """95 % percentile intervals [figure, 2] of sum(numerators) / sum(denominators), both of shape
    [question, figure], over questions drawn with replacement (Efron 1979).

    A mean over questions is a ratio with denominators 1; a question that has no such figure has 0
    and 0. A figure without any question gives nan.
    """
    num_questions, num_figures = numerators.shape
    if not num_questions:
        return np.full((num_figures, 2), np.nan)
    found = []
    for indices in resamples(num_questions, num_resamples, seed):
        rows = np.arange(len(indices))[:, None] * num_questions
        times = np.bincount((indices + rows).ravel(), minlength=indices.size)
        weights = times.reshape(indices.shape).astype(np.float64)
        with np.errstate(invalid="ignore", divide="ignore"):
            found.append((weights @ numerators) / (weights @ denominators))
    values = np.concatenate(found)
    values[~np.isfinite(values)] = np.nan
    intervals = np.full((num_figures, 2), np.nan)
    known = ~np.isnan(values).all(axis=0)
    if known.any():
        intervals[known] = np.nanpercentile(values[:, known], [2.5, 97.5], axis=0).T
    return intervals


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value of McNemar's test (1947): of the questions that only one of two got
    right, half would be expected of each."""
    total, least = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(total, number) for number in range(least + 1))
    return min(1.0, float(Fraction(2 * tail, 2**total)))


def sign_flip(differences: Sequence[float], *, seed: int = 0) -> float:
    """Two-sided p-value of the paired permutation test (Fisher 1935): how often the mean is as far
    from 0 when the sign of each difference is drawn at random. Exact for few differences."""
    values = np.array([value for value in differences if value], dtype=np.float64)
    if not len(values):
        return 1.0
    found = abs(values.sum()) * (1 - 1e-9)  # sums in another order differ by rounding
    if len(values) <= MAX_EXACT_FLIPS:
        patterns = np.arange(2 ** len(values))[:, None] >> np.arange(len(values)) & 1
        return float(np.mean(np.abs((2 * patterns - 1) @ values) >= found))
    rng = np.random.default_rng(seed)
    num_as_far = 0
    step = max(1, _CHUNK // len(values))
    for start in range(0, NUM_FLIPS, step):
        size = (min(step, NUM_FLIPS - start), len(values))
        flips = 2 * rng.integers(0, 2, size=size) - 1
        num_as_far += int(np.sum(np.abs(flips @ values) >= found))
    return (1 + num_as_far) / (1 + NUM_FLIPS)


def cohen_kappa(both: int, only_first: int, only_second: int, neither: int) -> float | None:
    """Agreement of two raters beyond chance (Cohen 1960); None where chance alone agrees fully,
    and without cases."""
    total = both + only_first + only_second + neither
    if not total:
        return None
    first, second = (both + only_first) / total, (both + only_second) / total
    chance = first * second + (1 - first) * (1 - second)
    return None if chance == 1 else ((both + neither) / total - chance) / (1 - chance)
