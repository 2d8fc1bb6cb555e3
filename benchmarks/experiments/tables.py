"""Tables in Markdown, and their place in the documentation."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentenv.base.disk import write_whole
from agentenv.base.errors import DataError

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
BEST = "against the best GRPO"
PICTURE = "![success against tool calls](img/algorithms.png)"
END = "<!-- end -->"


def tables_of(result: Row) -> str:
    """The results of each arm, and comparisons with the best GRPO and with "grpo"."""
    arms, levels = result["arms"], result["levels"]
    head = ["arm", "seeds", "updates", "success before", "after", "gain", "total calls"]
    rows = [
        [
            f"`{arm}`",
            str(len(row["seeds"])),
            str(row["updates"]),
            f"{row['before']:.2f}",
            f"{row['after']:.2f}",
            spread(row["gain"]),
            f"{row['calls']:,.0f}",
            *(_calls(row, level) for level in levels),
        ]
        for arm, row in arms.items()
    ]
    texts = [markdown([*head, *(f"calls to {level}" for level in levels)], rows)]
    rows = [_compared(arm, row, result) for arm, row in arms.items() if row.get(BEST)]
    if rows:
        names = [f"calls to {level}" for level in levels]
        names += [f"success at {budget}" for budget in result["budgets"]]
        texts.append(markdown(["compared with the best GRPO", "seeds", *names], rows))
    return "\n\n".join(texts)


def _calls(row: Row, level: float) -> str:
    missed = row[f"missed {level}"]
    note = f" ({missed} seeds never)" if missed else ""
    return f"{row[f'calls to {level}']:,.0f}{note}"


def _compared(arm: str, row: Row, result: Row) -> list[str]:
    found = row[BEST]
    names = [f"calls to {level}" for level in result["levels"]]
    names += [f"success at {budget}" for budget in result["budgets"]]
    count = max(figure["num_seeds"] for figure in found.values())
    return [f"`{arm}`", str(count), *(_cell(found.get(name)) for name in names)]


def _cell(figure: Row | None) -> str:
    if figure is None:
        return "-"
    base = f" of `{figure['base']}`" if "base" in figure else ""
    missed = f", {figure['num_missed']} missed" if figure["num_missed"] else ""
    return f"{spread(figure)}{base}{missed}"


def spread(figure: Row) -> str:
    """A figure with its 95 % interval, if it has one."""
    if figure["low"] is None:
        return f"{figure['value']:.2f}"
    return f"{figure['value']:.2f} [{figure['low']:.2f}, {figure['high']:.2f}]"


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """A table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def publish(result: Row, picture: Path) -> None:
    """Write the tables and the picture into the documentation. Raises DataError if their place is
    missing, or no GRPO arm has the seeds of ARPO."""
    if not result["arms"].get("arpo", {}).get(BEST):
        raise DataError("--publish needs the arm arpo, and a GRPO arm with all of its seeds")
    insert("algorithms.py --publish", f"{PICTURE}\n\n{tables_of(result)}")
    shutil.copy(picture, ROOT / "docs" / "img" / "algorithms.png")


def insert(command: str, text: str) -> None:
    """Write the results of a command into their place in the documentation, with the date. Raises
    DataError if their place is missing."""
    begin = f"<!-- benchmarks/experiments/{command}: begin -->"
    when, page = datetime.now(UTC).date().isoformat(), ROOT / "docs" / "experiments.md"
    section = f"{begin}\n\nOf {when}.\n\n{text}\n\n{END}"
    before, place = page.read_text(encoding="utf-8"), f"(?s){re.escape(begin)}.*?{re.escape(END)}"
    changed, count = re.subn(place, section.replace("\\", r"\\"), before)
    if count != 1:
        raise DataError(f"{page}: expected one place for the tables, found {count}")
    write_whole(page, changed.encode())
