"""The score of a step, by hand: accepted tokens a second x freshness x batch factor."""

from __future__ import annotations

import numpy as np
import pytest

from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task, VersionSpan
from agentenv.learners.algorithms.credit import CreditedTree, TreeCredit
from agentenv.training.loop.batching import StepBatch
from agentenv.training.loop.step_report import step_score

TASK = Task("t", "toy", "q", ("a",))


def tree(index: int, *sizes: tuple[int, int]) -> TrajectoryTree:
    """A prompt, and under it a leaf for each (tokens, policy version)."""
    grown = TrajectoryTree(TASK, index=index)
    root = grown.add(None)
    for size, version in sizes:
        spans = [VersionSpan(version, 0, size)]
        ids = [1] * size
        grown.add(root, action_ids=ids, logprobs=[-1.0] * size, version_spans=spans, end="stop")
    return grown


def credited(grown: TrajectoryTree, *advantages: float) -> CreditedTree:
    values = np.array([0.0, *advantages])
    positive, negative = np.maximum(values, 0), np.minimum(values, 0)
    return grown, TreeCredit(positive, negative, np.ones(len(values)), values, values)


def test_the_score_of_a_step_by_hand() -> None:
    fresh, stale, equal = tree(0, (30, 5), (10, 4)), tree(1, (20, 3), (8, 5)), tree(2, (32, 5))
    trained = [credited(fresh, 1.0, -1.0), credited(stale, 0.5, 0.0)]
    batch = StepBatch(3, [fresh, stale, equal], policy_version=5, trained=trained)
    found = step_score(batch, 4.0, 3, {})
    # 30 + 10 + 20 tokens have an advantage, which are 0, 1 and 2 versions old: 50 in all.
    assert found["score/accepted_tokens_per_s"] == 15.0
    assert found["score/freshness"] == pytest.approx(1 / (1 + 50 / 60))
    assert found["score/batch_factor"] == pytest.approx(2 / 3)
    assert found["score/value"] == pytest.approx(15 * (60 / 110) * 2 / 3)
    assert found["flow/filtered_tokens"] == pytest.approx(32 / 100)


def test_the_score_of_a_step_without_training_is_zero() -> None:
    found = step_score(StepBatch(1, [tree(0, (4, 0))]), 1.0, 1, {})
    assert found["score/value"] == 0.0
    assert found["flow/filtered_tokens"] == 1.0


def test_branches_of_an_earlier_process_do_not_raise_the_rate_of_a_resumed_run() -> None:
    finished, begun = tree(0, (30, 5), (10, 5)), tree(1, (20, 5), (8, 5))
    trained = [credited(finished, 1.0, -1.0), credited(begun, 0.5, 1.0)]
    batch = StepBatch(2, [finished, begun], policy_version=5, trained=trained)
    num_known = {0: 3, 1: 2}  # all of the one, and of the other its root and a leaf
    found = step_score(batch, 4.0, 2, num_known)
    assert found["score/accepted_tokens_per_s"] == 8 / 4.0
    assert found["score/freshness"] == found["score/batch_factor"] == 1.0
