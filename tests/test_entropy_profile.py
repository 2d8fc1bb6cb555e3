from __future__ import annotations

import math

import pytest

from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task
from agentenv.rollout.metrics import (
    MAX_TOOLS,
    OTHER_TOOLS,
    EntropyProfile,
    entropy_profile,
    merged_profile,
    profile_rows,
)


def make_tree() -> TrajectoryTree:
    tree = TrajectoryTree(Task("t", "toy", "q", ("a",)))
    root = tree.add(None, observation_ids=[1])
    search = {"tool_calls": [{"name": "search"}, {"name": "search"}]}
    both = {"tool_calls": [{"name": "python"}, {"name": "search"}]}
    first = tree.add(root, entropies=[1.0, 3.0], observation_ids=[3], info=search)
    second = tree.add(first, entropies=[4.0], observation_ids=[3], info=both)
    tree.add(first, entropies=[2.0, 5.0])  # a fork at the same result
    tree.add(second, entropies=[6.0, 1.0, 1.0])
    tree.add(root, entropies=[2.0])
    tree.add(root)  # failed before any token
    return tree


def test_entropy_by_position_at_the_start_and_after_each_tool() -> None:
    profile = entropy_profile([make_tree()])
    assert (profile["start"].mean, profile["start"].count) == ([1.5, 3.0], [2, 1])
    assert profile["after_result"].mean == [4.0, 3.0, 1.0]
    assert list(profile) == ["start", "after_result", "after/python", "after/search"]
    assert profile["after/python"].mean == [6.0, 1.0, 1.0]
    assert profile["after/search"].count == [3, 2, 1]
    assert profile_rows(profile)[0] == {"curve": "start", "position": 0, "entropy": 1.5, "turns": 2}


def test_a_window_weighs_positions_by_their_turns() -> None:
    profile = entropy_profile([make_tree()], num_positions=2)
    assert profile["after_result"].count == [3, 2]
    assert profile["after_result"].window(20) == pytest.approx((4 + 2 + 6 + 5 + 1) / 5)
    assert math.isnan(entropy_profile([])["start"].window(20))


def test_profiles_of_parts_merge_to_that_of_all() -> None:
    other = TrajectoryTree(Task("u", "toy", "q", ("a",)))
    root = other.add(None, observation_ids=[1])
    info = {"tool_calls": [{"name": "look"}]}
    turn = other.add(root, entropies=[0.25, 0.5, 4.0], observation_ids=[3], info=info)
    other.add(turn, entropies=[8.0, 1.0])
    merged: EntropyProfile = {}
    for tree in (make_tree(), other):
        merged = merged_profile(merged, entropy_profile([tree]))
    whole = entropy_profile([make_tree(), other])
    assert list(merged) == list(whole)
    for name, curve in whole.items():
        assert merged[name].count == curve.count
        assert merged[name].mean == pytest.approx(curve.mean)


def test_invented_tools_do_not_grow_a_merged_profile() -> None:
    merged: EntropyProfile = {}
    for number in range(3 * MAX_TOOLS):
        tree = TrajectoryTree(Task("t", "toy", "q", ("a",)))
        root = tree.add(None, observation_ids=[1])
        info = {"tool_calls": [{"name": f"tool{number}"}]}
        turn = tree.add(root, entropies=[1.0], observation_ids=[3], info=info)
        tree.add(turn, entropies=[2.0])
        merged = merged_profile(merged, entropy_profile([tree]))
    assert len(merged) == MAX_TOOLS + 3
    assert merged[OTHER_TOOLS].count == [2 * MAX_TOOLS]
    assert merged["after_result"].count == [3 * MAX_TOOLS]
