"""Contradictory deadlines are reported before a run with both keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentenv.config import load_config
from agentenv.pipelines.config.rl import TrainConfig
from agentenv.pipelines.setup.start_checks import contradictions

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.toml"


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (("limits.max_tree_seconds=1",), ["limits.max_tree_seconds = 1 ends trees before"]),
        (("eval.timeout_s=1",), ["eval.timeout_s = 1 ends evaluations before"]),
        (
            ("python={timeout_s=9999}", "limits.max_seconds=600"),
            ["python.timeout_s = 9999 lets one call take longer than limits.max_seconds = 600"],
        ),
    ],
)
def test_both_contradicting_keys_are_named(keys: tuple[str, ...], told: list[str]) -> None:
    found = list(contradictions(load_config(TrainConfig, QUICKSTART, keys)))
    assert len(found) == len(told)
    assert all(text.startswith(part) for text, part in zip(found, told, strict=True))


@pytest.mark.parametrize(
    "path",
    [path for path in (ROOT / "configs").glob("*.toml") if "[train]" in path.read_text()],
    ids=lambda path: path.stem,
)
def test_deadlines_of_the_shipped_configurations_are_consistent(path: Path) -> None:
    assert list(contradictions(load_config(TrainConfig, path))) == []
