"""Intervals by simulation: how often they hold the truth, and how wide they are."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.special import betaincinv
from scipy.stats import binomtest

from agentenv.evaluation import statistics

Floats = NDArray[np.float64]

NUM_SETS = 4_000
QUESTIONS, SAMPLES, SUCCESS = (8, 12, 30, 100), (1, 5, 32), (0.5, 0.9, 0.98)
ALIKE = {"equal": 0.0, "beta": 1 / 3, "all or nothing": 1.0}  # correlation of a question's samples


class Cell(NamedTuple):
    questions: int
    samples: int
    success: float
    kind: str


class Found(NamedTuple):
    cell: Cell
    coverage: float
    narrowest: float
    width: float
    width_of_reference: float


def probabilities(rng: np.random.Generator, kind: str, success: float, shape: object) -> Floats:
    """Success of each question: all equal; Beta with a + b = 2; all 0 or 1."""
    if kind == "equal":
        return np.full(shape, success)
    if kind == "beta":
        return rng.beta(2 * success, 2 * (1 - success), shape)
    return (rng.random(shape) < success).astype(float)


def clopper_pearson(share: Floats, n: Floats) -> Floats:
    low = betaincinv(np.maximum(n * share, 1e-12), n - n * share + 1, 0.025)
    high = betaincinv(n * share + 1, np.maximum(n - n * share, 1e-12), 0.975)
    return np.stack([np.where(share < 1e-9, 0, low), np.where(share > 1 - 1e-9, 1, high)], -1)


def width(found: Floats) -> Floats:
    return found[..., 1] - found[..., 0]


def covers(found: Floats, truth: float) -> float:
    return float(((found[..., 0] <= truth) & (truth <= found[..., 1])).mean())


def simulate(cell: Cell, rng: np.random.Generator) -> Found:
    size, samples, success, kind = cell
    chances = probabilities(rng, kind, success, (NUM_SETS, size))
    values = rng.binomial(samples, chances) / samples
    found = statistics.share(values, samples)
    share = values.mean(-1)
    # The samples of questions that all agree do not show that they are more than one each.
    effective = size * samples / (1 + (samples - 1) * ALIKE[kind])
    agree = (share < 1e-9) | (share > 1 - 1e-9)
    reference = clopper_pearson(share, np.where(agree, size, effective))
    return Found(
        cell,
        covers(found, success),
        float(width(found).min()),
        float(width(found).mean()),
        float(width(reference).mean()),
    )


@pytest.fixture(scope="module")
def simulated() -> list[Found]:
    rng = np.random.default_rng(0)
    cells = itertools.starmap(Cell, itertools.product(QUESTIONS, SAMPLES, SUCCESS, ALIKE))
    return [simulate(cell, rng) for cell in cells]


def test_intervals_have_their_nominal_coverage(simulated: list[Found]) -> None:
    worst = min(simulated, key=lambda one: one.coverage)
    assert worst.coverage >= 0.93, worst
    assert np.mean([one.coverage for one in simulated]) <= 0.98  # nor do they only because all fits


def test_intervals_are_never_of_width_0(simulated: list[Found]) -> None:
    assert min(one.narrowest for one in simulated) > 0


def test_intervals_are_little_wider_than_exact_ones(simulated: list[Found]) -> None:
    widest = max(simulated, key=lambda one: one.width / one.width_of_reference)
    assert widest.width <= 1.25 * widest.width_of_reference, widest


def pairs(
    rng: np.random.Generator, kind: str, first: float, second: float, *, shared: bool, size: int
) -> tuple[Floats, Floats]:
    """Success of each question in two evaluations; `shared`: the difficulty of a question is common
    to both."""
    shape = (NUM_SETS // 2, size)
    if not shared:
        return probabilities(rng, kind, first, shape), probabilities(rng, kind, second, shape)
    rank = rng.random(shape)
    one, other = (
        np.full(shape, success)
        if kind == "equal"
        else (rank < success).astype(float)
        if kind == "all or nothing"
        else _quantiles(success)[(rank * 1000).astype(int)]
        for success in (first, second)
    )
    return one, other


def _quantiles(success: float) -> Floats:
    places = (np.arange(1000) + 0.5) / 1000
    found: Floats = betaincinv(2 * success, 2 * (1 - success), places)
    return found + success - found.mean()


def test_intervals_of_paired_differences_have_coverage_and_a_width() -> None:
    rng = np.random.default_rng(0)
    levels = ((0.5, 0.9), (0.9, 0.9), (0.98, 0.98))
    worst = []
    for size, samples, (first, second), kind, shared in itertools.product(
        (8, 12, 30, 100), (1, 5, 32), levels, ALIKE, (True, False)
    ):
        chances = pairs(rng, kind, first, second, shared=shared, size=size)
        one, other = (rng.binomial(samples, np.clip(p, 0, 1)) / samples for p in chances)
        found = statistics.difference(one, other, samples)
        assert width(found).min() > 0
        change = (other - one).mean(-1)
        assert (found[:, 0] <= change + 1e-12).all()
        assert (found[:, 1] >= change - 1e-12).all()
        worst.append((covers(found, second - first), size, samples, first, second, kind, shared))
    assert min(worst)[0] >= 0.93, min(worst)


def test_a_perfect_score_is_bounded_by_the_number_of_questions_only() -> None:
    for samples in (1, 5, 32):
        assert statistics.share(np.ones(8), samples).tolist() == [0.04 ** (1 / 8), 1.0]
        assert statistics.share(np.zeros(8), samples).tolist() == [0.0, 1 - 0.04 ** (1 / 8)]


def test_all_or_nothing_questions_count_once_for_any_number_of_samples() -> None:
    values = np.array([1.0] * 70 + [0.0] * 30)
    once, often = statistics.share(values, 1), statistics.share(values, 32)
    assert often == pytest.approx(once, abs=0.003)
    exact = binomtest(70, 100).proportion_ci()
    assert once[0] == pytest.approx(exact.low, abs=0.005)
    assert once[1] == pytest.approx(exact.high, abs=0.005)


def test_a_share_of_all_samples_is_weighted() -> None:
    """One question with 90 samples next to nine with one each adds little information."""
    values, weights = np.array([1.0] * 5 + [0.0] * 5), np.array([90.0] + [1.0] * 9)
    low, high = statistics.share(values, weights, weights)
    assert low < 94 / 99 <= high
    assert high - low > 0.5


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.sampled_from([4, 8]))
def test_a_share_is_mirrored_and_holds_its_mean(counts: list[int], samples: int) -> None:
    values = np.array(counts) / samples
    low, high = statistics.share(values, samples)
    assert 0 <= low <= values.mean() + 1e-12
    assert values.mean() - 1e-12 <= high <= 1
    assert high - low > 0.005
    mirrored = statistics.share(1 - values, samples)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((low, high), abs=1e-6)


def test_without_questions_the_interval_is_everything() -> None:
    assert statistics.share([]).tolist() == [0.0, 1.0]
    assert statistics.share([0.5], 8)[0] < 0.05


def test_unbounded_means_have_student_intervals() -> None:
    values = [3.0, 5.0, 4.0, 8.0]
    low, high = statistics.ratio(values)
    assert (low, high) == pytest.approx((5 - 3.4374, 5 + 3.4374), abs=1e-3)  # t of 3 is 3.1824
    assert statistics.ratio([2.0]) is None
    assert statistics.ratio([2.0] * 30) is None


def test_a_ratio_of_sums_is_linearized() -> None:
    rng = np.random.default_rng(0)
    above, below = rng.exponential(size=2_001), rng.integers(1, 4, 2_001).astype(float)
    low, high = statistics.ratio(above, below)
    ratio = above.sum() / below.sum()
    error = np.std(above - ratio * below) / below.mean() / np.sqrt(len(above))
    assert (low + high) / 2 == pytest.approx(ratio)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.01)
