"""Compares two evaluations question by question, with paired tests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from msgspec import Struct

from agentenv.assembly.run.tables import Table, lines_of, markdown, number, short
from agentenv.assembly.run.terminal import View
from agentenv.base.disk import write_whole
from agentenv.base.errors import DataError
from agentenv.contract.env import close_shared
from agentenv.data.file_formats import of_both_ends
from agentenv.evaluation import figures, statistics
from agentenv.evaluation.scores import make_scorer, score_rows, stored_rows


class QuestionPair(Struct, frozen=True):
    """One question in both evaluations."""

    first: figures.QuestionRows
    second: figures.QuestionRows

    @property
    def change(self) -> float:
        """Share of correct samples in the second, minus that in the first."""
        return success(self.second) - success(self.first)


class Pairing(Struct, kw_only=True):
    """`pairs`: the questions to compare. `only_first`, `only_second`: number of questions in only
    one evaluation. `lost`: the questions whose samples all failed in one of the two."""

    pairs: list[QuestionPair]
    only_first: int
    only_second: int
    lost: list[QuestionPair]


class Difference(Struct, kw_only=True):
    """The means of a figure over the shared questions, their difference (second minus first) with
    its 95 % interval, and the two-sided p-value of a paired test. There is no interval if the
    figure is not a share and all questions differ by the same amount."""

    name: str
    num_questions: int
    first: float
    second: float
    difference: float
    low: float | None
    high: float | None
    p: float
    test: Literal["McNemar", "sign flip"]


def pair_up(
    first: Sequence[figures.QuestionRows], second: Sequence[figures.QuestionRows]
) -> Pairing:
    """Pair questions by dataset and task. Raises DataError if no question is shared, or if the two
    evaluations have different questions under the same name."""
    others = {(one.rows[0].dataset, one.rows[0].task): one for one in second}
    pairs: list[QuestionPair] = []
    lost: list[QuestionPair] = []
    for question in first:
        row = question.rows[0]
        other = others.get((row.dataset, row.task))
        if other is None:
            continue
        if other.rows[0].question != row.question:
            raise DataError(
                f"{row.dataset}, question {row.task} differs between the two: "
                f"{row.question[:80]!r} and {other.rows[0].question[:80]!r}"
            )
        can_compare = question.done and other.done
        (pairs if can_compare else lost).append(QuestionPair(question, other))
    shared = len(pairs) + len(lost)
    if not pairs:
        why = f"they share no set: the first has {_names(first)}, the second {_names(second)}"
        if lost:
            why = f"all {shared} shared questions failed in one of them"
        raise DataError(f"no questions to compare: {why}")
    only_first, only_second = len(first) - shared, len(second) - shared
    return Pairing(pairs=pairs, only_first=only_first, only_second=only_second, lost=lost)


def _names(questions: Sequence[figures.QuestionRows]) -> str:
    names = sorted({question.rows[0].dataset for question in questions})
    return ", ".join(names[:8]) or "no questions"


def success(question: figures.QuestionRows) -> float:
    """Share of correct samples."""
    return figures.ratios(question, ())["success"][0]


def groups_of(pairs: Sequence[QuestionPair]) -> list[tuple[str, list[QuestionPair]]]:
    """(name, pairs) of each dataset and of each kind of question, as in reports; all pairs last."""
    found = figures.by_group(pairs, lambda pair: pair.first.rows[0])
    datasets = found["dataset"].items() if len(found["dataset"]) > 1 else ()
    return [*datasets, *found.get("kind", {}).items(), ("all", list(pairs))]


def success_by_group(pairing: Pairing) -> list[tuple[str, Difference]]:
    """The difference in success of each group."""
    groups = groups_of(pairing.pairs)
    return [(name, one) for name, own in groups for one in differences(own, ["success"])]


def other_differences(pairing: Pairing) -> list[Difference]:
    """Differences in scores, pass@k (with several samples) and cost."""
    pairs = pairing.pairs
    k = min(len(question.done) for pair in pairs for question in (pair.first, pair.second))
    names = [*figures.SCORES, *([f"pass@{k}"] if k > 1 else [])]
    return list(differences(pairs, [*names, "tool_calls", *figures.COSTS], k))


def differences(
    pairs: Sequence[QuestionPair], names: Sequence[str], k: int = 1
) -> Iterator[Difference]:
    """The differences of figures, each over the questions that have it in both evaluations. The
    test is McNemar's exact test for the success of single samples, else a sign-flip permutation
    test."""
    values = [
        (figures.ratios(pair.first, (k,)), figures.ratios(pair.second, (k,))) for pair in pairs
    ]
    counts = [(len(pair.first.done), len(pair.second.done)) for pair in pairs]
    for name in names:
        both = [(one[name], other[name]) for one, other in values]
        known = np.array([bool(has and too) for (_, has), (_, too) in both])
        if not known.any():
            continue
        first, second = np.array([[one[0], other[0]] for one, other in both])[known].T
        change = second - first
        found: statistics.Floats | None = statistics.ratio(change)
        if figures.is_share(name):
            samples = np.array([min(one) for one in counts], float)[known]
            samples = statistics.independent_samples(name, samples)
            found = statistics.difference(first, second, samples)
        single = name == "success" and all(one == (1, 1) for one in counts)
        worse, better = int((change < 0).sum()), int((change > 0).sum())
        yield Difference(
            name=name.replace("_", " "),
            num_questions=len(change),
            first=float(first.mean()),
            second=float(second.mean()),
            difference=float(change.mean()),
            low=None if found is None else float(found[0]),
            high=None if found is None else float(found[1]),
            p=statistics.mcnemar(worse, better) if single else statistics.sign_flip(change),
            test="McNemar" if single else "sign flip",
        )


class FailedSamples(Struct, frozen=True):
    """The failures of some questions in one evaluation: number of failed samples and of all
    samples, and the mean success over questions if failed samples were wrong."""

    num_failed: int
    num_samples: int
    success_if_wrong: float


def failed_of(questions: Sequence[figures.QuestionRows]) -> FailedSamples:
    """The failures, which `success` excludes."""
    num_samples = sum(len(one.rows) for one in questions)
    num_done = sum(len(one.done) for one in questions)
    return FailedSamples(num_samples - num_done, num_samples, figures.success_if_wrong(questions))


def changed(pairing: Pairing) -> list[QuestionPair]:
    """The questions whose share of correct samples changed, the worst losses first."""
    return sorted((pair for pair in pairing.pairs if pair.change), key=lambda pair: pair.change)


MAX_LISTED = 30
MAX_CELL = 70


async def compare(first: Path, second: Path, out: Path | None, view: View) -> None:
    """Score the rows of both with one scorer and show the differences. `out`: a Markdown file for
    all changed questions. Raises DataError if the two share no question."""
    scorer = make_scorer(view.log)
    sides: list[list[figures.QuestionRows]] = []
    try:
        for folder in (first, second):
            async with stored_rows(folder, scorer) as rows:
                await score_rows(rows, scorer)
            sides.append(figures.questions_of(rows))
        pairing = pair_up(*sides)
    finally:
        await close_shared()
    tables, left = tables_of(pairing, MAX_LISTED // 2)
    counts = {"only in A": pairing.only_first, "only in B": pairing.only_second}
    counts["failed in one of them"] = len(pairing.lost)
    missing = [f"{count} {where}" for where, count in counts.items() if count]
    rest = f"; left out: {', '.join(missing)}" if missing else "; none is left out"
    paired = f"{len(pairing.pairs)} questions are in both{rest}"
    view.log(f"A = {first}, B = {second}")
    for table in tables:
        view.show(table)
    if left:
        view.log(f"and {left} more changed questions{'' if out else '; --out FILE lists all'}")
    view.log(paired)
    if out is not None:
        tables, _ = tables_of(pairing, 0)
        head = f"# {markdown(str(first))} (A) against {markdown(str(second))} (B)"
        text = f"{head}\n\n{markdown(paired)}\n\n{lines_of(tables)}"
        write_whole(out, text.encode("utf-8", "replace"))
        view.log(f"wrote {out}")


def tables_of(pairing: Pairing, ends: int) -> tuple[list[Table], int]:
    """Tables of success, other figures, and changed questions, of which the first and the last
    `ends` are listed, or all for 0; and the number of those that are not."""
    success = [_row(name, one) for name, one in success_by_group(pairing)]
    other = [_row(one.name, one) for one in other_differences(pairing)]
    columns = ["questions", "n", "A", "B", "B - A [95 %]", "p", "test"]
    note = "95 % intervals are over questions; p-values are two-sided and paired."
    tables = [Table(title="Success", columns=columns, rows=success, note=note)]
    tables += _failed_table(pairing)
    tables += [Table(title="Scores and cost", columns=["figure", *columns[1:]], rows=other)]
    pairs = changed(pairing)
    shown = [*of_both_ends(pairs, ends)]
    if pairs:
        lost = sum(pair.change < 0 for pair in pairs)
        title = f"Changed: {lost} worse and {len(pairs) - lost} better in B"
        columns = ["question", "", "A", "B", "A answered", "B answered", "expected"]
        rows = [_changed_row(pair) for pair in shown]
        tables.append(Table(title=title, columns=columns, rows=rows, left=[0, 1, 4, 5, 6]))
    return tables, len(pairs) - len(shown)


def _row(name: str, one: Difference) -> list[str]:
    p = "<0.001" if one.p < 0.001 else f"{one.p:.3f}"
    interval = f"{one.difference:+.3f}"
    if one.low is not None:
        interval += f" [{one.low:+.3f}, {one.high:+.3f}]"
    values = [number(one.first), number(one.second), interval, p, one.test]
    return [name, str(one.num_questions), *values]


def _failed_table(pairing: Pairing) -> list[Table]:
    """A table of failures over all shared questions, which success excludes; empty without
    failures."""
    rows, has_failed = [], False
    for name, pairs in groups_of([*pairing.pairs, *pairing.lost]):
        sides = [failed_of([one.first for one in pairs]), failed_of([one.second for one in pairs])]
        has_failed = has_failed or any(one.num_failed for one in sides)
        shares = [
            f"{one.num_failed} of {one.num_samples} ({one.num_failed / one.num_samples:.1%})"
            for one in sides
        ]
        rows.append([name, *shares, *(number(one.success_if_wrong) for one in sides)])
    title = "Failed trajectories, and success if all of them were wrong"
    columns = ["questions", "A failed", "B failed", "A, at least", "B, at least"]
    return [Table(title=title, columns=columns, rows=rows)] if has_failed else []


def _changed_row(pair: QuestionPair) -> list[str]:
    row, answers = pair.first.rows[0], [one.done[0].prediction for one in (pair.first, pair.second)]
    texts = [short(text, MAX_CELL) for text in (row.question, *answers, " | ".join(row.answers))]
    name = f"{row.dataset}/{row.task}"
    return [name, texts[0], _right(pair.first), _right(pair.second), *texts[1:]]


def _right(question: figures.QuestionRows) -> str:
    done = question.done
    return f"{sum(row.success for row in done)}/{len(done)}"
