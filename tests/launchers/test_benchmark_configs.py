"""The shipped evaluations: every benchmark of the papers, asked as published."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from launchers.evaluation.benchmarks import BENCHMARKS
from launchers.evaluation.config import EvaluateConfig, resolve_sets
from launchers.serving.roles import check_roles

CONFIGS = Path(__file__).parents[2] / "configs"


def load(name: str) -> EvaluateConfig:
    path = CONFIGS / f"{name}.toml"
    return resolve_sets(tomllib.loads(path.read_text()), str(path))


@pytest.mark.parametrize("name", ["eval_reasoning", "eval_deep_search"])
def test_sampling_and_limits_are_the_published_ones(name: str) -> None:
    config = load(name)
    check_roles(config)
    assert config.concurrency == 50
    for one in config.sets.values():
        assert one.sampling is not None
        assert one.limits is not None
        assert one.env is not None
        assert (one.sampling.temperature, one.sampling.top_p) == (0.6, 0.95)
        assert one.sampling.repetition_penalty == 1.1
        assert (one.limits.max_turn_tokens, one.limits.max_seconds) == (4096, 1500)
        assert one.limits.on_limit == "result"
        assert one.max_tasks is None, "as many as the papers ask"
        for tool in one.env.tools:
            assert tool.max_calls == {"python": 5, "search": 10}[tool.name]
    judge = config.roles["judge"]
    assert (judge.tensor_parallel_size, len(judge.gpus)) == (4, 4)


def test_together_they_ask_every_benchmark() -> None:
    sets = {**load("eval_reasoning").sets, **load("eval_deep_search").sets}
    assert {one.benchmark for one in sets.values()} == set(BENCHMARKS)
    for name, one in sets.items():
        spec = BENCHMARKS[one.benchmark]
        assert name == spec.name
        assert one.env is not None
        assert one.env.id == spec.env_id
        assert one.prompt is not None
        assert one.prompt.template == spec.preset
        assert one.grader is not None
        assert (one.grader.kind, one.grader.reward) == ("judge", "answer")
