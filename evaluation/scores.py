"""Scores of stored trajectories: em, f1, contains, rule, math, judge, each in [0, 1].

em        equal to a gold after normalizing (numbers as numbers)
f1        SQuAD token F1
contains  the prediction contains the words of a gold in sequence (`acc` of the published code)
rule      the layered grader's verdict: text, numbers, units, dates, lists, words, math-verify
math      the same, only for mathematics
judge     accepted by an LLM judge, of the answers that it was asked about

With several golds, the best score counts. With `compat = "reference"`, em, f1, contains and math
follow the published evaluation of ARPO and Tool-Star, except that the best gold counts.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from agentenv.assembly.keys.benchmarks import benchmark_of
from agentenv.assembly.reports.records import FAILED, EvalRow, judge_parts, prediction, whole_text
from agentenv.base.installation import install_hint
from agentenv.base.offload import in_thread
from agentenv.envs.grading.layers import Layered, compare
from agentenv.envs.grading.text import MAX_ANSWER_CHARS, clean, squashed, words_of
from agentenv.envs.grading.verdict import same_answer
from agentenv.envs.grading.words import f1, has_cjk, is_wordy
from agentenv.evaluation.store import keep_scores, load_rows

T = TypeVar("T")
R = TypeVar("R")
Compat = Literal["", "reference"]

CONCURRENCY = 64  # rows


class Scorer:
    """Computes the scores of rows. Without `math` (math-verify), expressions that differ as text
    count as different."""

    def __init__(self, *, compat: Compat = "", math: bool = True) -> None:
        self.compat = compat
        self.is_usual = not compat and math  # of the kind that evaluations store
        self.layered = {ordered: Layered(math=math, ordered=ordered) for ordered in (False, True)}

    async def score(self, row: EvalRow) -> dict[str, float]:
        """All scores of a row that did not fail, none without an answer. Raises GraderError if
        math-verify cannot run."""
        if not row.answers:
            return {}
        if self.compat:
            return _reference_scores(row)
        answer = row.prediction or prediction(row)
        scores = text_scores(answer, row.answers)
        known = benchmark_of(row.metadata)
        ordered = known is not None and known.ordered
        rule = float(await self.equal(answer, row.answers, row.question, ordered=ordered))
        scores["rule"] = rule
        if is_math(row):
            scores["math"] = rule
        return scores

    async def equal(
        self, answer: str, golds: Sequence[str], question: str = "", *, ordered: bool = False
    ) -> bool:
        """Whether the layered grader accepts the answer."""
        return (await self.layered[ordered].verdict(question, answer, golds)).right


async def for_each(work: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
    """The results of `work` for all items, in order, CONCURRENCY at a time."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def one(item: T) -> R:
        async with slots:
            return await work(item)

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(item)) for item in items]
    return [task.result() for task in running]


async def score_rows(rows: Sequence[EvalRow], scorer: Scorer) -> None:
    """Compute `scores` of the rows that did not fail and have none yet; with `compat`, of all rows
    that did not fail: stored scores are without it."""

    async def one(row: EvalRow) -> None:
        row.scores = await scorer.score(row)

    done = [row for row in rows if row.end != FAILED]
    await for_each(one, [row for row in done if scorer.compat or "em" not in row.scores])
    for row in done:
        row.scores.pop("judge", None)
        if found := judge_parts(row):
            row.scores["judge"] = float(found.get("judge", 0.0) >= 1)


def make_scorer(report: Callable[[str], None], compat: Compat = "") -> Scorer:
    """A scorer, with math-verify if it is installed."""
    math = importlib.util.find_spec("math_verify") is not None
    if not math:
        report(
            f"math-verify is not installed ({install_hint('math')}): expressions are compared as "
            "text"
        )
    return Scorer(compat=compat, math=math)


