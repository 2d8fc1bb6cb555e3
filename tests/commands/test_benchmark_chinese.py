"""xBench's schema and the Chinese prompt from the encrypted file to the score: real search over
Chinese text, real Python, real grading; only the policy is scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.keys.benchmarks import benchmark, load_benchmark
from agentenv.assembly.keys.rl import EnvConfig
from agentenv.assembly.parts.environments import EnvMaker
from agentenv.base.config import build_config
from agentenv.base.types import Limits, SamplingParams
from agentenv.contract.env import close_shared
from agentenv.engines.scripted import ScriptedConfig, ScriptedEngine
from agentenv.envs.grading.keys import GraderConfig
from agentenv.envs.quickstart.setup import build_tokenizer
from agentenv.envs.search.keys import SearchConfig
from agentenv.rollout.actor import Actor
from agentenv.rollout.questions import evaluate
from agentenv.text.prompt import PromptConfig, preset
from agentenv.text.renderer import TagRenderer
from tests.support.tea_house import HOUSES, turn, write_world


@pytest.fixture(autouse=True)
async def _shared() -> AsyncIterator[None]:
    yield
    await close_shared()


async def test_an_xbench_set_is_evaluated_in_chinese_and_scored(
    tmp_path: Path,
) -> None:
    corpus, questions = write_world(tmp_path)
    tasks = load_benchmark("xbench", questions)
    assert len(tasks) == 2 * len(HOUSES)
    actor = _actor(benchmark("xbench").usual_keys({}), corpus)
    trees = await evaluate(actor, tasks)
    found = [one for tree in trees for one in tree.trajectories()]
    assert [one.success for one in found] == [True] * len(tasks), found[0].leaf.info
    assert [one.num_tool_calls for one in found] == [1, 2] * len(HOUSES)
    first = actor.renderer.decode(trees[0].nodes[0].observation_ids)
    assert preset("chinese") in first
    assert tasks[0].question in first


async def test_the_same_policy_fails_with_the_english_prompt(tmp_path: Path) -> None:
    """Therefore the score above shows that the prompt reached the policy."""
    corpus, questions = write_world(tmp_path)
    tasks = load_benchmark("xbench", questions)
    keys = benchmark("xbench").usual_keys({}) | {"prompt": {"template": "search+python"}}
    trees = await evaluate(_actor(keys, corpus), tasks)
    assert not any(one.success for tree in trees for one in tree.trajectories())


def _actor(keys: dict[str, Any], corpus: Path) -> Actor:
    limits = build_config(Limits, keys["limits"], "limits")
    prompt = build_config(PromptConfig, keys["prompt"], "prompt")
    backend = {"backend": {"name": "bm25", "corpus": str(corpus)}, "max_results": 1}
    tables = {
        "grader": build_config(GraderConfig, keys["grader"], "grader"),
        "search": build_config(SearchConfig, backend, "search"),
    }
    env = build_config(EnvConfig, keys["env"], "env")
    tokenizer = build_tokenizer()
    engine = ScriptedEngine(ScriptedConfig(max_model_len=8192), tokenizer, script=turn)
    return Actor(
        engine,
        TagRenderer(tokenizer, prompt),
        EnvMaker(env, tables, Path, limits, prompt),
        limits,
        SamplingParams(max_tokens=1),
        0,
    )
