"""examples/agent: its demonstrations are right, the program has their tokens, and it trains."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from random import Random

import pytest

from agentenv import Task, demonstrate, make
from agentenv.base.types import Limits, SamplingParams
from agentenv.contract.env import close_shared
from agentenv.contract.plan import Independent
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.envs.quickstart.setup import build_tokenizer
from agentenv.launchers import train
from agentenv.rollout.actor import Actor
from agentenv.text.renderer import TagRenderer
from examples.agent import world
from tests.envs.sandbox.test_program import left
from tests.support.warehouse import ROOT

TOML = ROOT / "examples" / "agent" / "train.toml"


def test_demonstrations_are_right_and_giving_up_has_no_reward() -> None:
    rows = [world.question(Random(f"{kind} {n}"), kind) for kind in world.KINDS for n in range(5)]
    assert all(row["success"] for row in demonstrate(world.TwinEnv, rows, world.solve))
    assert not any(row["reward"] for row in demonstrate(world.TwinEnv, rows, world.give_up))


def solving(prompt: str, rng: Random) -> str:
    """A turn of the good clerk."""
    results = re.findall(r"<result>\n(.*?)\n</result>", prompt)
    item = re.search(r"(?:one|of) (\w+) cost", prompt)
    assert item is not None
    kind = "partner" if "partner of" in prompt else "price"
    task = Task("t", "e", "?", ("1",), kind, {"item": item[1]})
    return world.solve(task, results)


async def test_the_program_has_the_tokens_of_its_twin() -> None:
    pytest.importorskip("openai")
    row = world.question(Random(3), "partner")
    task = Task("t", "e", row["question"], (str(row["answer"]),), row["kind"], row)
    program = tomllib.loads(TOML.read_text())["env"]["kwargs"]["program"]
    program["folder"] = str(ROOT / program["folder"])
    trees = []
    for env in (
        world.TwinEnv,
        lambda task: make("agentenv/Program-v0", task, program=program, grader={"kind": "exact"}),
    ):
        renderer = TagRenderer(build_tokenizer(), tools_in_prompt="none")
        config = ScriptedConfig(max_model_len=9000)
        engine = ScriptedEngine(config, renderer.tokenizer, script=solving)
        sampling = SamplingParams(max_tokens=1)
        actor = Actor(engine, renderer, env, Limits(max_failures=0), sampling, seed=7)
        trees.append(await actor.rollout(task, Independent(1)))
    (one,), (other,) = (tree.trajectories() for tree in trees)
    assert one.success
    assert other.success
    assert other.token_ids == one.token_ids
    assert other.loss_mask == one.loss_mask
    await close_shared()
    assert left() == []


def test_an_agent_with_the_stock_client_learns_with_forks(
    tmp_path: Path, forked_ranks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    from tests.support.rank_here import rank_here  # loads torch

    monkeypatch.chdir(ROOT)
    with rank_here():
        assert train.main([str(TOML), f"run.dir={tmp_path}"]) == 0
    run = tmp_path / "agent"
    success = json.loads((run / "summary.json").read_text())["success"]
    assert success["after_sft"] < 0.8
    assert success["after_rl"] >= 0.9
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollout/forks" in row]
    assert sum(row["rollout/forks"] for row in steps) > 20
    assert steps[-1]["env/program/replays_exact"] == steps[-1]["env/program/replays"] > 20
    assert not any(row["failed/trajectories"] for row in steps)
    assert left() == []
