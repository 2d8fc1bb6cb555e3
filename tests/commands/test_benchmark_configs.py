"""The shipped evaluations: every benchmark of the papers with its published settings."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from agentenv.assembly.keys.benchmarks import BENCHMARKS, ENV_ID
from agentenv.assembly.keys.evaluation import EvaluateConfig, resolve_sets
from agentenv.assembly.keys.rl import TrainConfig
from agentenv.assembly.serving.servers import check_roles
from agentenv.base.config import load_config, to_plain
from agentenv.envs.search.keys import SearchConfig
from agentenv.launchers import evaluate

CONFIGS = Path(__file__).parents[2] / "configs"


def load(name: str) -> EvaluateConfig:
    path = CONFIGS / f"{name}.toml"
    return resolve_sets(tomllib.loads(path.read_text()), str(path))


@pytest.mark.parametrize(
    ("name", "mode"), [("eval_reasoning", "snippets"), ("eval_deep_search", "summaries")]
)
def test_limits_and_search_of_every_set_are_the_published_ones(name: str, mode: str) -> None:
    config = load(name)
    check_roles(config)
    for one in config.sets.values():
        assert one.env is not None
        assert isinstance(one.search, SearchConfig)
        assert one.search.sizes.mode == mode
        assert one.limits.max_tool_result_tokens == one.limits.max_response_tokens
        assert one.limits.on_limit == "result"
        assert one.max_tasks is None, "as many as the papers ask"
        calls = {tool.name: tool.max_calls for tool in one.env.tools}
        assert calls == {"search": 10, "python": 5}, "both tools, of every set"


def test_limits_of_tools_below_those_of_the_training_warn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "checkpoints").mkdir()
    trained = to_plain(load_config(TrainConfig, CONFIGS / "arpo_deep_search_8b.toml"))
    trained["search"]["mode"], trained["env"]["tools"] = "pages", [{"name": "python"}]
    (tmp_path / "config.json").write_text(json.dumps(trained))
    dry = [str(tmp_path), "--checkpoint", "start", "--dry-run", "--set", "gaia", "--config"]
    dry += [str(CONFIGS / "eval_deep_search.toml")]
    evaluate.main(dry)
    assert "trained with" not in (shown := capsys.readouterr()).err
    assert "grader.partial_credit: True" in shown.out
    lower = ["python.timeout_s=10", "search.mode=snippets", "limits.max_tool_result_tokens=99"]
    evaluate.main([*dry, *lower, "env.tools=[{name='python', max_calls=1}]"])
    said = capsys.readouterr().err
    for text in (
        "python.timeout_s = 10, but the policy was trained with 120, in the sets gaia",
        "search.preset.max_page_chars = 0,",
        "limits.max_tool_result_tokens = 99,",
        "env.tools.python.max_calls = 1, but the policy was trained with 6",
    ):
        assert text in said


def test_together_the_configurations_cover_every_benchmark() -> None:
    sets = [*load("eval_reasoning").sets.items(), *load("eval_deep_search").sets.items()]
    assert {one.benchmark for _, one in sets} == set(BENCHMARKS)
    for name, one in sets:
        spec = BENCHMARKS[one.benchmark]
        assert name == spec.name
        assert one.env is not None
        assert one.env.id == ENV_ID
        assert one.grader is not None
        assert (one.grader.kind, one.grader.reward) == ("judge", "answer")


def test_the_ten_sets_are_those_of_table_1() -> None:
    sets = load("eval_reasoning").sets
    ten = "aime24 aime25 math500 gsm8k math webwalker hotpotqa 2wiki musique bamboogle"
    assert set(sets) == set(ten.split())
    samples = {name: one.num_samples for name, one in sets.items() if one.num_samples != 1}
    assert samples == {"aime24": 32, "aime25": 32}


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("eval_reasoning", "arpo_reasoning_7b"),
        ("eval_deep_search", "arpo_deep_search_8b"),
        ("eval_tool_star", "arpo_reasoning_7b"),
    ],
)
def test_the_prompt_is_that_of_the_training_file(name: str, data: str) -> None:
    trained = load_config(TrainConfig, CONFIGS / f"{data}.toml").data.train
    for key, one in load(name).sets.items():
        assert one.prompt.template == ("chinese" if key == "xbench" else trained)


def test_tool_star_searches_wikipedia_for_its_four_sets_and_bing_for_the_others() -> None:
    """run.py of its evaluation, line 240: five passages of the retriever, or deep_search."""
    sets = load("eval_tool_star").sets
    for name, one in sets.items():
        assert one.env is not None
        assert {tool.name: tool.max_calls for tool in one.env.tools} == {"search": 3, "python": 3}
        assert one.num_samples == 1, "greedy"
        search = one.search
        assert isinstance(search, SearchConfig)
        found = (type(search.backend).__name__, search.sizes.mode, search.max_results)
        if name in ("hotpotqa", "2wiki", "musique", "bamboogle"):
            assert found == ("RemoteSearchConfig", "snippets", 5)
            assert search.sizes.form == "passages"
        else:
            assert found == ("WebConfig", "summaries", 10)
            assert search.sizes.window_chars == 6_000
    assert len(sets) == 12
