"""Statistics against brute force: every subset, every sign."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.evaluation.statistics import cohen_kappa, majority_at_k, mcnemar, pass_at_k, sign_flip

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


def test_sign_flip_of_many_differences_approximates_the_exact_value():
    differences = [0.5] * 20 + [-0.5] * 10  # a coin with 20 heads of 30
    assert sign_flip(differences) == pytest.approx(mcnemar(10, 20), abs=0.01)
    assert sign_flip([1.0] * 60) < 1e-3


def test_kappa():
    assert cohen_kappa(20, 5, 10, 15) == pytest.approx(0.4)  # the textbook's example
    assert cohen_kappa(10, 0, 0, 10) == 1.0
    assert cohen_kappa(10, 0, 0, 0) is None
    assert cohen_kappa(0, 0, 0, 0) is None


def test_sign_flip_of_very_many_differences_uses_the_normal_distribution():
    rng = np.random.default_rng(0)
    change = rng.normal(0.008, 1.0, 20_001)
    error = change.std() / math.sqrt(len(change))
    expected = math.erfc(abs(change.mean()) / error / math.sqrt(2))  # of a normal mean
    assert sign_flip(change.tolist()) == pytest.approx(expected, rel=1e-3)
