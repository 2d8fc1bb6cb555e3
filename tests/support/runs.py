"""What a run has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows_of(run: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
