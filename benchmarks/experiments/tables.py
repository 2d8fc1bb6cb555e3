"""The tables of `algorithms.py` in Markdown, and their places in README and documentation."""

from __future__ import annotations

import re
import shutil
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from agentenv.disk import write_whole
from agentenv.errors import DataError

Row = dict[str, Any]

ROOT = Path(__file__).resolve().parents[2]
BEST = "against the best GRPO"
README_ROW = "| tool calls for the same success"
PICTURE = "![success against tool calls](img/algorithms.png)"
BEGIN, END = (
    "<!-- benchmarks/experiments/algorithms.py --publish: begin -->",
    "<!-- end -->",
)


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
    for base, title in ((BEST, "the best GRPO"), ("against grpo", "`grpo`")):
        rows = [_compared(arm, row, base, result) for arm, row in arms.items() if row.get(base)]
        if rows:
            names = [f"calls to {level}" for level in levels]
            names += [f"success at {budget}" for budget in result["budgets"]]
            texts.append(markdown([f"compared with {title}", "seeds", *names], rows))
    return "\n\n".join(texts)


def _calls(row: Row, level: float) -> str:
    missed = row[f"missed {level}"]
    note = f" ({missed} seeds never)" if missed else ""
    return f"{row[f'calls to {level}']:,.0f}{note}"


def _compared(arm: str, row: Row, base: str, result: Row) -> list[str]:
    found = row[base]
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


def readme_row(result: Row, when: str) -> str:
    """ARPO's calls divided by those of the GRPO arm that needs the fewest, for the README."""
    found = result["arms"]["arpo"][BEST]
    figures = []
    for level in result["levels"]:
        figure = found[f"calls to {level}"]
        missed = f" ({figure['num_missed']} seeds never)" if figure["num_missed"] else ""
        figures.append((f"{spread(figure)} to {level}{missed}", _group(figure["base"])))
    groups = sorted({group for _, group in figures})
    seeds = len(result["arms"]["arpo"]["seeds"])
    return (
        f"{README_ROW}, ARPO over the best GRPO (groups of 4 to 8); above 1, ARPO needs more | "
        f"{'; '.join(text for text, _ in figures)} (groups of {', '.join(groups)}) | "
        f"quick start, {seeds} seeds in pairs, {when} ([experiments](docs/experiments.md)) |"
    )


def _group(arm: str) -> str:
    return arm.partition("-")[2] or "8"


def publish(result: Row, picture: Path) -> None:
    """Write the tables, the picture and the README's row. Raises DataError if a place for them is
    missing, or no GRPO arm has the seeds of ARPO."""
    if not result["arms"].get("arpo", {}).get(BEST):
        raise DataError("--publish needs the arm arpo, and a GRPO arm with all of its seeds")
    when = datetime.now(UTC).date().isoformat()
    page, readme = ROOT / "docs" / "experiments.md", ROOT / "README.md"
    section = f"{BEGIN}\n\nOf {when}.\n\n{PICTURE}\n\n{tables_of(result)}\n\n{END}"
    pages = {
        page: (f"(?s){re.escape(BEGIN)}.*?{re.escape(END)}", section),
        readme: (f"(?m)^{re.escape(README_ROW)}.*$", readme_row(result, when)),
    }
    for path, (place, text) in pages.items():
        before = path.read_text(encoding="utf-8")
        changed, count = re.subn(place, text.replace("\\", r"\\"), before)
        if count != 1:
            raise DataError(f"{path}: expected one place for the tables, found {count}")
        write_whole(path, changed.encode())
    shutil.copy(picture, ROOT / "docs" / "img" / "algorithms.png")
