"""Answers that are no values: yes and no, no solution, undefined, infinity."""

from __future__ import annotations

import re

from agentenv.envs.grading.tables import Tables
from agentenv.envs.grading.words import tokens

_TABLES = Tables(__file__)
_TRUTH = {word: says == "yes" for says in ("yes", "no") for word in _TABLES[says]}
_SPECIAL = _TABLES.patterns("special")
_NO_ANSWER = _TABLES.pattern("no_answer")
_CLAIM = re.compile(r"^(?:the|this|that) (?:claim|statement|answer|proposition) is ")


# A first word answers only before a pause or a clause: No, they ...; Yes it is; not No Country for
# Old Men, right triangle or n - 1.
_OPENING = _TABLES.pattern("opening")
_SHORT_TRUTH = _TABLES.pattern("short_truth")


def truth(text: str) -> bool | None:
    """True for yes, False for no, None for anything else."""
    return _TRUTH.get(text.lower())


def truth_of(found: str) -> bool | None:
    """What an answer says, alone or as the first word of a sentence that does not say both."""
    low = found.lower().strip(" .!")
    if low in _TRUTH:
        return _TRUTH[low]
    short = _SHORT_TRUTH.fullmatch(low)
    if short is not None:
        return short[1] is None and short["bare"] is None
    if _NO_ANSWER.match(low):
        return None
    claim = _CLAIM.sub("", low)
    words = tokens(claim)
    opening = _OPENING.match(claim)
    first = _TRUTH.get(words[0]) if words and opening is not None else None
    if first is None or any(_TRUTH.get(word) is (not first) for word in words[1:]):
        return None
    return first


def special(text: str) -> str:
    """The name of the special value that the text is; "" if none."""
    return next((name for name, form in _SPECIAL.items() if form.fullmatch(text)), "")
