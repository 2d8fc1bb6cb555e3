from __future__ import annotations

import json
from array import array
from math import nan
from random import Random

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentenv.base.errors import DataError
from agentenv.base.tree import GUIDED
from agentenv.base.types import VersionSpan
from agentenv.learners.algorithms.aepo import AEPO
from agentenv.learners.algorithms.algorithm import Algorithm
from agentenv.learners.algorithms.baselines import GRPO
from agentenv.learners.trees.encoded_tree import EncodedTree, encode, encode_sequence
from agentenv.learners.trees.partition import pack
from tests.learners.trees import flat_loss, random_tree, tiny_model, tree_loss
from tests.support.snippets import run_python

ALGORITHMS: dict[str, Algorithm] = {
    "grpo": GRPO(group_size=6),
    "aepo": AEPO(group_size=6, dual_clip=float("inf")),
}


def some_trees(seed: int, count: int = 3, changed: float = 0.0):
    """`changed`: the share of tokens whose log-prob a grammar changed."""
    trees = [random_tree(Random(seed * 100 + i), index=i) for i in range(count)]
    rng = Random(seed)
    for node in (node for tree in trees for node in tree.nodes):
        node.info[GUIDED] = changed > 0
        own = (nan if rng.random() < changed else one for one in node.logprobs)
        node.logprobs = array("f", own)
    algorithm = ALGORITHMS["grpo"]
    encoded = [encode(tree, algorithm.credit(tree), 0) for tree in trees]
    return trees, encoded


@given(st.integers(0, 10**6))
@settings(max_examples=settings.default.max_examples // 5)
def test_tree_loss_equals_flat_loss_on_random_trees(seed: int) -> None:
    model = MODEL
    trees, encoded = some_trees(seed, count=2, changed=0.3)
    with torch.no_grad():
        flat = flat_loss(model, trees, ALGORITHMS["grpo"])
        tree = tree_loss(model, encoded, ALGORITHMS["grpo"], max_tokens=40)
    assert float(tree) == pytest.approx(float(flat), rel=1e-5, abs=1e-7)


MODEL = tiny_model("qwen3", torch.float64)


@given(st.integers(0, 10**6), st.sampled_from([1, 20, 30, 10**6]))
def test_each_action_token_is_trained_once(seed: int, max_tokens: int) -> None:
    _, encoded = some_trees(seed, count=3)
    batches = pack(encoded, max_tokens)
    index = np.concatenate([batch.index for batch in batches])
    assert sorted(index) == list(range(sum(tree.num_action_tokens for tree in encoded)))
    for batch in batches:
        is_one_path = (batch.end == batch.end[0]).all()
        assert len(batch.token_ids) <= max_tokens or is_one_path


def test_parts_without_a_counted_leaf_are_skipped() -> None:
    tree = random_tree(Random(5))
    whole = encode(tree, GRPO(group_size=6).credit(tree), 0)
    leaf = tree.leaves()[0]
    leaf.end = "failed"
    part = encode(tree, GRPO(group_size=6).credit(tree), 0)
    assert part.num_action_tokens < whole.num_action_tokens
    assert (part.of_actions("weight") > 0).all()


def test_staleness_counts_from_the_version_of_each_token() -> None:
    tree = random_tree(Random(6), version=3)
    node = tree.nodes[1]
    node.action_ids, node.logprobs, node.entropies = [1, 2, 3], [-1.0] * 3, [1.0] * 3
    node.version_spans = [VersionSpan(2, 0, 1), VersionSpan(3, 1, 3)]
    encoded = encode(tree, GRPO(group_size=6).credit(tree), 4)
    assert encoded.max_staleness == 2
    staleness = encoded.ints("staleness")
    assert (staleness == 2).sum() == 1
    assert (staleness == 1).sum() == len(staleness) - 1


def test_encoding_survives_serialization_and_invalid_data_is_refused() -> None:
    tree = random_tree(Random(9))
    encoded = encode(tree, GRPO(group_size=6).credit(tree), 0)
    wire = msgspec.msgpack.encode(encoded)
    assert msgspec.msgpack.decode(wire, type=EncodedTree) == encoded
    for ids, mask in (([1, 2], [False]), ([1, 2], [True, True]), ([1, 2], [False, False])):
        with pytest.raises(DataError):
            encode_sequence(ids, mask)
    tree.root.observation_ids = []
    with pytest.raises(DataError, match="prompt is empty"):
        encode(tree, GRPO(group_size=6).credit(tree), 0)
    tree.nodes[1].logprobs = []
    with pytest.raises(DataError, match="without log-probs"):
        encode(tree, GRPO(group_size=6).credit(tree), 0)


def test_configuration_and_encoding_load_no_torch() -> None:
    code = (
        "import sys, json, agentenv.learners.ranks.rank_group;"
        "import agentenv.learners.ranks.learner;"
        "print(json.dumps([m for m in ('torch', 'deepspeed') if m in sys.modules]))"
    )
    assert json.loads(run_python(code).stdout) == []
