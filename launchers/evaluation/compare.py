"""Compares two evaluations question by question: `launchers/evaluate.py compare A B`."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import numpy as np
from msgspec import Struct

from agentenv.disk import write_whole
from agentenv.env import close_shared
from agentenv.errors import DataError
from launchers.evaluation.figures import (
    SCORES,
    Question,
    bootstrap,
    mcnemar,
    pass_at_k,
    questions_of,
    sign_flip,
)
from launchers.evaluation.report import make_scorer
from launchers.evaluation.scores import score_rows
from launchers.evaluation.store import keep_filled, load_saved, num_filled, read_rows
from launchers.evaluation.tables import Table, as_rich, lines_of, markdown, number, plain
from launchers.terminal import View, to_its_end

# What differs between two evaluations of the same questions, and whether it is chance.

Value = Callable[[Question], float | None]
Test = Literal["McNemar", "sign flip"]


class Pair(Struct, frozen=True):
    """One question in both evaluations."""

    first: Question
    second: Question

    @property
    def dataset(self) -> str:
        return self.first.rows[0].dataset

    @property
    def change(self) -> float:
        """Share of right samples in the second, minus that in the first."""
        return (_success(self.second) or 0.0) - (_success(self.first) or 0.0)


class Pairing(Struct, kw_only=True):
    """The questions that can be compared, and how many cannot: those of one evaluation only, and
    those of which all samples failed in one of the two."""

    pairs: list[Pair]
    only_first: int
    only_second: int
    failed: int


class Difference(Struct, kw_only=True):
    """A mean over the shared questions in both, second minus first with its 95 % interval by
    bootstrap over questions, and the two-sided p-value of a paired test."""

    name: str
    num_questions: int
    first: float
    second: float
    difference: float
    low: float
    high: float
    p: float
    test: Test


def pair_up(first: Sequence[Question], second: Sequence[Question]) -> Pairing:
    """Pair questions by dataset and task. Raises DataError when nothing is shared, or when two of
    the same name ask something else."""
    others = {(one.rows[0].dataset, one.rows[0].task): one for one in second}
    pairs, failed, shared = [], 0, 0
    for question in first:
        row = question.rows[0]
        other = others.get((row.dataset, row.task))
        if other is None:
            continue
        shared += 1
        if other.rows[0].question != row.question:
            raise DataError(
                f"{row.dataset}, question {row.task} is not the same in both: "
                f"{row.question[:80]!r} and {other.rows[0].question[:80]!r}"
            )
        if question.done and other.done:
            pairs.append(Pair(question, other))
        else:
            failed += 1
    if not pairs:
        why = (
            f"all {shared} shared questions failed in one of them"
            if shared
            else (f"none is shared: the first has {_names(first)}, the second {_names(second)}")
        )
        raise DataError(f"there is no question to compare: {why}")
    only_first, only_second = len(first) - shared, len(second) - shared
    return Pairing(pairs=pairs, only_first=only_first, only_second=only_second, failed=failed)


def _names(questions: Sequence[Question]) -> str:
    names = sorted({question.rows[0].dataset for question in questions})
    return ", ".join(names[:8]) or "no questions"


def by_dataset(pairing: Pairing) -> list[tuple[str, Difference]]:
    """The difference in success of each dataset, and of all questions last."""
    names = list(dict.fromkeys(pair.dataset for pair in pairing.pairs))
    found = []
    for name in names if len(names) > 1 else ():
        own = [pair for pair in pairing.pairs if pair.dataset == name]
        found.append((name, difference("success", own, _success)))
    return [*found, ("all", difference("success", pairing.pairs, _success))]


def other_differences(pairing: Pairing) -> list[Difference]:
    """Scores, pass@k where there are several samples, and cost, of the questions that have them
    in both evaluations."""
    pairs = pairing.pairs
    values: dict[str, Value] = {name: _score(name) for name in SCORES}
    k = min(len(question.done) for pair in pairs for question in (pair.first, pair.second))
    if k > 1:
        values[f"pass@{k}"] = lambda question: pass_at_k(
            len(question.done), sum(row.success for row in question.done), k
        )
    values["tool calls"] = lambda question: fmean(len(row.tool_calls) for row in question.done)
    for name in ("action_tokens", "tool_tokens", "seconds"):
        values[name.replace("_", " ")] = _mean_of(name)
    found = []
    for name, value in values.items():
        own = [p for p in pairs if value(p.first) is not None and value(p.second) is not None]
        if own:
            found.append(difference(name, own, value))
    return found


def difference(name: str, pairs: Sequence[Pair], value: Value) -> Difference:
    """Of one figure. Single samples of success are tested by McNemar's exact test, all else by
    drawing the signs of the differences."""
    first = np.array([value(pair.first) or 0.0 for pair in pairs])
    second = np.array([value(pair.second) or 0.0 for pair in pairs])
    change = second - first
    interval = bootstrap(change[:, None], np.ones((len(pairs), 1)))[0]
    single = name == "success" and all(
        len(pair.first.done) == len(pair.second.done) == 1 for pair in pairs
    )
    test: Test = "McNemar" if single else "sign flip"
    p = (
        mcnemar(int((change < 0).sum()), int((change > 0).sum()))
        if single
        else sign_flip(change.tolist())
    )
    return Difference(
        name=name,
        num_questions=len(pairs),
        first=float(first.mean()),
        second=float(second.mean()),
        difference=float(change.mean()),
        low=float(interval[0]),
        high=float(interval[1]),
        p=p,
        test=test,
    )


def changed(pairing: Pairing) -> list[Pair]:
    """The questions whose share of right samples changed, the worst losses first."""
    return sorted((pair for pair in pairing.pairs if pair.change), key=lambda pair: pair.change)


def _success(question: Question) -> float | None:
    done = question.done
    return sum(row.success for row in done) / len(done) if done else None


def _score(name: str) -> Value:
    def value(question: Question) -> float | None:
        found = [row.scores[name] for row in question.done if name in row.scores]
        return fmean(found) if found else None

    return value


def _mean_of(name: str) -> Value:
    return lambda question: fmean(getattr(row, name) for row in question.done)


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
