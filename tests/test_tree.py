"""The tree stores each token once; trajectories, masks and returns are views of it."""

from __future__ import annotations

import json
import sys
from random import Random

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentenv.base.tree import Prefix, TrajectoryTree, of_frame, packed_ids, to_frame, to_json
from agentenv.base.types import Task, VersionSpan

TASK = Task("t", "toy", "q", ("a",))


def random_tree(rng: Random) -> TrajectoryTree:
    """Up to twenty turns below random nodes; every childless node is a leaf."""
    tree = TrajectoryTree(TASK, policy_version=9)
    tree.add(None, observation_ids=[rng.randrange(50) for _ in range(rng.randint(1, 4))])
    for _ in range(rng.randint(1, 20)):
        action = [rng.randrange(50) for _ in range(rng.randint(0, 5))]
        tree.add(
            rng.choice(tree.nodes),
            action_ids=action,
            logprobs=[-rng.random() for _ in action],
            observation_ids=[rng.randrange(50) for _ in range(rng.randint(0, 4))],
            reward=rng.choice([0.0, 1.0, -1.0]),
            version_spans=[VersionSpan(rng.randint(3, 9), 0, len(action))] if action else [],
        )
    parents = {node.parent for node in tree.nodes}
    for node in tree.nodes:
        if node.index not in parents:
            node.end = rng.choice(["terminated", "truncated", "failed"])
    return tree


@given(st.integers(0, 10**9))
def test_views_of_a_random_tree(seed: int) -> None:
    tree = random_tree(Random(seed))
    ended = [leaf for leaf in tree.leaves() if leaf.end != "failed"]
    trajectories = list(tree.trajectories())
    assert [t.leaf.index for t in trajectories] == [leaf.index for leaf in ended]
    assert len(trajectories) + len(tree.failures()) == len(tree.leaves())
    for trajectory in trajectories:
        assert trajectory.path[0] is tree.root
        assert len(trajectory.token_ids) == len(trajectory.loss_mask)
        sampled = [
            token
            for token, mask in zip(trajectory.token_ids, trajectory.loss_mask, strict=True)
            if mask
        ]
        assert sampled == [token for node in trajectory.path for token in node.action_ids]
        assert not any(trajectory.loss_mask[: len(tree.root.observation_ids)])
        assert trajectory.reward == sum(node.reward for node in trajectory.path)
    flat = sum(len(t.token_ids) for t in trajectories)
    if not tree.failures():
        assert tree.num_tokens <= flat
    versions = [span.version for node in tree.nodes for span in node.version_spans]
    assert tree.oldest_version() == min(versions, default=9)
    assert len(json.loads(to_json(tree))["nodes"]) == len(tree.nodes)


@given(st.integers(0, 10**9))
def test_a_tree_survives_the_round_trip_through_a_frame_and_json(seed: int) -> None:
    tree = random_tree(Random(seed))
    tree.nodes[1].info = {"tool_calls": [{"name": "search", "ok": True}]}
    assert of_frame(to_frame(tree)) == tree
    assert msgspec.convert(json.loads(to_json(tree)), TrajectoryTree) == tree


def test_a_frame_accepts_any_info_of_an_env() -> None:
    tree = random_tree(Random(0))
    tree.nodes[1].info = {"half": "\ud800", 7: {(1, 2): 3}}  # type: ignore[dict-item]
    found = of_frame(to_frame(tree)).nodes[1].info
    assert found == {"half": r"\ud800", "7": {"(1, 2)": 3}}


@given(st.integers(0, 10**9))
def test_a_prefix_has_the_tokens_of_its_path_without_a_copy(seed: int) -> None:
    rng = Random(seed)
    parts = [packed_ids(range(rng.randint(0, 12))) for _ in range(rng.randint(0, 4))]
    prefix = Prefix()
    for part in parts:
        prefix = prefix.plus(part)
    ids = [token for part in parts for token in part]
    assert (list(prefix), len(prefix), prefix.joined().tolist()) == (ids, len(ids), ids)
    assert np.asarray(prefix).tolist() == ids
    assert prefix == ids
    for size in (1, 5, 40):
        assert list(prefix[-size:]) == ids[-size:]
        assert list(prefix[:size]) == ids[:size]
    assert all(kept is part for kept, part in zip(prefix.parts, parts, strict=True))


def test_a_stored_token_takes_no_more_memory_than_its_values() -> None:
    """Sampled 12 bytes, observed 4."""
    sampled = TrajectoryTree(TASK).add(
        None, action_ids=[1] * 10_000, logprobs=[-0.5] * 10_000, entropies=[1.0] * 10_000
    )
    observed = TrajectoryTree(TASK).add(None, observation_ids=[1] * 10_000)
    arrays = (sampled.action_ids, sampled.logprobs, sampled.entropies)
    assert sum(map(sys.getsizeof, arrays)) < 16 * 10_000
    assert sys.getsizeof(observed.observation_ids) < 5 * 10_000
