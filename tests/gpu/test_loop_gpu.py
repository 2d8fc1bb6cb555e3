"""The whole loop on one GPU: `python -m pytest tests/gpu -s`. Without one, on the CPU.

Cold start, rollouts on the embedded engine, updates, published weights, a checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentenv.launchers import train
from tests.gpu.place import DEVICE
from tests.support.warehouse import ROOT

pytestmark = pytest.mark.gpu

KEYS = [
    "train.num_steps=2", "queue.groups_per_step=4", "learner.groups_per_minibatch=4",
    "algorithm.group_size=4", 'sft.stages=[{rows="mixed",num_steps=60}]', "sft.gate_every=60",
    "eval.sets.heldout.phases=false",
]  # fmt: skip


def test_engine_and_learner_agree_after_two_updates(tmp_path: Path) -> None:
    config = str(ROOT / "tests" / "support" / "small_quickstart.toml")
    keys = [*KEYS, f"engine.device={DEVICE}", f"run.dir={tmp_path}", "run.name=run"]
    assert train.main([config, *keys]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "policy_version" in row]
    assert [row["policy_version"] for row in rows] == [2, 3]
    gaps = [row["parity/logprob_gap_max"] for row in rows if "parity/logprob_gap_max" in row]
    print(f"largest gap between engine and learner on {DEVICE}: {max(gaps):.1e} nats")
    assert max(gaps) < 1e-3
    assert (tmp_path / "run" / "checkpoints").is_dir()
