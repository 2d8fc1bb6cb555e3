"""The vote behind maj@k: which samples of a question give the same answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from agentenv.errors import GraderError
from envs.grading.layers import compare
from envs.grading.normalise import MAX_ANSWER_CHARS, clean, squashed
from launchers.evaluation.rows import EvalRow
from launchers.evaluation.scores import Scorer

MAX_EXPRESSIONS = 4  # of the most frequent answers, which math-verify compares the others with


class Votes(NamedTuple):
    """Samples of one question that ended: how many are right, how many give each wrong answer, in
    falling order, and how many give none."""

    num_right: int
    wrong: tuple[int, ...]
    num_blank: int

    @property
    def num_samples(self) -> int:
        return self.num_right + sum(self.wrong) + self.num_blank


async def count_votes(rows: Sequence[EvalRow], scorer: Scorer) -> Votes:
    """Count the answers of one question. What the grader found right is one answer, since it
    equals a gold; wrong ones are the same if the layered grader says so. An expression is compared
    with the few most frequent ones only, which decide a vote.

    Rows keep in `same_as` what was found, and are not compared again as long as no sample is
    added.
    """
    num_right = sum(row.success for row in rows)
    given = [row for row in rows if not row.success and row.prediction.strip()]
    if any(row.same_as is None for row in given):
        clusters = await _clusters(given, scorer)
    else:
        clusters = list(Counter(row.same_as for row in given).values())
    return Votes(
        num_right, tuple(sorted(clusters, reverse=True)), len(rows) - num_right - len(given)
    )


async def _clusters(rows: Sequence[EvalRow], scorer: Scorer) -> list[int]:
    """How many rows give each of the answers; it is kept in the rows if every comparison could be
    made."""
    by_text: dict[str, list[EvalRow]] = {}
    for row in rows:
        by_text.setdefault(_form(row.prediction), []).append(row)
    clusters: list[tuple[str, list[EvalRow]]] = []
    is_sure = True
    for text, own in sorted(by_text.items(), key=lambda item: -len(item[1])):
        place, compared = await _place(text, [known for known, _ in clusters], scorer)
        is_sure = is_sure and compared
        if place is None:
            clusters.append((text, list(own)))
        else:
            clusters[place][1].extend(own)
    for _, members in clusters if is_sure else ():
        lowest = min(row.sample for row in members)
        for row in members:
            row.same_as = lowest
    return [len(members) for _, members in clusters]


async def _place(text: str, known: Sequence[str], scorer: Scorer) -> tuple[int | None, bool]:
    """The place of the known answer that is the same, and whether all could be compared."""
    open_places = []
    for place, other in enumerate(known):
        same, _ = compare(text, other)
        if same:
            return place, True
        if same is None:
            open_places.append(place)
        await asyncio.sleep(0)  # others may want to go on: comparing takes up to a millisecond
    compared = True
    for place in open_places[:MAX_EXPRESSIONS]:
        try:
            if await scorer.equal(text, [known[place]]):
                return place, True
        except GraderError:  # too busy, after several tries: counted as different
            compared = False
    return None, compared


def _form(text: str) -> str:
    """One text for answers that differ in writing only."""
    text = text[:MAX_ANSWER_CHARS]
    return squashed(clean(text)).casefold() if len(text) < 200 else text
