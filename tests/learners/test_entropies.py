"""The ranks return exact entropies of trained tokens, which are assigned to their tokens."""

from __future__ import annotations

import math
from array import array
from random import Random

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from agentenv.base.tree import GUIDED, TrajectoryTree
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.arpo import ARPO
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.algorithms.credit import CreditedTree
from agentenv.learners.keys import Agreement
from agentenv.learners.trees.encoded_tree import ActionTokens, EncodedTree, encode
from agentenv.learners.trees.partition import forget_entropies, partition, split_by_tree, write_back
from agentenv.rollout.metrics import entropy_profile, rollout_metrics
from tests.learners.test_trainer_options import trainer
from tests.learners.trees import credited, random_tree

ALGORITHM = ARPO(group_size=6)


def without_entropies(algorithm: Algorithm, count: int = 3) -> list[CreditedTree]:
    """Trees of an engine without entropies."""
    trees = [random_tree(Random(i), index=i, num_leaves=5) for i in range(count)]
    forget_entropies(trees)
    return credited(trees, algorithm)


def known(trees: list[TrajectoryTree]) -> list[list[float]]:
    return [node.entropies for tree in trees for node in tree.nodes]


@pytest.mark.parametrize("num_ranks", [1, 7])
def test_each_entropy_is_assigned_to_its_token(num_ranks: int) -> None:
    """The ranks return the number of each token in place of its entropy. Trees with entropies of
    the engine keep them."""
    groups = without_entropies(ALGORITHM)
    for node in (node for tree, _ in groups for node in tree.nodes):
        node.info[GUIDED] = True
        for place in range(1, len(node.logprobs), 3):
            node.logprobs[place] = math.nan  # changed by a grammar
    kept = groups[1][0]
    for node in kept.nodes:
        node.entropies = array("f", [0.25]) * len(node.action_ids)
    encoded = [encode(tree, credit, 0) for tree, credit in groups]
    marked = [_marked(tree, 1000 * number) for number, tree in enumerate(encoded)]
    parts, _ = partition(marked, num_ranks, 10**6)
    assert num_ranks == 1 or any(one.whole is not None for share in parts for one in share)
    found = [split_by_tree(one, np.stack([ActionTokens(one).behavior] * 3)) for one in parts]
    write_back(groups, marked, list(zip(parts, found, strict=True)))
    assert {h for node in kept.nodes for h in node.entropies} == {0.25}
    for number, ((tree, _), one) in enumerate(zip(groups, encoded, strict=True)):
        reported = [h for node in tree.nodes for h in node.entropies if not math.isnan(h)]
        assert all(len(node.entropies) == len(node.action_ids) for node in tree.nodes)
        if tree is not kept:
            count = one.num_action_tokens
            assert sorted(reported) == [1000.0 * number + i for i in range(count)]
            path = next(tree.trajectories()).path
            pairs = ((node.entropies, node.logprobs) for node in path)
            given = [one for pair in pairs for one in zip(*pair, strict=True)]
            assert all(math.isnan(h) == math.isnan(p) for h, p in given)
            order = [h for h, _ in given if not math.isnan(h)]
            assert order == sorted(order)


def _marked(tree: EncodedTree, first: int) -> EncodedTree:
    """With the number of each trained token instead of its log-prob."""
    values = tree.floats("behavior").copy()
    places = tree.actions() if len(values) == tree.num_tokens else slice(None)
    values[places] = first + np.arange(tree.num_action_tokens)
    return replace(tree, behavior=values.tobytes())


@pytest.mark.parametrize("agreement", ["close", "unknown"])
def test_entropies_are_those_of_the_updated_policy(agreement: Agreement) -> None:
    """Both if they were computed for the proximal log-probs and with the loss; plots read them, and
    no value of an untrained tree."""
    algorithm = GRPO(group_size=2)
    groups = without_entropies(algorithm)
    one = trainer(algorithm)
    encoded = [encode(tree, credit, 0) for tree, credit in groups]
    _, expected, _ = one.figures(encoded)
    one.update([encoded], 1.0, agreement)
    write_back(groups, encoded, [(encoded, one.values[0])])
    trees = [tree for tree, _ in groups]
    reported = [h for entropies in known(trees) for h in entropies if not math.isnan(h)]
    assert sorted(reported) == pytest.approx(sorted(expected), rel=1e-6)
    assert not torch.tensor(reported).isnan().any()
    untrained = random_tree(Random(9), index=9)
    forget_entropies([untrained])
    metrics = rollout_metrics([*trees, untrained], 0)
    assert metrics["rollout/entropy"] == pytest.approx(float(np.mean(expected)), rel=1e-6)
    assert entropy_profile([untrained])["start"].mean == []
    assert entropy_profile(trees)["start"].mean


@pytest.mark.parametrize("agreement", ["exact", "unknown"])
def test_log_probs_of_the_learner_are_reported_too(agreement: Agreement) -> None:
    """Those before the update only where they were computed."""
    algorithm = GRPO(group_size=2)
    trees = [random_tree(Random(i), index=i, num_leaves=5) for i in range(3)]
    groups = credited(trees, algorithm)
    one = trainer(algorithm)
    encoded = [encode(tree, credit, 0) for tree, credit in groups]
    expected, _, _ = one.figures(encoded)
    one.update([encoded], 1.0, agreement)
    write_back(groups, encoded, [(encoded, one.values[0])])
    scored = [figures for tree, _ in groups for figures in tree.scored]
    reported = sorted(value for figures in scored for value in figures.logprobs)
    assert reported == pytest.approx(sorted(expected), rel=1e-6)
    before = sorted(value for figures in scored for value in figures.proximal)
    assert before == (pytest.approx(sorted(expected), rel=1e-6) if agreement == "unknown" else [])
    assert all(len(tree.scored) == len(tree.nodes) for tree, _ in groups)
