"""A tiny model learns a task of reasoning-gym: `make long PARTS=reasoning-gym`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def test_the_example_learns_sums(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym")
    command = [
        sys.executable, "-m", "agentenv.launchers", "train", "examples/reasoning_gym/train.toml",
    ]  # fmt: skip
    subprocess.run([*command, f"run.dir={tmp_path}"], cwd=ROOT, check=True, capture_output=True)
    success = json.loads((tmp_path / "reasoning_gym" / "summary.json").read_text())["success"]
    assert success["after_rl"] > max(success["after_sft"], 0.8)
