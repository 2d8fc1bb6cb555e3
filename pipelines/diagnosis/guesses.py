"""Whether a grader pays for two guesses: answers that name another candidate beside the right one.

Another candidate is wrong by itself, is of the same kind (a number, words, yes or no) and shares
no word with the right answer, so that it is neither an alias nor a more exact form of it.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import NamedTuple

IsRight = Callable[[str], Awaitable[bool]]

JOINTS = (". ", " or ", "\n", ", also known as ", "; ", " - ")
MAX_TRIED = 8  # candidates, of which the first that is wrong by itself is taken
OPPOSITES = {"yes": "no", "no": "yes", "true": "false", "false": "true"}
_WORDS = re.compile(r"\w+")


class Guess(NamedTuple):
    """An answer with two candidates, and whether it was graded right."""

    text: str
    right_first: bool
    is_paid: bool


async def guess_twice(
    is_right: IsRight, answer: str, golds: Sequence[str], candidates: Iterable[str]
) -> list[Guess]:
    """The right answer joined with another candidate, in both orders; nothing where none of the
    candidates is another one."""
    other = await _another(is_right, (answer, *golds), candidates)
    if other is None:
        return []
    guesses = []
    for joint in JOINTS:
        for right_first, both in ((True, (answer, other)), (False, (other, answer))):
            text = joint.join(both)
            guesses.append(Guess(text, right_first, await is_right(text)))
    return guesses


async def _another(
    is_right: IsRight, known: Sequence[str], candidates: Iterable[str]
) -> str | None:
    words = {word for text in known for word in _words(text)}
    opposite = OPPOSITES.get(known[0].strip().lower())
    found = [opposite] if opposite else [*dict.fromkeys(candidates)]
    fitting = [
        one for one in found if _kind(one) == _kind(known[0]) and words.isdisjoint(_words(one))
    ]
    for one in fitting[:MAX_TRIED]:
        if not await is_right(one):
            return one
    return None


def _words(text: str) -> set[str]:
    return {*_WORDS.findall(text.lower())}


def _kind(text: str) -> str:
    if text.strip().lower() in OPPOSITES:
        return "yes or no"
    return "number" if any(letter.isdigit() for letter in text) else "words"


def remedy(guesses: Sequence[Guess]) -> str:
    """What to do about a grader that pays for some of these guesses."""
    orders = {one.right_first for one in guesses if one.is_paid}
    if len(orders) == 2:
        found = "it pays for guessing twice, which a policy learns"
    else:
        place = "first" if orders == {True} else "last"
        found = f"of two candidates it reads the {place} alone, so that the answer need not be one"
    return f'{found}: let it refuse an answer with two candidates, as kind = "layered" does'
