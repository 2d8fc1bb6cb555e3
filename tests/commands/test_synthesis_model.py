"""The shipped synthesis: the quick start's world, real tools, and the embedded engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentenv.envs.quickstart.setup import build_model
from agentenv.envs.quickstart.world import make_world
from agentenv.evaluation.store import read_rows
from agentenv.launchers import synthesize
from tests.support.warehouse import ROOT

pytestmark = pytest.mark.usefixtures("here")

SMALL = """
sets.reasoning.path={folder}/questions.jsonl
search.backend={{name='bm25', corpus='{folder}/kb.jsonl'}}
engine.name=embedded
engine.max_model_len=4096
limits.max_response_tokens=192
limits.max_turn_tokens=64
"""


def prepare(folder: Path) -> None:
    """Model, knowledge base, and questions."""
    build_model(folder / "model", seed=0)
    world = make_world(0)
    write(folder / "kb.jsonl", world.documents())
    write(folder / "questions.jsonl", [one.row() for one in world.questions["train"][:4]])


def write(path: Path, rows: Any) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


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
