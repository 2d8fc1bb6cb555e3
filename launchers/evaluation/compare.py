"""Compares two evaluations question by question: `launchers/evaluate.py compare A B`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from agentenv.errors import DataError
from agentenv.shared import close_shared
from launchers.evaluation.comparison import (
    Difference,
    Pair,
    Pairing,
    by_dataset,
    changed,
    other_differences,
    pair_up,
)
from launchers.evaluation.figures import Question, questions_of
from launchers.evaluation.filled import keep_filled, num_filled
from launchers.evaluation.report import make_scorer, write_whole
from launchers.evaluation.scores import score_rows
from launchers.evaluation.store import load_saved, read_rows
from launchers.evaluation.tables import Table, as_rich, lines_of, markdown, number, plain
from launchers.exits import to_its_end
from launchers.view import View

MAX_LISTED = 30
MAX_CELL = 70


def main(argv: Sequence[str]) -> int:
    """Returns the exit code: 0 done, 1 failed with a reason, 2 bad input, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="launchers/evaluate.py compare",
        description="Compare two stored evaluations on the questions that both asked, in pairs.",
    )
    parser.add_argument("first", type=Path, metavar="A")
    parser.add_argument("second", type=Path, metavar="B")
    parser.add_argument("--out", type=Path, help="Markdown file with all questions that changed")
    arguments = parser.parse_args(argv)
    view = View()
    return to_its_end(
        lambda: asyncio.run(_run(arguments, view)), view, writing="writing the comparison"
    )


async def _run(arguments: argparse.Namespace, view: View) -> None:
    folders: tuple[Path, Path] = (arguments.first, arguments.second)
    scorer = make_scorer(view)
    sides: list[list[Question]] = []
    try:
        for folder in folders:
            load_saved(folder)
            rows = await asyncio.to_thread(read_rows, folder)
            if not rows:
                raise DataError(f"{folder} holds no rows of an evaluation")
            before = num_filled(rows)
            await score_rows(rows, scorer)
            if scorer.is_usual and num_filled(rows) > before:
                await asyncio.to_thread(keep_filled, folder, rows)
            sides.append(questions_of(rows))
        pairing = pair_up(*sides)
    finally:
        await close_shared()
    tables, left = tables_of(pairing, MAX_LISTED)
    say = paired_line(pairing)
    view.say(f"A = {folders[0]}, B = {folders[1]}")
    for table in tables:
        view.show(as_rich(table))
    if left:
        hint = "" if arguments.out else "; --out FILE lists all"
        view.say(f"and {left} questions more that changed{hint}")
    view.say(say)
    if arguments.out is not None:
        tables, _ = tables_of(pairing, len(pairing.pairs))
        head = f"# {markdown(str(folders[0]))} (A) against {markdown(str(folders[1]))} (B)"
        text = f"{head}\n\n{markdown(say)}\n\n{lines_of(tables)}"
        write_whole(arguments.out, text.encode("utf-8", "replace"))
        view.say(f"written to {arguments.out}")


def paired_line(pairing: Pairing) -> str:
    """What is compared, and what is not."""
    missing = [
        f"{count} {what}"
        for count, what in (
            (pairing.only_first, "only in A"),
            (pairing.only_second, "only in B"),
            (pairing.failed, "failed in one of them"),
        )
        if count
    ]
    rest = f"; left out: {', '.join(missing)}" if missing else "; none is left out"
    return f"{len(pairing.pairs)} questions are in both{rest}"


def tables_of(pairing: Pairing, max_listed: int) -> tuple[list[Table], int]:
    """Success, the other figures, the questions that changed; and how many of those are left."""
    success = [_row(name, one) for name, one in by_dataset(pairing)]
    other = [_row(one.name, one) for one in other_differences(pairing)]
    columns = ["questions", "n", "A", "B", "B - A [95 %]", "p", "test"]
    note = "95 % intervals by bootstrap over questions; p-values are two-sided and paired."
    tables = [
        Table(title="Success", columns=columns, rows=success, note=note),
        Table(title="Scores and cost", columns=["figure", *columns[1:]], rows=other),
    ]
    pairs = changed(pairing)
    shown = [*pairs[: max_listed - max_listed // 2], *pairs[-(max_listed // 2) :]]
    shown = pairs if len(pairs) <= max_listed else shown
    if pairs:
        lost = sum(pair.change < 0 for pair in pairs)
        tables.append(
            Table(
                title=f"Changed: {lost} worse and {len(pairs) - lost} better in B",
                columns=["question", "", "A", "B", "A answered", "B answered", "expected"],
                rows=[_changed_row(pair) for pair in shown],
                left=[0, 1, 4, 5, 6],
            )
        )
    return tables, len(pairs) - len(shown)


def _row(name: str, one: Difference) -> list[str]:
    p = "< 0.001" if one.p < 0.001 else f"{one.p:.3f}"
    interval = f"{one.difference:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"
    values = [number(one.first), number(one.second), interval, p, one.test]
    return [name, str(one.num_questions), *values]


def _changed_row(pair: Pair) -> list[str]:
    row = pair.first.rows[0]
    return [
        f"{row.dataset}/{row.task}",
        _cut(row.question),
        _right(pair.first),
        _right(pair.second),
        _cut(pair.first.done[0].prediction),
        _cut(pair.second.done[0].prediction),
        _cut(" | ".join(row.answers)),
    ]


def _right(question: Question) -> str:
    done = question.done
    return f"{sum(row.success for row in done)}/{len(done)}"


def _cut(text: str) -> str:
    text = " ".join(plain(text).split())
    return text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 3]}..."
