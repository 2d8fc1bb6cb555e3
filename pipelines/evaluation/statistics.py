"""Statistics over the questions of an evaluation: 95 % intervals, pass@k, maj@k, paired tests.

share        of a mean of values in [0, 1]: success, scores, pass@k, maj@k
difference   of the difference of two such means over the same questions
ratio        of a mean without bounds, or a ratio of sums: reward, tokens, calls

A question is what is drawn at random; its samples are not independent of each other. `share` is
the interval of Clopper and Pearson (1934) for an effective number of questions n, as Korn and
Graubard (1998, Survey Methodology 24) form it for samples in clusters: n = Q / r for Q questions,
where r is the variance of a question's mean over p (1 - p), at most 1. It differs in three things,
which the coverage in tests/pipelines/test_intervals.py rests on:

- r is drawn toward 1, the more the fewer samples are of the rarer kind and the clearer it is that
  questions differ: a rare question that is never solved is easily missing among Q.
- The correction by Student's t for estimating r is made as far as questions are seen to differ.
- As n grows the interval goes over from that of Clopper and Pearson, which covers 0.95 or more at
  every p, to that of Jeffreys (Brown, Cai and DasGupta 2001), which does so on average.

Where all samples agree, nothing says how alike the samples of a question are: n is Q.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import betaincinv, chdtr, stdtrit

Floats = NDArray[np.float64]

TAIL = 0.025  # on each side
AGREEING_TAIL = 0.04  # on the one side that an interval of all 0 or all 1 has
RARE, MAX_RARE = 0.0035, 62  # pseudo-samples a question that speak for r = 1, of so many at most
DIFFERING = 0.07  # pseudo-variance that speaks for r = 1 where questions are seen to differ
CERTAINTY = 18  # power of the chance that alike questions would differ less
JEFFREYS = 6.85  # n at which the interval is half-way, over 4
_FRACTIONS = 16  # of so many samples at most each value counts that is no share of its samples
_TINY = 1e-9


def share(values: ArrayLike, samples: ArrayLike = 1.0, weights: ArrayLike | None = None) -> Floats:
    """Interval [..., 2] of the weighted mean of `values` [..., question] in [0, 1]; (0, 1) without
    questions. `samples` (broadcast to values, at least 1) is how many independent samples a value
    is the mean of; `weights` are 1, or the numbers of samples for a share of all samples. It always
    holds the mean, and never has width 0."""
    values = np.asarray(values, dtype=np.float64)
    size = values.shape[-1]
    if not size:
        return np.broadcast_to(np.array([0.0, 1.0]), (*values.shape[:-1], 2)).copy()
    weight = np.ones_like(values) if weights is None else np.asarray(weights, dtype=np.float64)
    weight = weight / weight.mean(-1, keepdims=True)
    samples = np.broadcast_to(np.asarray(samples, dtype=np.float64), values.shape)
    p = np.clip((weight * values).mean(-1), 0.0, 1.0)
    return _beta(p, _effective(values, weight, samples, p))


def _beta(p: Floats, n: Floats) -> Floats:
    """Interval [..., 2] of a share p of n."""
    tilt = np.clip(0.5 - JEFFREYS / n, 0.0, 0.5)
    right, wrong = n * p, n * (1 - p)
    some, all_but = np.maximum(right, _TINY), np.maximum(wrong, _TINY)
    low = betaincinv(some + tilt, wrong + 1 - tilt, TAIL)
    high = betaincinv(right + 1 - tilt, all_but + tilt, 1 - TAIL)
    low = np.where(p > 1 - _TINY, AGREEING_TAIL ** (1 / n), np.where(p < _TINY, 0.0, low))
    high = np.where(p < _TINY, 1 - AGREEING_TAIL ** (1 / n), np.where(p > 1 - _TINY, 1.0, high))
    return np.asarray(np.stack([np.minimum(low, p), np.maximum(high, p)], -1))


def _effective(values: Floats, weight: Floats, samples: Floats, p: Floats) -> Floats:
    """The effective number of questions [...]."""
    size = values.shape[-1]
    alike = (weight**2).mean(-1)  # r, were all samples of a question the same
    independent = (weight**2 / samples).mean(-1)  # r, were they independent
    agree = (p < _TINY) | (p > 1 - _TINY)
    if size == 1:
        return np.asarray(1 / alike)
    spread = np.where(agree, 1.0, p * (1 - p))
    errors = (weight * (values - p[..., None])) ** 2
    seen = np.where(agree, alike, errors.sum(-1) / (size - 1) / spread)
    counts = values * samples
    is_binary = (np.abs(counts - np.rint(counts)) < 1e-6).all(-1)
    least = np.where(is_binary, independent, independent / _FRACTIONS)
    chance = chdtr(size - 1, (size - 1) * seen / independent) ** CERTAINTY
    differ = np.where(is_binary, np.where(independent < alike, chance, 0.0), 1.0)
    pseudo = RARE * min(size, MAX_RARE) * independent + DIFFERING * differ
    drawn = (seen * size * spread + alike * pseudo) / (size * spread + pseudo)
    r = np.clip(np.maximum(seen, drawn), least, alike)
    inflation = (stdtrit(size - 1, 1 - TAIL) / stdtrit(np.inf, 1 - TAIL)) ** 2
    return np.asarray(np.where(agree, size / alike, size / r / (1 + differ * (inflation - 1))))


def independent_samples(name: str, counts: Floats) -> Floats:
    """Of how many independent samples a question's value is the mean: of n samples pass@k and
    maj@k have n / k."""
    _, _, k = name.partition("@")
    return np.maximum(1.0, counts / int(k or 1))


def difference(first: ArrayLike, second: ArrayLike, samples: ArrayLike = 1.0) -> Floats:
    """Interval [..., 2] of the mean of second - first, both [..., question] in [0, 1] and in pairs;
    `samples` as for `share`, of the one that has fewer. Questions that gained and questions that
    lost have an interval each, which are put together as by Newcombe (1998, Statistics in Medicine
    17, p. 2635) with the correlation of gains and losses. Never of width 0."""
    change = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    gains, losses = np.maximum(change, 0.0), np.maximum(-change, 0.0)
    gain, loss = gains.mean(-1), losses.mean(-1)
    weight, counts = np.ones_like(gains), np.broadcast_to(np.asarray(samples, float), gains.shape)
    of_gain = _effective(gains, weight, counts, gain)
    of_loss = _effective(losses, weight, counts, loss)
    of_gain = np.where(gain > 0, of_gain, of_loss)  # what no question shows, the other side does
    of_loss = np.where(loss > 0, of_loss, of_gain)
    gain_low, gain_high = np.moveaxis(_beta(gain, of_gain), -1, 0)
    loss_low, loss_high = np.moveaxis(_beta(loss, of_loss), -1, 0)
    scale = gains.std(-1) * losses.std(-1)
    correlation = -gain * loss / np.where(scale > 0, scale, 1.0)  # no question does both

    def apart(one: Floats, other: Floats) -> Floats:
        return np.asarray(np.sqrt(one**2 + other**2 - 2 * correlation * one * other))

    low = gain - loss - apart(gain - gain_low, loss_high - loss)
    high = gain - loss + apart(gain_high - gain, loss - loss_low)
    return np.asarray(np.clip(np.stack([low, high], -1), -1.0, 1.0))


def ratio(above: ArrayLike, below: ArrayLike = 1.0) -> Floats | None:
    """Student's interval [2] of sum(above) / sum(below) over questions, linearised; of a mean where
    `below` is 1. None of fewer than two questions, and where the ratio is the same in all: nothing
    then says how far others would lie from it."""
    above = np.asarray(above, dtype=np.float64)
    below = np.broadcast_to(np.asarray(below, dtype=np.float64), above.shape)
    if len(above) < 2:
        return None
    middle = above.sum() / below.sum()
    error = (above - middle * below).std(ddof=1) / below.mean() / np.sqrt(len(above))
    if error <= _TINY * abs(middle):
        return None
    half = stdtrit(len(above) - 1, 1 - TAIL) * error
    return np.array([middle - half, middle + half], dtype=np.float64)


# Paired tests, agreement, chances within k samples.

NUM_FLIPS, MAX_FLIPPED = 9_999, 1_000  # drawn sign patterns; differences that they are drawn of
_CHUNK = 1_000_000  # drawn signs at a time


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


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value of McNemar's test (1947): of the questions that only one of two got
    right, half would be expected of each."""
    from scipy.stats import binomtest  # takes a second, and few commands test anything

    total = only_first + only_second
    return float(binomtest(only_first, total).pvalue) if total else 1.0


