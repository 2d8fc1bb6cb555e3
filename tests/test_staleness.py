"""The histogram of staleness counts tokens, not trees."""

from __future__ import annotations

import pytest

from agentenv.base.types import VersionSpan
from agentenv.rollout.metrics import rollout_metrics
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


def test_sampled_ids_beyond_the_tokenizer_are_counted() -> None:
    """Models pad their vocabulary, and an untrained one samples these ids."""
    tree = uneven_trees(1)[0]
    ids = sorted(token for node in tree.nodes for token in node.action_ids)
    metrics = rollout_metrics([tree], 0, num_words=ids[-1])
    assert metrics["rollout/padded_tokens"] == ids.count(ids[-1])
    assert "rollout/padded_tokens" not in rollout_metrics([tree], 0, num_words=ids[-1] + 1)
