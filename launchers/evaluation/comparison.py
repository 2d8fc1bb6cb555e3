"""What differs between two evaluations of the same questions, and whether it is chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Literal

import numpy as np
from msgspec import Struct

from agentenv.errors import DataError
from launchers.evaluation.figures import SCORES, Question
from launchers.evaluation.statistics import bootstrap, mcnemar, pass_at_k, sign_flip

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
