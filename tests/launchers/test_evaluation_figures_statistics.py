"""Statistics against brute force: every subset, every sign, every resample one by one."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from random import Random
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.metrics import wilson_interval
from launchers.evaluation.figures import (
    bootstrap,
    cohen_kappa,
    majority_at_k,
    mcnemar,
    pass_at_k,
    resamples,
    sign_flip,
)

WRONG = st.lists(st.integers(1, 4), max_size=4)


def subsets(items: list[object], k: int) -> list[tuple[object, ...]]:
    return list(itertools.combinations(items, k))


@given(num_samples=st.integers(1, 9), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(num_samples, data):
    num_right = data.draw(st.integers(0, num_samples))
    k = data.draw(st.integers(1, num_samples))
    samples = [True] * num_right + [False] * (num_samples - num_right)
    expected = fmean(any(chosen) for chosen in subsets(samples, k))
    assert pass_at_k(num_samples, num_right, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_exact_for_many_samples():
    assert pass_at_k(1000, 1, 1) == pytest.approx(1 / 1000, rel=1e-12)
    assert pass_at_k(200, 3, 100) == pytest.approx(1 - math.comb(197, 100) / math.comb(200, 100))
    with pytest.raises(ValueError, match="k = 5 of 4 samples"):
        pass_at_k(4, 1, 5)


def vote(ballots: tuple[object, ...]) -> float:
    """The right answer's chance when ties are broken by lot; None does not vote."""
    votes = Counter(ballot for ballot in ballots if ballot is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    leaders = [answer for answer, count in votes.items() if count == most]
    return leaders.count("right") / len(leaders)


@given(num_right=st.integers(0, 4), wrong=WRONG, num_blank=st.integers(0, 2))
def test_majority_at_k_is_the_mean_over_all_subsets(num_right, wrong, num_blank):
    ballots: list[object] = ["right"] * num_right + [None] * num_blank
    for place, count in enumerate(wrong):
        ballots += [f"wrong {place}"] * count
    ballots = ballots[:11]
    counts = Counter(ballots)
    wrong = [count for ballot, count in counts.items() if ballot not in ("right", None)]
    ks = tuple(range(1, len(ballots) + 1))
    if not ks:
        return
    found = majority_at_k(counts["right"], tuple(wrong), counts[None], ks)
    for k, value in zip(ks, found, strict=True):
        assert value == pytest.approx(fmean(map(vote, subsets(ballots, k))), abs=1e-12)


def test_majority_of_one_is_plain_accuracy_and_ties_share():
    assert majority_at_k(3, (2, 2), 1, (1,)) == (3 / 8,)
    assert majority_at_k(1, (1,), 0, (2,)) == (0.5,)
    assert majority_at_k(0, (), 4, (4,)) == (0.0,)
    assert majority_at_k(1, (), 3, (4,)) == (1.0,)  # those without an answer do not vote


def test_majority_at_k_of_many_samples_agrees_with_drawing():
    ballots = [0] * 20 + [1] * 18 + [2] * 12 + list(range(3, 17))
    (found,) = majority_at_k(20, (18, 12, *[1] * 14), 0, (16,))
    rng = Random(0)

    def drawn() -> float:
        votes = Counter(rng.sample(ballots, 16))
        most = max(votes.values())
        return (votes[0] == most) / sum(count == most for count in votes.values())

    assert found == pytest.approx(fmean(drawn() for _ in range(20_000)), abs=0.012)


def percentile(values: list[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def test_bootstrap_equals_a_direct_loop_over_the_same_resamples():
    rng = Random(1)
    rights = [[rng.random() < 0.4 for _ in range(4)] for _ in range(17)]
    calls = [rng.randint(0, 6) for _ in rights]
    numerators = np.array([[fmean(own), sum(own)] for own in rights], dtype=np.float64)
    denominators = np.array([[1.0, count] for count in calls], dtype=np.float64)
    found = bootstrap(numerators, denominators, num_resamples=500, seed=3)
    means, ratios = [], []
    for block in resamples(len(rights), 500, 3):
        for drawn in block.tolist():
            means.append(fmean(fmean(rights[place]) for place in drawn))
            ratios.append(sum(sum(rights[p]) for p in drawn) / sum(calls[p] for p in drawn))
    for column, values in enumerate((means, ratios)):
        expected = [percentile(values, 2.5), percentile(values, 97.5)]
        assert found[column] == pytest.approx(expected, abs=1e-12)


def test_bootstrap_agrees_with_resamples_of_another_generator():
    values = np.array([0.0] * 30 + [0.25] * 20 + [1.0] * 25)
    low, high = bootstrap(values[:, None], np.ones((75, 1)))[0]
    rng = Random(5)
    means = [fmean(rng.choices(values.tolist(), k=75)) for _ in range(20_000)]
    assert (low, high) == pytest.approx((percentile(means, 2.5), percentile(means, 97.5)), abs=0.01)


def test_bootstrap_covers_the_true_mean_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for trial in range(200):
        values = rng.binomial(4, 0.6, size=(60, 1)) / 4
        low, high = bootstrap(values, np.ones((60, 1)), num_resamples=400, seed=trial)[0]
        hits += low <= 0.6 <= high
    assert 0.90 <= hits / 200 <= 0.99


def test_a_figure_that_no_question_has_has_no_interval():
    found = bootstrap(np.array([[0.0, 1.0]] * 5), np.array([[0.0, 1.0]] * 5))
    assert np.isnan(found[0]).all()
    assert found[1].tolist() == [1.0, 1.0]
    assert np.isnan(bootstrap(np.zeros((3, 2)), np.zeros((3, 2)))).all()
    assert np.isnan(bootstrap(np.zeros((0, 1)), np.zeros((0, 1)))).all()


def test_many_questions_are_resampled_in_blocks():
    blocks = list(resamples(400_000, 5, 0))
    assert [len(block) for block in blocks] == [2, 2, 1]


@given(st.integers(0, 12), st.integers(0, 12))
def test_mcnemar_counts_all_outcomes_as_far_from_even(only_first, only_second):
    total = only_first + only_second
    far = abs(only_first - only_second)
    outcomes = [math.comb(total, heads) for heads in range(total + 1)]
    expected = sum(
        count for heads, count in enumerate(outcomes) if abs(2 * heads - total) >= far
    ) / sum(outcomes)
    assert mcnemar(only_first, only_second) == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.sampled_from([-1.0, -0.5, -0.25, 0.0, 0.25, 0.75]), min_size=1, max_size=8))
def test_sign_flip_counts_all_signs(differences):
    found = abs(sum(differences))
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, differences, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    expected = fmean(value >= found - 1e-12 for value in sums)
    assert sign_flip(differences) == pytest.approx(expected, abs=1e-12)


def test_sign_flip_of_many_differences_comes_near_the_exact_value():
    differences = [0.5] * 20 + [-0.5] * 10  # a coin with 20 heads of 30
    assert sign_flip(differences) == pytest.approx(mcnemar(10, 20), abs=0.01)
    assert sign_flip([1.0] * 60) < 1e-4


def test_kappa():
    assert cohen_kappa(20, 5, 10, 15) == pytest.approx(0.4)  # the textbook's example
    assert cohen_kappa(10, 0, 0, 10) == 1.0
    assert cohen_kappa(10, 0, 0, 0) is None
    assert cohen_kappa(0, 0, 0, 0) is None


def test_wilson_is_the_interval_of_single_samples():
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)


def test_very_many_questions_are_drawn_in_blocks_with_the_same_intervals():
    """Against the normal interval of a ratio of sums, by the delta method."""
    rng = np.random.default_rng(0)
    above, below = rng.exponential(size=20_001), rng.integers(1, 4, 20_001).astype(float)
    low, high = bootstrap(above[:, None], below[:, None], num_resamples=1000)[0]
    ratio = above.sum() / below.sum()
    error = np.std(above - ratio * below) / below.mean() / math.sqrt(len(above))
    assert (low + high) / 2 == pytest.approx(ratio, abs=0.2 * error)
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.08)
