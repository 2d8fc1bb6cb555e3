from __future__ import annotations

import math

import pytest

from agentenv.entropy_profile import entropy_profile
from agentenv.tree import TrajectoryTree
from agentenv.types import Task


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
    tree.add(root)  # failed before it said anything
    return tree


def test_entropy_by_position_at_the_start_and_after_each_tool() -> None:
    profile = entropy_profile([make_tree()])
    assert (profile.start.mean, profile.start.count) == ([1.5, 3.0], [2, 1])
    assert profile.after_result.mean == [4.0, 3.0, 1.0]
    assert list(profile.after) == ["python", "search"]
    assert profile.after["python"].mean == [6.0, 1.0, 1.0]
    assert profile.after["search"].count == [3, 2, 1]


def test_a_window_weighs_positions_by_their_turns() -> None:
    profile = entropy_profile([make_tree()], num_positions=2)
    assert profile.after_result.count == [3, 2]
    assert profile.after_result.window(20) == pytest.approx((4 + 2 + 6 + 5 + 1) / 5)
    assert math.isnan(entropy_profile([]).start.window(20))


def test_rows_are_a_table_of_all_curves() -> None:
    rows = entropy_profile([make_tree()]).rows()
    assert {row["curve"] for row in rows} == {
        "start",
        "after_result",
        "after/python",
        "after/search",
    }
    assert rows[0] == {"curve": "start", "position": 0, "entropy": 1.5, "turns": 2}
