"""From questions to data to a model that makes data itself: the quick start's world, a scripted
teacher, real tools, real training, and the embedded engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.envs.quickstart.setup import build_model
from agentenv.envs.quickstart.world import make_world
from agentenv.evaluation.store import read_rows
from agentenv.launchers import sft, synthesize, train
from tests.support.runs import rows_of
from tests.support.warehouse import ROOT

pytestmark = pytest.mark.usefixtures("here")

NUM = 8
DIRECT_PROMPT = "What is of user"  # words of the small tokenizer
SAMPLING = """
[env]
id = "agentenv/Quickstart-v0"
kwargs = {{ corpus = "{folder}/kb.jsonl" }}
[sets.world]
path = "{folder}/questions.jsonl"
[direct]
prompt = {{ template = "{folder}/direct.txt" }}
[hints]
phrases = ["need", "know"]
verification = ["I need "]
reflection = ["I need "]
[limits]
max_prompt_tokens = 96
max_response_tokens = 320
max_turn_tokens = 64
max_tool_result_tokens = 48
"""
COLD_START = """
[run]
dir = "{folder}/runs"
[model]
path = "{folder}/model"
[data]
train = "sft"
dataset_info = "{folder}/teacher"
max_length = 512
[sft]
batch_size = 8
gradient_accumulation = 1
num_steps = 100
[learner]
optimizer = "muon_adamw"
learning_rate = 1e-2
muon_learning_rate = 1.2e-2
"""
REINFORCEMENT = """
[run]
dir = "{folder}/runs"
[model]
path = "{folder}/runs/cold"
[env]
id = "agentenv/Quickstart-v0"
kwargs = {{ corpus = "{folder}/kb.jsonl" }}
[data]
train = "{folder}/student/rl.jsonl"
[limits]
max_prompt_tokens = 96
max_response_tokens = 256
max_turn_tokens = 64
max_tool_result_tokens = 48
[algorithm]
name = "grpo"
group_size = 4
[queue]
groups_per_step = 2
[learner]
groups_per_minibatch = 2
[train]
num_steps = 1
"""


SMALL = """
sets.reasoning.path={folder}/questions.jsonl
search.backend={{name='bm25', corpus='{folder}/kb.jsonl'}}
engine.name=embedded
engine.max_model_len=4096
limits.max_response_tokens=192
limits.max_turn_tokens=64
"""


def prepare(folder: Path) -> None:
    """Model, knowledge base, and questions of which the last two have no right answer."""
    build_model(folder / "model", seed=0)
    world = make_world(0)
    write(folder / "kb.jsonl", world.documents())
    found = [question.row() for question in world.questions["train"] if question.kind == "hop"]
    rows = [*found[:NUM], *({**row, "answer": "nowhere"} for row in found[NUM : NUM + 2])]
    write(folder / "questions.jsonl", rows)
    (folder / "direct.txt").write_text(DIRECT_PROMPT)
    for name, text in (("data", SAMPLING), ("cold", COLD_START), ("rl", REINFORCEMENT)):
        (folder / f"{name}.toml").write_text(text.format(folder=folder))


def write(path: Path, rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def synthesized(folder: Path, subject: Path, name: str, *more: str) -> Path:
    out = folder / name
    config = ["--config", str(folder / "data.toml"), "--out", str(out)]
    assert synthesize.main([str(subject), *config, *more]) == 0
    return out


def test_a_model_learns_from_synthesized_data_and_makes_more(tmp_path: Path) -> None:
    prepare(tmp_path)
    scripted = "engine.name=scripted"  # envs/quickstart/world.py, which occasionally gives up
    teacher = synthesized(tmp_path, tmp_path / "model", "teacher", scripted, "num_samples=4")
    lessons, hard = read(teacher / "sft.jsonl"), read(teacher / "rl.jsonl")
    assert len(lessons) >= NUM - 2
    assert {"nowhere"} <= {row["answer"][0] for row in hard}
    assert len(lessons) + len(hard) == NUM + 2
    assert all(row["num_tool_calls"] == 2 for row in lessons)

    assert sft.main([str(tmp_path / "cold.toml")]) == 0
    cold = tmp_path / "runs" / "cold"
    student = synthesized(tmp_path, cold, "student", "num_samples=2", "sampling.temperature=0.3")
    rows = read_rows(student / "trajectories")
    assert {row.dataset for row in rows} == {"world.direct", "world.tools", "world.hints"}
    assert [row.error for row in rows if row.end == "failed"] == []
    own = read(student / "sft.jsonl")
    assert len(own) >= NUM // 2, "it has learned what the teacher showed"
    assert all(row["conversations"][1]["value"].count("<result>") >= 1 for row in own)
    rejected = [row for row in read(student / "rejected.jsonl") if row["what"] == "trajectory"]
    assert len(own) + len(rejected) == len(rows)

    again = ["run.name=again", f"model.path={cold}", f"data.dataset_info={student}"]
    assert sft.main([str(tmp_path / "cold.toml"), *again, "sft.num_steps=1"]) == 0
    (step,) = [row for row in rows_of(tmp_path / "runs" / "again") if "sft/loss" in row]
    assert step["sft/loss"] < 1.0, "its own words are likely to it"

    assert train.main([str(tmp_path / "rl.toml")]) == 0
    (step,) = [row for row in rows_of(tmp_path / "runs" / "rl") if "trees/offered" in row]
    assert step["trees/offered"] == 2


def test_the_shipped_configuration_is_run(tmp_path: Path) -> None:
    """As it is, but for the sizes of model and data: an untrained model answers nothing."""
    prepare(tmp_path)
    path = tmp_path / "model" / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "max_position_embeddings": 4096}), encoding="utf-8")
    config = ["--config", str(ROOT / "configs" / "synthesize_tools.toml"), "--n", "2"]
    changed = SMALL.format(folder=tmp_path).split("\n")[1:-1]
    out = tmp_path / "out"
    assert synthesize.main([str(tmp_path / "model"), *config, "--out", str(out), *changed]) == 0
    rows = read_rows(out / "trajectories")
    assert {row.dataset for row in rows} >= {"reasoning.direct", "reasoning.tools"}
    assert [row.error for row in rows if row.end == "failed"] == []
    assert len(read(out / "rl.jsonl")) == 2
