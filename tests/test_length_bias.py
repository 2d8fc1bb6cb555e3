"""Lengths of offered and of trained trajectories, and the staleness of the trained ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from agentenv.base.tree import Node, TrajectoryTree
from agentenv.base.types import Limit, Task, VersionSpan
from agentenv.rollout.metrics import trained_metrics


def tree(lengths: Sequence[int], version: int = 3) -> TrajectoryTree:
    """From-scratch trajectories of so many tokens after a prompt of 7; those over 90 are
    truncated."""
    found = TrajectoryTree(Task("t", "toy", "?", ()))
    found.add(None, observation_ids=[1] * 7)
    for number, length in enumerate(lengths):
        leaf = found.add(
            found.root,
            branch=str(number),
            action_ids=[2] * length,
            version_spans=[VersionSpan(version, 0, length)],
            end="truncated" if length > 90 else "terminated",
        )
        leaf.limit = Limit.RESPONSE_TOKENS if length > 90 else None
    return found


def leaves(of: TrajectoryTree, *numbers: int) -> list[Node]:
    return [of.leaves()[number] for number in numbers]


def test_lengths_of_trained_and_offered_trajectories_are_reported() -> None:
    kept, filtered = tree([10, 20, 100]), tree([200, 300, 400, 500, 600, 700, 800])
    metrics = trained_metrics([kept, filtered], [(kept, leaves(kept, 0, 1))], 5)
    assert metrics["length/offered_p50"] == 300
    assert metrics["length/offered_p90"] == 700
    assert metrics["length/offered_max"] == 800
    assert metrics["length/offered_truncated"] == pytest.approx(0.8)
    assert metrics["length/trained_p50"] == 10
    assert metrics["length/trained_p90"] == metrics["length/trained_max"] == 20
    assert metrics["length/trained_truncated"] == 0


def test_a_failed_trajectory_does_not_count_in_lengths() -> None:
    one = tree([10, 20])
    one.leaves()[1].end = "failed"
    assert trained_metrics([one], [], 5)["length/offered_max"] == 10


def test_staleness_is_over_trained_tokens_and_shared_ones_count_once() -> None:
    fresh, old = tree([30, 30], version=5), tree([50], version=3)
    first = fresh.leaves()[0]
    first.end = None
    for name in ("0", "0.1+1"):
        fresh.add(first, branch=name, action_ids=[3] * 5, end="terminated").version_spans = [
            VersionSpan(4, 0, 5)
        ]
    trained = [(fresh, leaves(fresh, 0, 1, 2)), (old, leaves(old, 0))]
    metrics = trained_metrics([fresh, old], trained, 5)
    assert metrics["staleness/trained_mean"] == pytest.approx((60 * 0 + 10 * 1 + 50 * 2) / 120)
    assert metrics["staleness/trained_median"] == 0
    assert trained_metrics([old], [(old, leaves(old, 0))], 5)["staleness/trained_median"] == 2


def test_without_trees_no_lengths_are_reported() -> None:
    assert trained_metrics([], [], 5) == {}