@asynccontextmanager
async def stored_rows(folder: Path, scorer: Scorer) -> AsyncIterator[list[EvalRow]]:
    """The rows of an evaluation. On exit, store new scores in the evaluation, so that no answer is
    scored twice. Raises DataError without rows."""
    rows = await in_thread(load_rows, folder)
    has_new = any("em" not in row.scores for row in rows if row.answers and row.end != FAILED)
    yield rows
    if scorer.is_usual and has_new:
        await in_thread(keep_scores, folder, rows)


def text_scores(answer: str, golds: Sequence[str]) -> dict[str, float]:
    """em, f1 and contains, the best over the golds; 0 for an overlong answer. An exact match (72
    equals 72.0) scores 1 in all three."""
    if len(answer) > MAX_ANSWER_CHARS:
        return {"em": 0.0, "f1": 0.0, "contains": 0.0}
    if any(same_answer(answer, gold) for gold in golds):
        return {"em": 1.0, "f1": 1.0, "contains": 1.0}
    return {
        "em": 0.0,
        "f1": max((f1(answer, gold) for gold in golds), default=0.0),
        "contains": float(any(contains(answer, gold) for gold in golds)),
    }


def contains(answer: str, gold: str) -> bool:
    """Whether the answer contains the words of the gold in sequence; Chinese, Japanese and Korean
    text by characters."""
    found, wanted = words_of(answer), words_of(gold)
    if not wanted:
        return answer.strip() == gold.strip()
    return wanted in found if has_cjk(gold) else f" {wanted} " in f" {found} "


def is_math(row: EvalRow) -> bool:
    """Whether the question is mathematics: by its benchmark, else if no gold consists of words."""
    known = benchmark_of(row.metadata)
    if known is not None:
        return known.kind == "math"
    return bool(row.answers) and not any(is_wordy(clean(gold)) for gold in row.answers)


def _reference_scores(row: EvalRow) -> dict[str, float]:
    from agentenv.reference.grading import reference_extract, reference_metrics

    found = reference_extract(whole_text(row)) if row.segments else row.prediction
    task = "math" if is_math(row) else "qa"
    each = [reference_metrics(task, found, gold) for gold in row.answers]
    names = {"em": "em", "f1": "f1", "contains": "acc", "rule": "math_equal"}
    scores = {
        name: max((one.get(key, 0.0) for one in each), default=0.0) for name, key in names.items()
    }
    return {**scores, "math": scores["rule"]} if task == "math" else scores


# The vote of maj@k: groups of samples with the same answer.

MAX_EXPRESSIONS = 4  # number of most frequent answers to compare others with by math-verify


class Votes(NamedTuple):
    """Finished samples of one question: number of correct ones, number for each wrong answer in
    descending order, and number without an answer."""

    num_right: int
    wrong: tuple[int, ...]
    num_blank: int


async def count_votes(rows: Sequence[EvalRow], scorer: Scorer) -> Votes:
    """Count the answers of one question. All correct samples count as the same answer; wrong ones
    are the same if the layered grader accepts one as the other. An expression is compared only with
    the few most frequent ones, which decide a vote."""
    wrong = [row.prediction for row in rows if not row.success and row.prediction.strip()]
    num_right, groups = sum(row.success for row in rows), dict[str, int]()
    for text, number in Counter(map(_form, wrong)).most_common():
        same = await _same(text, [*groups], scorer)
        groups[same] = groups.get(same, 0) + number
    counts = tuple(sorted(groups.values(), reverse=True))
    return Votes(num_right, counts, len(rows) - num_right - len(wrong))


async def _same(text: str, known: Sequence[str], scorer: Scorer) -> str:
    """The known answer that equals `text`; if there is none, `text`."""
    undecided = []
    for other in known:
        same, _ = compare(text, other)
        if same:
            return other
        if same is None:
            undecided.append(other)
        await asyncio.sleep(0)  # a comparison takes up to a millisecond: yield to other tasks
    for other in undecided[:MAX_EXPRESSIONS]:
        if await scorer.equal(text, [other]):
            return other
    return text


def _form(text: str) -> str:
    """A canonical text for answers that differ only in spelling."""
    text = text[:MAX_ANSWER_CHARS]
    return squashed(clean(text)).casefold() if len(text) < 200 else text
