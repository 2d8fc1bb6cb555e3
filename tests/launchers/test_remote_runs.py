"""Whole runs on a real vLLM server: training that outlives kill -9 of its engine, evaluation on a
server that somebody else has started."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from launchers import evaluate
from tests.engines.vllm_server import VLLMProcess, require_vllm
from tests.support.warehouse import ROOT

pytestmark = [pytest.mark.engine_vllm, pytest.mark.slow, pytest.mark.timeout(900)]

RUN = [
    "engine.name=vllm",
    "train.num_steps=5",
    "queue.groups_per_step=4",
    "learner.groups_per_minibatch=4",
    'sft.stages=[{rows="copy",num_steps=2}]',
    "sft.gate_every=2",
    "eval.sets.heldout.phases=false",
]


def rows_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.is_file() else []
    return [row for row in map(json.loads, lines) if "policy_version" in row]


def servers_below(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    """API servers of vLLM among the descendants, below their guards."""
    return [
        child
        for child in psutil.Process(process.pid).children(recursive=True)
        if "vllm.entrypoints.openai.api_server" in child.cmdline()[1:4]
    ]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose engine was killed after its first step."""
    require_vllm()
    folder = tmp_path_factory.mktemp("remote")
    config = ROOT / "tests" / "support" / "small_quickstart.toml"
    command = [sys.executable, str(ROOT / "launchers" / "train.py"), str(config)]
    with (
        (folder / "out").open("wb") as out,
        subprocess.Popen(
            [*command, *RUN, f"run.dir={folder}", "run.name=run"],
            stdout=out,
            stderr=out,
            cwd=ROOT,
        ) as training,
    ):
        try:
            while training.poll() is None and not rows_of(folder / "run"):
                time.sleep(0.05)
            killed = servers_below(training)
            for server in killed:
                server.kill()
            assert len(killed) == 1, (folder / "out").read_text()
            assert training.wait(800) == 0, (folder / "out").read_text()
        finally:
            training.kill()
    return folder / "run"


def test_kill_9_of_the_engine_costs_no_rollout(run: Path) -> None:
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    last = rows[-1]
    assert last["engine/retries"] > 0
    assert last["trees/failed"] == 0
    assert all(row["failed/trajectories"] == 0 for row in rows)
    assert last["trees/offered"] == last["trees/trained"] + last["trees/filtered"] == 20
    assert "died with status 137" in (run / "run.log").read_text()


def test_engine_and_learner_agree_before_and_after(run: Path) -> None:
    gaps = [
        row["parity/logprob_gap_max"] for row in rows_of(run) if "parity/logprob_gap_max" in row
    ]
    assert gaps
    assert max(gaps) < 1e-4


def test_no_server_is_left(run: Path) -> None:
    log = str(run)
    left = [
        p.pid for p in psutil.process_iter(["cmdline"]) if log in " ".join(p.info["cmdline"] or [])
    ]
    assert left == []


def test_evaluating_on_a_server_with_other_weights(run: Path, tmp_path: Path) -> None:
    """It loads the weights of the run, and greedy samples are those of the embedded engine."""
    server = VLLMProcess(run / "model", tmp_path / "server.log")
    try:
        server.wait_ready()
        found = {}
        for name, keys in (
            ("vllm", [f'engine.urls=["{server.url}"]']),
            ("embedded", ["engine.device=cpu"]),
        ):
            out = tmp_path / name
            arguments = [str(run), "--n", "8", "--out", str(out), f"engine.name={name}", *keys]
            assert evaluate.main([*arguments, "sampling.temperature=0"]) == 0
            lines = (out / "trajectories.jsonl").read_text().splitlines()
            found[name] = sorted(
                (row["task"], str(row["segments"])) for row in map(json.loads, lines)
            )
        assert len(found["vllm"]) == 8
        assert found["vllm"] == found["embedded"]
    finally:
        server.stop()
