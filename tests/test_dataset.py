"""Datasets: rows into tasks, mistakes with file and row, an order that can be resumed."""

from __future__ import annotations

import json
from pathlib import Path

from agentenv.base.tree import TrajectoryTree
from agentenv.base.types import Task
from agentenv.data.dataset import TaskStream, load_tasks
from agentenv.rollout.metrics import rollout_metrics


def write(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows))
    return path


def test_rows_become_tasks(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"question": "one?", "answer": 1, "kind": "calc", "hint": "x"},
        "",
        {"question": "two?", "answer": ["2", "two"], "id": "me", "env_id": "other"},
    )
    first, second = load_tasks(path, "env")
    assert (first.id, first.env_id, first.answers, first.kind) == ("d-1", "env", ("1",), "calc")
    assert first.metadata == {"hint": "x"}
    assert (second.id, second.env_id, second.answers) == ("me", "other", ("2", "two"))


def test_a_stream_yields_all_tasks_in_each_epoch_and_resumes_at_any_position(
    tmp_path: Path,
) -> None:
    rows = [{"question": str(n), "answer": "a"} for n in range(5)]
    tasks = load_tasks(write(tmp_path, *rows), "env")
    stream = TaskStream(tasks, seed=3)
    whole = [stream.next().question for _ in range(15)]
    assert all(sorted(whole[i : i + 5]) == list("01234") for i in (0, 5, 10))
    assert whole[:5] != whole[5:10]
    for position in range(10):
        stream = TaskStream(tasks, 3, position)
        rest = [stream.next().question for _ in range(5)]
        assert rest == whole[position : position + 5]


def test_training_metrics_are_given_by_kind() -> None:
    def tree(kind: str, reward: float) -> TrajectoryTree:
        made = TrajectoryTree(Task("t", "e", "q", ("a",), kind), policy_version=0)
        root = made.add(None, observation_ids=[1])
        leaf = made.add(root, action_ids=[2], logprobs=[0.0], reward=reward)
        leaf.end, leaf.info["success"] = "terminated", reward > 0
        return made

    trees = [tree("math", 1.0), tree("math", 0.0), tree("qa", -1.0)]
    metrics = rollout_metrics(trees, 0)
    found = {name: value for name, value in metrics.items() if name.startswith("by_kind/")}
    assert found == {
        "by_kind/math/reward": 0.5,
        "by_kind/math/success": 0.5,
        "by_kind/qa/reward": -1.0,
        "by_kind/qa/success": 0.0,
    }
    assert not [name for name in rollout_metrics(trees[:2], 0) if name.startswith("by_kind/")]
