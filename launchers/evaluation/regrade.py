"""Grades a stored evaluation again: `launchers/evaluate.py regrade DIR [grader.key=value ...]`.

DIR/rows.jsonl is replaced at once, what it held is kept in rows.before.jsonl; DIR/config.json gets
the new grader, regrade.md lists what changed, and the report is written anew.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agentenv.config import Tree, apply_overrides, build_config, to_plain
from agentenv.errors import ConfigError
from agentenv.shared import close_shared
from launchers.assembly import import_from_working_directory
from launchers.evaluation.lock import lock
from launchers.evaluation.regrading import Change, Graders, regrade_rows, resolver
from launchers.evaluation.report import make_scorer, report_rows, write_whole
from launchers.evaluation.rows import EvalRow
from launchers.evaluation.run_config import EvaluateConfig
from launchers.evaluation.store import (
    CONFIG_FILE,
    ROWS_FILE,
    Saved,
    load_saved,
    read_rows,
    replace_rows,
)
from launchers.evaluation.tables import Table, as_markdown, as_rich, plain
from launchers.exits import to_its_end
from launchers.view import View

BEFORE_FILE, CHANGES_FILE = "rows.before.jsonl", "regrade.md"
MAX_LISTED = 40
MAX_CELL = 60


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="launchers/evaluate.py regrade",
        description="Grade the stored trajectories of an evaluation again, without generating.",
        epilog="grader.kind=KIND starts from that kind's defaults; other grader.key=value change "
        "the grader that the evaluation had; sets.NAME.grader.key=value that of one set. Without "
        "any, the same grader grades again.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("overrides", nargs="*", default=[], metavar="grader.key=value")
    arguments = parser.parse_args(argv)
    import_from_working_directory()
    view = View()
    return to_its_end(
        lambda: asyncio.run(_run(arguments, view)), view, writing="writing the grades"
    )


async def _run(arguments: argparse.Namespace, view: View) -> None:
    folder: Path = arguments.folder
    saved = load_saved(folder)
    tree = regraded_config(saved.config, arguments.overrides)
    config = build_config(EvaluateConfig, tree, str(folder / CONFIG_FILE))
    try:
        with lock(folder):
            rows = await asyncio.to_thread(read_rows, folder)
            scorer = make_scorer(view)
            changes = await regrade_rows(rows, Graders(config, resolver(saved.run)))
            after = [change.after for change in changes]
            _show(changes, folder, view)
            await report_rows(folder, after, scorer, view)  # fills in the scores, too
            replace_rows(folder, after, BEFORE_FILE)
            new = Saved(subject=saved.subject, run=saved.run, config=to_plain(config))
            data = msgspec.json.format(msgspec.json.encode(new), indent=2)
            write_whole(folder / CONFIG_FILE, data + b"\n")
    finally:
        await close_shared()
    view.say(f"{folder / ROWS_FILE} is graded anew; what it held is in {BEFORE_FILE}")


def regraded_config(config: Tree, overrides: Sequence[str]) -> Tree:
    """The configuration with other graders. `grader.` keys hold for every set, and for what
    environments the rows of a set choose; `sets.NAME.grader.` ones for that set."""
    tree = copy.deepcopy(config)
    for override in overrides:
        start, is_grader, _ = override.partition("=")[0].strip().rpartition("grader.")
        name = start.removeprefix("sets.").removesuffix(".")  # which may have dots
        if "=" not in override or not is_grader or (start and start == name):
            raise ConfigError(
                f"{override!r}: regrading takes grader.key=value and sets.NAME.grader.key=value"
            )
        if start and name not in tree["sets"]:
            raise ConfigError(f"{override!r}: the sets are {sorted(tree['sets'])}")
    places = {"grader.": [tree, *tree["sets"].values()]}
    places |= {f"sets.{name}.grader.": [one] for name, one in tree["sets"].items()}
    for start, found in places.items():
        asked = [text.removeprefix(start) for text in overrides if text.startswith(start)]
        for place in found:
            _override(place, asked)
    return tree


def _override(place: Tree, asked: Sequence[str]) -> None:
    """Change the grader of a table and of the variants of its environment."""
    if not asked:
        return
    variants = (place.get("env") or {}).get("variants") or {}
    chosen = any(text.partition("=")[0].strip() == "kind" for text in asked)
    for table in [place, *(one for one in variants.values() if one.get("grader") is not None)]:
        grader = {} if chosen else dict(table.get("grader") or {})
        apply_overrides(grader, asked)
        table["grader"] = grader


def changes_table(changes: Sequence[Change]) -> Table:
    """What changed, right to wrong first."""
    flipped = [change for change in changes if change.flipped]
    moves = Counter((_verdict(one), _verdict(two)) for one, two in flipped)
    rewards = sum(one.reward != two.reward for one, two in changes)
    told = ", ".join(f"{count} {one} -> {two}" for (one, two), count in sorted(moves.items()))
    flipped.sort(key=lambda change: (_verdict(change.after), change.after.key))
    return Table(
        title=f"{len(flipped)} of {len(changes)} verdicts changed" + (f": {told}" if told else ""),
        columns=["trajectory", "expected", "answered", "before", "after", "why"],
        rows=[
            [
                "/".join(map(str, after.key)),
                _cut(" | ".join(after.answers)),
                _cut(after.prediction),
                _verdict(before),
                _verdict(after),
                _cut(after.error or after.reason),
            ]
            for before, after in flipped
        ],
        note=f"{rewards} rewards changed.",
        left=list(range(6)),
    )


def _show(changes: Sequence[Change], folder: Path, view: View) -> None:
    table = changes_table(changes)
    write_whole(folder / CHANGES_FILE, as_markdown(table).encode("utf-8", "replace"))
    if not table.rows:
        view.say(f"{table.title}; {table.note}")
        return
    listed = msgspec.structs.replace(table, rows=table.rows[:MAX_LISTED])
    view.show(as_rich(listed))
    if table.rows[MAX_LISTED:]:
        left = len(table.rows) - MAX_LISTED
        view.say(f"and {left} more, in {folder / CHANGES_FILE}")


def _verdict(row: EvalRow) -> str:
    return "failed" if row.end == "failed" else "right" if row.success else "wrong"


def _cut(text: str) -> str:
    text = " ".join(plain(text).split())
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}..."
