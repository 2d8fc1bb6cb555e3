"""The shipped synthesis: the quick start's world, real tools, and the embedded engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.envs.quickstart.setup import build_model
from agentenv.envs.quickstart.world import make_world
from agentenv.evaluation.store import read_rows
from agentenv.launchers import synthesize
from tests.support.json_files import change_json, rows_in, write_rows
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
    write_rows(folder / "kb.jsonl", world.documents())
    write_rows(folder / "questions.jsonl", [one.row() for one in world.questions["train"][:4]])


def test_the_shipped_configuration_is_run(tmp_path: Path) -> None:
    """As it is, but for the sizes of model and data: an untrained model answers nothing."""
    prepare(tmp_path)
    change_json(tmp_path / "model" / "config.json", max_position_embeddings=4096)
    config = ["--config", str(ROOT / "configs" / "synthesize_tools.toml"), "--n", "2"]
    changed = SMALL.format(folder=tmp_path).split("\n")[1:-1]
    out = tmp_path / "out"
    assert synthesize.main([str(tmp_path / "model"), *config, "--out", str(out), *changed]) == 0
    rows = read_rows(out / "trajectories")
    assert {row.dataset for row in rows} >= {"reasoning.direct", "reasoning.tools"}
    assert [row.error for row in rows if row.end == "failed"] == []
    assert len(rows_in(out / "rl.jsonl")) == 2
