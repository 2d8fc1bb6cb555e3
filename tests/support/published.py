"""The inputs of the shipped configurations, scaled down: a model that has had a cold start, and
data in the published schemas."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from agentenv.envs.quickstart.setup import build_model, chain
from agentenv.envs.quickstart.world import demonstration, make_world
from agentenv.launchers import sft
from tests.support.json_files import change_json, write_rows
from tests.support.rank_here import rank_here

SYSTEM = "What is of user"  # words of the small tokenizer; published rows bring a system prompt too
KINDS = ("calc", "hop")
HABITS = ("clean", "unboxed")  # with \boxed and without: rewards differ from the first step on
NUM_DIALOGUES = 600
CONTEXT = 4096  # the benchmarks' prompts are long ones for so small a tokenizer
COLD_START = """
[run]
dir = "{folder}/runs"
name = "cold-start"
[model]
path = "{folder}/model"
[data]
train = "{folder}/sharegpt.jsonl"
[sft]
batch_size = 16
gradient_accumulation = 1
num_steps = 100
[learner]
optimizer = "muon_adamw"
learning_rate = 1e-2
muon_learning_rate = 1.2e-2
"""


def make_workspace(folder: Path) -> Path:
    """Files in `folder`, and its run "cold-start", whose path is returned."""
    build_model(folder / "model", seed=0)
    change_json(folder / "model" / "config.json", max_position_embeddings=CONTEXT)
    world = make_world(0)
    write_rows(folder / "kb.jsonl", world.documents())
    questions = [q.row() for q in world.questions["train"] if q.kind in KINDS]
    write_rows(folder / "rl.jsonl", (published(row, i) for i, row in enumerate(questions)))
    write_rows(folder / "sharegpt.jsonl", dialogues(set(world.reserved())))
    write_rows(folder / "pairs.jsonl", pairs(set(world.reserved())))
    rows = [{"question": q["question"], "answer": q["answer"]} for q in questions[:8]]
    for name in ("gsm8k", "hotpotqa", "webwalker"):
        write_rows(folder / f"{name}.jsonl", rows)
    registry = {"final_5w4_still": {"file_name": "sharegpt.jsonl", "formatting": "sharegpt"}}
    (folder / "dataset_info.json").write_text(json.dumps(registry), encoding="utf-8")
    config = folder / "cold.toml"
    config.write_text(COLD_START.format(folder=folder), encoding="utf-8")
    with rank_here():
        assert sft.main([str(config)]) == 0
    return folder / "runs" / "cold-start"


def published(row: dict[str, Any], index: int) -> dict[str, Any]:
    """A question in the schema of ARPO's parquet files."""
    return {
        "data_source": "DR_grpo_mix",
        "prompt": [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": row["question"]},
        ],
        "ability": "math" if row["kind"] == "calc" else "qa",
        "reward_model": {"ground_truth": row["answer"], "style": "rule"},
        "extra_info": {"index": index, "question": row["question"], "split": "train"},
    }


def dialogues(reserved: set[str]) -> Iterator[dict[str, Any]]:
    """ShareGPT rows as LLaMA-Factory reads them; results are within the answer."""
    rng = Random("published dialogues")
    for number in range(NUM_DIALOGUES):
        demo = demonstration(rng, KINDS[number % 2], reserved, HABITS[number // 2 % 2])
        human = {"from": "human", "value": demo.question.question}
        answered = {"from": "gpt", "value": chain(demo.turns)}
        yield {"system": SYSTEM, "conversations": [human, answered]}


def pairs(reserved: set[str]) -> Iterator[dict[str, Any]]:
    """Preferences as LLaMA-Factory reads them."""
    rng = Random("published pairs")
    for _ in range(64):
        state = rng.getstate()
        good = demonstration(rng, "calc", reserved, "clean")
        rng.setstate(state)
        bad = demonstration(rng, "calc", reserved, "unboxed")
        yield {
            "system": SYSTEM,
            "conversations": [{"from": "human", "value": good.question.question}],
            "chosen": {"from": "gpt", "value": chain(good.turns)},
            "rejected": {"from": "gpt", "value": chain(bad.turns)},
        }
