"""The shipped configurations have the published values, and docs/reproduce.md fetches their inputs.

The values are those of the released scripts and YAML files: RUC-NLPIR/ARPO at a95cd08 (scripts,
evaluation, LLaMA-Factory/arpo_train_sft) and dongguanting/Tool-Star at d12222c.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from agentenv.assembly.keys.rl import TrainConfig
from agentenv.base.config import build_config, load_config, to_plain
from agentenv.reference.helpers import AssistConfig
from tests.support.warehouse import ROOT

CONFIGS = ROOT / "configs"
# prompts a step and a mini-batch; tokens of prompt and response; n, initial rollouts; calls
# allowed, epochs, steps between checkpoints
PUBLISHED = {
    "arpo_reasoning_7b": (128, 16, 1536, 4096, 16, 8, 3, 2, 5),
    "grpo_reasoning_7b": (128, 16, 1536, 4096, 16, None, 3, 2, 5),
    "aepo_reasoning_7b": (128, 16, 1536, 4096, 16, 8, 3, 2, 5),
    "arpo_deep_search_8b": (128, 16, 2000, 10000, 16, 8, 6, 5, 5),
    "arpo_deep_search_14b": (64, 8, 2000, 6192, 12, 6, 6, 5, 5),
    "grpo_deep_search_14b": (64, 8, 2000, 6192, 12, None, 6, 5, 5),
    "aepo_deep_search_14b": (64, 8, 2000, 6192, 12, 6, 6, 5, 5),
    "aepo_deep_search_7b": (64, 8, 2000, 6192, 12, 6, 6, 5, 5),  # unknown: those of 14B
    "arpo_relative_7b": (128, 16, 1536, 4096, 16, 8, 3, 2, 5),
    "tool_star_rl_3b": (128, 16, 1536, 4096, 8, None, 3, 2, 10),
}


def table(name: str) -> dict[str, Any]:
    return tomllib.loads((CONFIGS / f"{name}.toml").read_text(encoding="utf-8"))


def resolved(name: str) -> dict[str, Any]:
    return to_plain(load_config(TrainConfig, CONFIGS / f"{name}.toml"))


@pytest.mark.parametrize("name", PUBLISHED)
def test_sizes_are_the_published_ones(name: str) -> None:
    config = resolved(name)
    limits, algorithm = config["limits"], config["algorithm"]
    assert (
        config["queue"]["groups_per_step"],
        config["learner"]["groups_per_minibatch"],
        limits["max_prompt_tokens"],
        limits["max_response_tokens"],
        algorithm["group_size"],
        algorithm.get("initial_rollouts"),
        limits["max_tool_calls"],
        config["train"]["num_epochs"],
        config["checkpoint"]["every"],
    ) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_rates_and_clips_are_the_published_ones(name: str) -> None:
    config = resolved(name)
    learner, algorithm = config["learner"], config["algorithm"]
    keys = ("optimizer", "learning_rate", "weight_decay", "grad_clip", "schedule", "warmup_steps")
    assert [learner[key] for key in keys] == ["adamw", 1e-6, 0.01, 1.0, "constant", 0]
    assert learner["num_epochs_per_batch"] == 1
    assert learner["dtype"] == "bfloat16"
    keys = ("clip_low", "clip_high", "dual_clip", "kl_loss", "kl_reward")
    assert [algorithm[key] for key in keys] == [0.2, 0.2, 3.0, 0.0, 0.0]
    assert algorithm["entropy_bonus"] == (0.001 if name == "tool_star_rl_3b" else 0.0)
    assert config["sampling"]["train"]["temperature"] == 1
    assert config["sampling"]["eval"]["temperature"] == 0
    limits = config["limits"]
    tokens = limits["max_prompt_tokens"] + limits["max_response_tokens"]
    assert learner["max_tokens_per_microbatch"] == 2 * tokens
    assert config["python"]["timeout_s"] == (5 if name == "tool_star_rl_3b" else 120)
    if name.startswith(("arpo", "aepo")):
        keys = ("beam_size", "base_probability", "entropy_weight")
        weight = 0.5 if name == "arpo_relative_7b" else 0.2
        assert [algorithm[key] for key in keys] == [2, 0.5, weight]
    if name.startswith("aepo"):
        assert algorithm["entropy_balanced_clipping"] is True
        assert algorithm["entropy_advantage"] == 0.2
    assert algorithm["aggregation"] == "token-mean"
    assert algorithm.get("fork_rule", "sample") == "sample"
    search, grader = config["search"], config["grader"]
    assert (search["backend"]["name"], search["backend"]["provider"]) == ("web", "brightdata")
    assert (search["mode"], search["max_results"]) == (None, 10), "snippets"
    assert grader["partial_credit"]


def test_unknown_values_of_aepo_at_7b_are_marked() -> None:
    """Its script is published by name, AEPO_Qwen25_7B_DeepResearch.sh; the values are those of 14B,
    and each value that differs between the released scripts is marked as unknown."""
    said = (CONFIGS / "aepo_deep_search_7b.toml").read_text(encoding="utf-8")
    assert "AEPO_Qwen25_7B_DeepResearch.sh" in said
    unknown = {line.split(" = ")[0] for line in said.splitlines() if "# unknown" in line}
    released = [table(name) for name in PUBLISHED if name.startswith(("arpo_d", "aepo_d"))]
    for section in ("limits", "algorithm", "queue", "learner"):
        for key in table("aepo_deep_search_7b")[section]:
            found = {str(one[section][key]) for one in released if key in one[section]}
            same = key in ("name", "max_turn_tokens", "max_tool_result_tokens", "budget_split")
            by_size = key in ("max_tokens_per_microbatch", "max_seconds")
            assert len(found) == 1 or same or by_size or key in unknown, key
    other = resolved("aepo_deep_search_14b")
    own = resolved("aepo_deep_search_7b")
    assert own["data"]["train"] == other["data"]["train"] == "data/hard_search_1k.parquet"
    assert own["algorithm"] == other["algorithm"]


def test_the_relative_variant_differs_by_the_signal_alone() -> None:
    own, plain = table("arpo_relative_7b"), table("arpo_reasoning_7b")
    marked = {"fork_criterion": "relative", "entropy_weight": 0.5, "entropy_window": 64}
    assert own.pop("algorithm") == plain.pop("algorithm") | marked
    assert own == plain


@pytest.mark.parametrize("name", ["server_judge", "eval_reasoning", "eval_deep_search"])
def test_the_judge_is_that_of_the_released_evaluation(name: str) -> None:
    judge = table(name)["roles"]["judge"]
    assert judge["model"] == "models/Qwen2.5-72B-Instruct-GPTQ-Int4"
    assert judge["quantization"] == "gptq"
    assert judge["tensor_parallel_size"] == 4
    assert judge["gpu_memory_share"] == 0.75
    assert judge["max_model_len"] == 32768


def test_tool_stars_evaluation_samples_and_helps_as_published() -> None:
    asked = table("eval_tool_star")
    keys = {"temperature": 0, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    assert asked["sampling"] == keys
    assert asked["env"]["tools"] == [
        {"name": "search", "max_calls": 3},
        {"name": "python", "max_calls": 3},
    ]
    assert asked["python"]["timeout_s"] == 5
    assert asked["assist"]["refiner"]["min_response_tokens"] == 8192
    helpers = build_config(AssistConfig, asked["assist"], "eval_tool_star")
    assert helpers.debugger is not None
    assert helpers.backtracer is not None
    assert helpers.refiner is not None
    uses = [helpers.debugger.max_uses, helpers.backtracer.max_uses, helpers.refiner.max_uses]
    assert uses == [1, 1, 1]


def test_reproduce_fetches_each_model_and_file_that_its_evaluations_read() -> None:
    text = (ROOT / "docs" / "reproduce.md").read_text(encoding="utf-8")
    fetched = re.search(r"for name in (.*); do hf download Qwen/", text)
    assert fetched is not None
    models = {f"models/{name}" for name in fetched[1].split()}
    for name in ("eval_reasoning", "eval_deep_search", "server_judge", "server_summarizer"):
        config = table(name)
        assert {role["model"] for role in config["roles"].values()} <= models
        for key, one in config.get("sets", {}).items():
            assert one["path"] == f"data/eval/{key}.jsonl"  # where its copying step puts them
