"""Parquet of the schemas that are trained on, with invented questions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

Row = dict[str, Any]
# as the published files hold it: the \b of \boxed was read as a backspace
SYSTEM = "Think, search, and answer in \\[ \x08oxed{answer here} \\] with \x08oxed{}."


def arpo_rows(count: int, system: str = SYSTEM) -> list[Row]:
    """Rows of ARPO's schema, half of them mathematics."""
    return [
        {
            "data_source": "mix",
            "prompt": [
                {"content": system, "role": "system"},
                {"content": f"question {n}?", "role": "user"},
            ],
            "ability": "math" if n % 2 else "qa",
            "reward_model": {"ground_truth": f"gold {n}", "style": "rule"},
            "extra_info": {"index": n, "question": f"question {n}?", "split": "train"},
            "metadata": None,
        }
        for n in range(count)
    ]


def tool_star_rows(count: int) -> list[Row]:
    """Rows of Tool-Star's schema, which builds the prompt when it loads them."""
    return [
        {
            "data_source": "mix",
            "question": f"question {n}?",
            "ability": "qa",
            "reward_model": {"ground_truth": f"gold {n}", "style": "rule"},
            "extra_info": {"index": n, "split": "train"},
        }
        for n in range(count)
    ]


def write_parquet(path: Path, rows: list[Row]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_arrow(path: Path, rows: list[Row]) -> Path:
    """An Arrow stream, as `datasets` saves it."""
    table = pyarrow.Table.from_pylist(rows)
    with (
        pyarrow.OSFile(str(path), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    return path
