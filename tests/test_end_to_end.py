"""One whole training run on a CPU: real engine, real learner process, real tools."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.run.rundir import RunDirectory
from agentenv.assembly.run.terminal import View
from agentenv.base.config import load_config
from agentenv.training.start import make_training

CONFIG = Path(__file__).parent / "support" / "small_quickstart.toml"


@pytest.mark.promise
async def test_an_agent_learns_to_use_real_tools(tmp_path: Path) -> None:
    config = load_config(TrainConfig, CONFIG)
    training = make_training(config, RunDirectory(tmp_path / "run", resume=False), View())
    await training.run_all()

    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    success = summary["success"]
    assert success["before_sft"] < 0.05
    assert success["after_rl"] > success["after_sft"] + 0.1  # 3 standard errors of 200 questions
    assert summary["reward"]["after_rl"] > summary["reward"]["after_sft"] + 0.15

    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    versions = [row["policy_version"] for row in rows if "trees/offered" in row]
    num_steps = config.train.num_steps
    assert versions == list(range(2, 2 + num_steps)), "the cold start is version 1, then an update"
    assert summary["forks_total"] > 0
    assert summary["tool_calls_total"] > 0

    assert 1 <= max(row.get("staleness/max", 0) for row in rows) <= config.queue.max_staleness
    last = [row for row in rows if "trees/offered" in row][-1]
    assert last["engine/cached_tokens"] > 0
    assert last["engine/weight_updates"] == 1 + num_steps
    assert summary["engine_learner_logprob_gap"]["max"] < 1e-4

    trees = summary["trees"]
    assert trees["offered"] == num_steps * config.queue.groups_per_step
    assert trees["offered"] == (
        trees["trained"] + trees["filtered"] + trees["failed"] + trees["in_flight"]
    )
    assert training.loop.parts.actor.envs.count == 0
    assert training.loop.parts.eval_actor.envs.count == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}
