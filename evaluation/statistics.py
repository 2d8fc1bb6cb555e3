"""Statistics over the questions of an evaluation: 95 % intervals, pass@k, maj@k, paired tests.

share        for a mean of values in [0, 1]: success, scores, pass@k, maj@k
difference   for the difference of two such means over the same questions
ratio        for a mean without bounds, or a ratio of sums: reward, tokens, calls

Questions are drawn at random; the samples of a question are not independent. `share` is the
interval of Clopper and Pearson (1934) for an effective number of questions n, which Korn and
Graubard (1998, Survey Methodology 24) define for samples in clusters: n = Q / r for Q questions,
where r is the variance of a question's mean over p (1 - p), at most 1. It differs in three points,
which the coverage in tests/commands/test_intervals.py requires:

- r is shrunk toward 1, more strongly the fewer samples are of the rarer outcome and the clearer the
  differences between questions are: a rare question that is never solved is easily missing among Q.
- Student's t corrects for the estimate of r in proportion to the evidence that questions differ.
- As n grows, the interval changes from that of Clopper and Pearson, which covers at least 0.95 at
  every p, to that of Jeffreys (Brown, Cai and DasGupta 2001), which does so on average.

If all samples agree, the similarity within a question is unknown, and n = Q.
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
AGREEING_TAIL = 0.04  # on the single side of an interval of all 0 or all 1
RARE, MAX_RARE = 0.0035, 62  # pseudo-samples per question with r = 1; maximum number of questions
DIFFERING = 0.07  # pseudo-variance with r = 1, if questions are seen to differ
CERTAINTY = 18  # power of the probability that equal questions would differ less
JEFFREYS = 6.85  # n at which the interval is half-way, over 4
_FRACTIONS = 16  # maximum number of samples for values that are not multiples of 1 / samples
_TINY = 1e-9
NUM_FLIPS, MAX_FLIPPED = 9_999, 1_000  # drawn sign patterns; most differences to draw them for
_CHUNK = 1_000_000  # signs drawn at a time


def share(values: ArrayLike, samples: ArrayLike = 1.0, weights: ArrayLike | None = None) -> Floats:
    """Interval [..., 2] of the weighted mean of `values` [..., question] in [0, 1]; (0, 1) without
    questions. `samples` (broadcast to values, at least 1): number of independent samples behind
    each value. `weights`: 1, or the numbers of samples for a share of all samples. The interval
    always contains the mean, and never has width 0."""
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
    """Interval [..., 2] of a share p of n samples."""
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
    alike = (weight**2).mean(-1)  # r if all samples of a question were the same
    independent = (weight**2 / samples).mean(-1)  # r if they were independent
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
    """Number of independent samples per question: n / k for pass@k and maj@k of n
    samples."""
    _, _, k = name.partition("@")
    return np.maximum(1.0, counts / int(k or 1))


def difference(first: ArrayLike, second: ArrayLike, samples: ArrayLike = 1.0) -> Floats:
    """Interval [..., 2] of the mean of second - first, both [..., question] in [0, 1] and paired.
    `samples`: as for `share`, of the side with fewer. Gains and losses each have an interval; they
    are combined by the method of Newcombe (1998, Statistics in Medicine 17, p. 2635), with the
    correlation of gains and losses. The width is never 0."""
    change = np.asarray(second, dtype=np.float64) - np.asarray(first, dtype=np.float64)
    gains, losses = np.maximum(change, 0.0), np.maximum(-change, 0.0)
    gain, loss = gains.mean(-1), losses.mean(-1)
    weight, counts = np.ones_like(gains), np.broadcast_to(np.asarray(samples, float), gains.shape)
    of_gain = _effective(gains, weight, counts, gain)
    of_loss = _effective(losses, weight, counts, loss)
    of_gain = np.where(gain > 0, of_gain, of_loss)  # without gains, use the number of the losses
    of_loss = np.where(loss > 0, of_loss, of_gain)
    gain_low, gain_high = np.moveaxis(_beta(gain, of_gain), -1, 0)
    loss_low, loss_high = np.moveaxis(_beta(loss, of_loss), -1, 0)
    scale = gains.std(-1) * losses.std(-1)
    correlation = -gain * loss / np.where(scale > 0, scale, 1.0)  # no question has both

    def apart(one: Floats, other: Floats) -> Floats:
        return np.asarray(np.sqrt(one**2 + other**2 - 2 * correlation * one * other))

    low = gain - loss - apart(gain - gain_low, loss_high - loss)
    high = gain - loss + apart(gain_high - gain, loss - loss_low)
    return np.asarray(np.clip(np.stack([low, high], -1), -1.0, 1.0))


def ratio(above: ArrayLike, below: ArrayLike = 1.0) -> Floats | None:
    """Student's interval [2] of sum(above) / sum(below) over questions, linearized; of a mean if
    `below` is 1. None for fewer than two questions, and if the ratio is the same for all: the
    variance of other questions is then unknown."""
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


# Paired tests, agreement, probabilities within k samples.


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Unbiased estimate of the probability that k of the samples, drawn without replacement,
    include a correct one: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, arXiv 2107.03374,
    equation 1)."""
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


