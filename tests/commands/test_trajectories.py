"""The written trajectories are the same from the process of the run and from another."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.assembly.reports.records import TrajectoryWriter, write_rows
from agentenv.base.tree import TrajectoryTree, to_frame
from agentenv.envs.quickstart.setup import build_tokenizer
from agentenv.processes.worker_pool import WorkerPool
from agentenv.text.encoder import decoder
from tests.learners.trees import random_tree


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def trees() -> list[TrajectoryTree]:
    return [random_tree(Random(i), index=i) for i in range(3)]


async def test_a_separate_process_writes_the_same_rows(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    size, shown = write_rows(trees(), decoder(tokenizer), here, 2)
    job = {"trees": [to_frame(tree) for tree in trees()], "path": str(there), "wanted": 2}
    handler = f"{TrajectoryWriter.__module__}:{TrajectoryWriter.__name__}"
    arguments = {"tokenizer": str(tmp_path / "tokenizer.json")}
    pool = WorkerPool(handler, name="trajectories", arguments=arguments, max_jobs=1)
    try:
        done = await pool.run(job, 60.0)
    finally:
        pool.close()
    assert there.read_text() == here.read_text()
    assert (done["num_bytes"], list(map(json.loads, done["shown"]))) == (size, shown)


def test_rows_mark_policy_text_and_trained_tokens(tokenizer: Any, tmp_path: Path) -> None:
    (tree, *_) = trees()
    write_rows([tree], decoder(tokenizer), tmp_path / "rows.jsonl", 0)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    every = [*tree.trajectories(failed=True)]
    assert len(rows) == len(every)
    for row, trajectory in zip(rows, every, strict=True):
        texts = [text for part in row["segments"] for text in part.values()]
        assert "".join(texts) == "".join(
            tokenizer.decode(list(ids))
            for node in trajectory.path
            for ids in (node.action_ids, node.observation_ids)
        )
        trained = [i % 2 == 1 for i, size in enumerate(row["loss_mask"]) for _ in range(size)]
        assert trained == trajectory.loss_mask
        assert row["num_tokens"] == len(trajectory.token_ids)
