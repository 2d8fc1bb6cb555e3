"""Logs of examples/inspect_logs as their readers find them: in the viewer of Inspect and in Scout.
In .venv-inspect (sh .ci/inspect), since some of the packages it needs are older."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from agentenv.envs.quickstart.setup import build_tokenizer
from tests.support.example_tree import SECRET, write_run
from tests.support.snippets import ran
from tests.support.stored_evaluation import failed, row, write_evaluation

pytestmark = pytest.mark.inspect

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv-inspect" / "bin"

READ_LOG = """
import json, sys
from inspect_ai.log import read_eval_log

def span(one):
    return {"name": one.name, "from": one.branched_from, "branches": list(map(span, one.branches)),
            "events": [item.event.event for item in one.content]}

log = read_eval_log(sys.argv[1])
print(json.dumps([
    {"id": one.id, "epoch": one.epoch, "scores": {k: v.value for k, v in one.scores.items()},
     "messages": [m.role for m in one.messages], "metadata": one.metadata,
     "anchors": [e.anchor_id for e in one.events if e.event == "anchor"],
     "tree": span(one.timelines[0].root), "error": one.error and one.error.message}
    for one in log.samples]))
"""

READ_LOGS_IN_SCOUT = """
import asyncio, json, sys
from inspect_scout import transcripts_from

async def main():
    async with transcripts_from(sys.argv[1]).reader() as reader:
        print(json.dumps(sorted([one.transcript_id async for one in reader.index()])))

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("inspect") / "small", build_tokenizer(), True)


def run_command(*command: object) -> str:
    """The output of a command of .venv-inspect."""
    assert (BIN.parent / ".complete").is_file(), "make it first: sh .ci/inspect"
    return ran(*command, env={**os.environ, "PYTHONPATH": str(ROOT)}).stdout


def exported(run: Path, out: Path) -> Path:
    run_command(BIN / "python", "-m", "examples.inspect_logs", run, out)
    return out


def read(program: str, path: Path) -> Any:
    return json.loads(run_command(BIN / "python", "-c", program, path).splitlines()[-1])


def test_an_inspect_log_contains_the_tree_and_the_viewer_reads_it(
    run: Path, tmp_path: Path
) -> None:
    logs = exported(run, tmp_path / "logs")
    (sample,) = read(READ_LOG, logs / "step-000001.eval")
    assert sample["id"] == "tree-000003"
    assert sample["messages"] == ["user", "assistant", "tool", "assistant"]
    assert sample["metadata"]["fate"] == "trained"
    tree = sample["tree"]
    assert tree["name"] == "0 1"
    fresh, fork = tree["branches"]
    assert (fresh["name"], fork["name"]) == ("1 failed", "0.1+1 0")
    (deeper,) = fork["branches"]
    assert deeper["name"] == "0.1+1.2+1 0 turn_tokens"
    assert {fresh["from"], fork["from"], deeper["from"]} == set(sample["anchors"])
    events = [name for name in tree["events"] if name in ("model", "tool", "score")]
    assert events == ["model", "tool", "model", "score"]
    run_command(
        BIN / "inspect", "view", "bundle", "--log-dir", logs, "--output-dir", tmp_path / "site"
    )
    assert (tmp_path / "site" / "index.html").is_file()
    listing = json.loads((tmp_path / "site" / "logs" / "listing.json").read_text())
    assert list(listing) == ["step-000001.eval"]
    assert read(READ_LOGS_IN_SCOUT, logs) == ["tree-000003-1"]


def test_all_steps_and_sets_are_written(run: Path, tmp_path: Path) -> None:
    (run / "trees" / "step-000003.frames").touch()  # empty after a kill: skipped
    logs = exported(run, tmp_path / "logs")
    assert [one.name for one in sorted(logs.iterdir())] == ["step-000001.eval"]
    (sample,) = read(READ_LOG, logs / "step-000001.eval")
    assert SECRET not in json.dumps(sample)
    rows = [row(task, n, dataset=name) for name in "ab" for task in ("1", "2") for n in (0, 1)]
    rows[0] = failed("1", 0)
    rows[0].dataset = "a"
    sets = exported(write_evaluation(tmp_path / "e", rows), tmp_path / "sets")
    assert [one.name for one in sorted(sets.iterdir())] == ["a.eval", "b.eval"]
    found = read(READ_LOG, sets / "a.eval")
    epochs = sorted((one["id"], one["epoch"], one["error"]) for one in found)
    failed_one, *others = epochs
    assert failed_one == ("1", 1, "EngineError: down")
    assert others == [("1", 2, None), ("2", 1, None), ("2", 2, None)]