@lru_cache(maxsize=100_000)
def majority_at_k(
    num_right: int, wrong: tuple[int, ...], num_blank: int, ks: tuple[int, ...]
) -> tuple[float, ...]:
    """Probability that a majority vote among k of the samples, drawn without replacement, elects
    the correct answer, for each of `ks`; the exact mean over all subsets.

    `wrong`: number of samples for each wrong answer. The `num_blank` samples without an answer do
    not vote. A tie is broken at random; without votes, no answer is elected.
    """
    total = num_right + sum(wrong) + num_blank
    chances = [Fraction(0)] * len(ks)
    for votes in range(1, min(num_right, max(ks, default=0)) + 1):
        ways = _ways_below(wrong, num_blank, votes, max(ks) - votes)
        for place, k in enumerate(ks):
            if k < votes:
                continue
            shared = sum(
                (Fraction(count, 1 + ties) for ties, count in ways[k - votes].items()), Fraction(0)
            )
            chances[place] += math.comb(num_right, votes) * shared
    return tuple(float(chance / math.comb(total, k)) for chance, k in zip(chances, ks, strict=True))


def _ways_below(
    wrong: tuple[int, ...], num_blank: int, votes: int, room: int
) -> list[dict[int, int]]:
    """[drawn][ties]: number of ways to draw `drawn` samples such that no wrong answer has more than
    `votes`, and `ties` of them have exactly `votes`."""
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


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value of McNemar's test (1947). Under the null hypothesis, each side solves
    half of the questions that only one side solved."""
    from scipy.stats import binomtest  # slow to load, and rarely used

    total = only_first + only_second
    return float(binomtest(only_first, total).pvalue) if total else 1.0


def sign_flip(differences: ArrayLike, *, seed: int = 0) -> float:
    """Two-sided p-value of the paired permutation test (Fisher 1935): the probability of a sum at
    least as far from 0 with a random sign for each difference. Exact for up to 13 differences; for
    more than MAX_FLIPPED, by the normal approximation of the sum."""
    from scipy.stats import norm, permutation_test

    given = np.asarray(differences, dtype=np.float64)
    values = given[given != 0]
    if len(values) < 2:
        return 1.0
    if len(values) > MAX_FLIPPED:
        return float(2 * norm.sf(abs(values.sum()) / np.sqrt((values**2).sum())))
    batch = max(1, _CHUNK // len(values))
    found = permutation_test(
        (values,), np.sum, permutation_type="samples", n_resamples=NUM_FLIPS, batch=batch, rng=seed
    )
    return float(found.pvalue)


def cohen_kappa(both: int, only_first: int, only_second: int, neither: int) -> float | None:
    """Agreement of two raters beyond chance (Cohen 1960); None if chance agreement is 1, and
    without cases."""
    total = both + only_first + only_second + neither
    if not total:
        return None
    first, second = (both + only_first) / total, (both + only_second) / total
    chance = first * second + (1 - first) * (1 - second)
    return None if chance == 1 else ((both + neither) / total - chance) / (1 - chance)
