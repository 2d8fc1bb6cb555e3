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
    with the few most frequent ones only, which decide a vote."""
    wrong = [row.prediction for row in rows if not row.success]
    texts = Counter(_form(text) for text in wrong if text.strip())
    clusters: list[tuple[str, int]] = []
    for text, number in texts.most_common():
        place = await _place(text, [known for known, _ in clusters], scorer)
        if place is None:
            clusters.append((text, number))
        else:
            clusters[place] = (clusters[place][0], clusters[place][1] + number)
    counts = tuple(sorted((number for _, number in clusters), reverse=True))
    return Votes(len(rows) - len(wrong), counts, len(wrong) - texts.total())


async def _place(text: str, known: Sequence[str], scorer: Scorer) -> int | None:
    open_places = []
    for place, other in enumerate(known):
        same, _ = compare(text, other)
        if same:
            return place
        if same is None:
            open_places.append(place)
        await asyncio.sleep(0)  # others may want to go on: comparing takes up to a millisecond
    for place in open_places[:MAX_EXPRESSIONS]:
        try:
            if await scorer.equal(text, [known[place]]):
                return place
        except GraderError:  # too busy, after several tries: counted as different
            continue
    return None


def _form(text: str) -> str:
    """One text for answers that differ in writing only."""
    text = text[:MAX_ANSWER_CHARS]
    return squashed(clean(text)).casefold() if len(text) < 200 else text
