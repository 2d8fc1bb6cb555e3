"""The quick start cut down to two kinds of question, for a training run of under a minute."""

from __future__ import annotations

import json
from pathlib import Path

from agentenv.envs.quickstart.setup import build_model, write_data

KINDS = ("calc", "hop")


def prepare(run: Path, seed: int) -> None:
    """Model and data as of the quick start, without the rows of other kinds."""
    write_data(run / "data", seed)
    build_model(run / "model", seed)
    for path in (run / "data").glob("*.jsonl"):
        if path.stem == "kb":
            continue
        rows = path.read_text(encoding="utf-8").splitlines(keepends=True)
        kept = [row for row in rows if json.loads(row)["kind"] in (*KINDS, "copy")]
        path.write_text("".join(kept), encoding="utf-8")
