"""A whole run under the virtual clock: real parts but for a rank that computes nothing. The same
seed makes the same trees to the bit, and hours of tools cost a second."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from agentenv.config import load_config
from agentenv.journal import Finished, Frame, Trained, read_frames
from agentenv.tools import FunctionTool
from agentenv.types import ToolResult
from agentenv.virtual_clock import run_virtual
from launchers.config import TrainConfig
from launchers.rl.recorder import Recorder
from launchers.rl.training import Training
from launchers.rundir import RunDirectory
from launchers.terminal import View
from tests.support.runs import rows_of
from tests.support.toy_rank import ToyRank, toy_ranks

pytestmark = pytest.mark.slow

KEYS = [
    *("engine.latency_s=1.5", "engine.tokens_per_s=20", "queue.max_staleness=2"),
    *("eval.sets.a.path={here}/a.jsonl", "eval.sets.a.every=2", "eval.sets.a.max_tasks=3"),
    *("checkpoint.every=1", "checkpoint.minutes=30", "journal.sync_s=5"),
    'eval.engine={name="scripted",script="tests.support.warehouse:warehouse_turn",latency_s=40}',
]
OF_THIS_PROCESS = ("cpu_s", "lag_", "stalled", "env/")  # which other tests used before


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An update takes five minutes; a tool a second, or a hundred."""
    seconds = {"Update": 300.0, "WriteModel": 20.0}
    monkeypatch.setattr(ToyRank, "at", staticmethod(seconds.get))
    monkeypatch.setattr(Recorder, "draw", lambda self: [])
    call = FunctionTool.call

    async def calling(tool: FunctionTool, arguments: Any, state: Any) -> ToolResult:
        await asyncio.sleep(Random(f"{arguments}").paretovariate(1.1))
        return await call(tool, arguments, state)

    monkeypatch.setattr(FunctionTool, "call", calling)
    with toy_ranks():
        yield


def finished_run(warehouse: Path, name: str, *overrides: str) -> Path:
    keys = [key.replace("{here}", str(warehouse.parent)) for key in KEYS]
    config = load_config(TrainConfig, warehouse, [*keys, f"run.name={name}", *overrides])
    run = RunDirectory(Path(config.run.dir) / name, resume=False, settings={})
    run_virtual(Training(config, run, View(), resume="").run_all())
    run.close()
    return run.path


def frames(run: Path) -> list[Frame]:
    paths = sorted((run / "journal").glob("*.frames"))
    return [frame for path in paths for _, frame in read_frames(path.read_bytes())]


def measured(run: Path) -> list[dict[str, Any]]:
    """Rows of metrics, but for what they say of this process."""
    return [
        {key: value for key, value in row.items() if not any(x in key for x in OF_THIS_PROCESS)}
        for row in rows_of(run)
    ]


def test_equal_seeds_make_equal_trees(warehouse: Path) -> None:
    first, second = (finished_run(warehouse, name) for name in ("virtual-1", "virtual-2"))
    written = frames(first)
    assert {type(frame) for frame in written} >= {Finished, Trained}
    assert written == frames(second), "tokens, log-probs, versions, times and order of all trees"
    assert measured(first) == measured(second)
    for left, right in zip(*(sorted(run.rglob("*.jsonl")) for run in (first, second)), strict=True):
        if left.name != "metrics.jsonl":
            assert left.read_bytes() == right.read_bytes(), left.name
    assert json.loads((first / "summary.json").read_text())["wall_s"]["rl"] > 4 * 300