def sign_flip(differences: ArrayLike, *, seed: int = 0) -> float:
    """Two-sided p-value of the paired permutation test (Fisher 1935): how often the sum is as far
    from 0 when the sign of each difference is drawn at random. Exact for up to 13 differences; of
    more than MAX_FLIPPED, by the normal distribution that the sum then has."""
    from scipy.stats import norm, permutation_test

    given = np.asarray(differences, dtype=np.float64)
    values = given[given != 0]
    if len(values) < 2:
        return 1.0
    if len(values) > MAX_FLIPPED:
        return float(2 * norm.sf(abs(values.sum()) / np.sqrt((values**2).sum())))
    found = permutation_test(
        (values,), np.sum, permutation_type="samples", vectorized=True, n_resamples=NUM_FLIPS,
        batch=max(1, _CHUNK // len(values)), rng=seed,
    )  # fmt: skip
    return float(found.pvalue)


def cohen_kappa(both: int, only_first: int, only_second: int, neither: int) -> float | None:
    """Agreement of two raters beyond chance (Cohen 1960); None where chance alone agrees fully,
    and without cases."""
    total = both + only_first + only_second + neither
    if not total:
        return None
    first, second = (both + only_first) / total, (both + only_second) / total
    chance = first * second + (1 - first) * (1 - second)
    return None if chance == 1 else ((both + neither) / total - chance) / (1 - chance)
