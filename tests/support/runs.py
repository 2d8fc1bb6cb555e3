"""The files of a run."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def trees_of(run: Path, step: int) -> list[int]:
    """The trees that a step trained."""
    path = run / "trajectories" / f"step-{step:06d}.jsonl"
    return sorted({json.loads(line)["tree"] for line in path.read_text().splitlines()})


def first_turns(run: Path) -> tuple[int, int]:
    """How many first turns entropy.csv counts, and how many the metrics of all steps do."""
    rows = csv.DictReader((run / "entropy.csv").read_text().splitlines())
    counted = {row["curve"]: int(row["turns"]) for row in rows if row["position"] == "0"}
    return counted["start"], sum(int(row.get("rollout/roots", 0)) for row in rows_of(run))
