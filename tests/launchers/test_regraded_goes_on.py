"""An evaluation that was graded again by another grader is taken up by a command that has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.config import to_plain
from agentenv.errors import ConfigError
from launchers.evaluation import regrade
from launchers.evaluation.config import resolve_sets
from launchers.evaluation.store import Saved, Store, load_saved
from tests.support.stored_evaluation import mixed_rows, write_evaluation


def saved_with(folder: Path, grader: str) -> Saved:
    """What a command with this grader stores."""
    before = load_saved(folder)
    sets = {name: {"path": f"{name}.jsonl"} for name in before.config["sets"]}
    raw = {"env": {"id": "agentenv/QAGrader-v0"}, "grader": {"kind": grader}, "sets": sets}
    config = to_plain(resolve_sets(raw, "test"))
    return Saved(subject=before.subject, run=before.run, config=config)


def test_it_goes_on_with_its_new_grader_only(tmp_path: Path) -> None:
    folder = write_evaluation(tmp_path / "e", mixed_rows(4, 1), {"kind": "layered"})
    Store(folder, saved_with(folder, "layered")).close()
    assert regrade.main([str(folder), "grader.kind=exact"]) == 0
    Store(folder, saved_with(folder, "exact")).close()
    with pytest.raises(ConfigError, match="another configuration"):
        Store(folder, saved_with(folder, "layered"))
