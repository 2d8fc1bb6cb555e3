"""Tokens of trees: by version, beyond the tokenizer's, and of empty turns."""

from __future__ import annotations

from typing import Any, cast

import pytest

from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task, VersionSpan
from agentenv.rollout.metrics import rollout_metrics
from agentenv.training.loop.alarms import Alarms
from tests.learners.ranks import uneven_trees


def test_tokens_are_counted_by_the_version_that_sampled_them() -> None:
    tree = uneven_trees(1)[0]
    turns = [node for node in tree.nodes if node.action_ids]
    for node in turns:
        node.version_spans = [VersionSpan(3, 0, len(node.action_ids))]
    turns[0].version_spans = [VersionSpan(1, 0, 1), VersionSpan(3, 1, len(turns[0].action_ids))]
    metrics = rollout_metrics([tree], learner_version=4)
    total = tree.num_action_tokens
    assert metrics["staleness/max"] == 3
    assert metrics["staleness/tokens_3"] == pytest.approx(1 / total)
    assert metrics["staleness/tokens_1"] == pytest.approx((total - 1) / total)


def test_empty_turns_are_counted_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    alarms = Alarms(cast(Any, None))
    for end, share in (("terminated", 1 / 3), ("truncated", 0.0)):
        tree = TrajectoryTree(Task("t", "test", "?", ("5",)))
        root = tree.add(None, observation_ids=[1])
        for size in (1, 2, 3):
            nats, spans = [0.0] * size, [VersionSpan(0, 0, size)]
            leaf = {"logprobs": nats, "entropies": nats, "version_spans": spans, "end": end}
            tree.add(root, action_ids=[7] * size, **leaf)
        metrics = rollout_metrics([tree], 0)
        assert metrics["rollout/empty"] == pytest.approx(share)
        for _ in range(2):
            alarms.check_tokens(metrics)
    assert [one.getMessage().count("rollout/empty") for one in caplog.records] == [1]


def test_sampled_ids_beyond_the_tokenizer_are_counted() -> None:
    """Models pad their vocabulary, and an untrained one samples these ids."""
    tree = uneven_trees(1)[0]
    ids = sorted(token for node in tree.nodes for token in node.action_ids)
    metrics = rollout_metrics([tree], 0, num_words=ids[-1])
    assert metrics["rollout/padded_tokens"] == ids.count(ids[-1])
    assert "rollout/padded_tokens" not in rollout_metrics([tree], 0, num_words=ids[-1] + 1)
