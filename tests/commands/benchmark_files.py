"""Files of benchmarks as tests write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentenv.assembly.keys.benchmarks import load_benchmark
from agentenv.base.types import Task
from tests.support.json_files import write_rows
from tests.support.xbench import encrypt

CANARY = "a-canary:0123-4567"
Row = dict[str, Any]


def load(tmp_path: Path, name: str, *rows: Row, **keys: Any) -> list[Task]:
    return load_benchmark(name, write_rows(tmp_path / "rows.jsonl", rows), **keys)


def encrypted(question: str, answer: str, number: int) -> Row:
    """A row as xBench is published."""
    return {
        "id": f"x{number}",
        "prompt": encrypt(question, CANARY),
        "answer": encrypt(answer, CANARY),
        "reference_steps": encrypt("steps", CANARY),
        "canary": CANARY,
    }
