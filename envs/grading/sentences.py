"""An answer in a sentence: what its last clause says, if it denies and hedges nothing."""

from __future__ import annotations

import re
from collections.abc import Callable

from envs.grading.words import tokens

MAX_WORDS = 60

_VERB = re.compile(
    r"\b(?:is|are|was|were|be|equals?|makes?|gives?|has|had|have|went|goes|won|died|born|took"
    r"|opened|arrived|says?|found|happened|occurred|located|called|named|hence|therefore|\w{3,}ed"
    r"|began|broke|built|came|became|fell|grew|held|kept|led|left|lost|made|met|ran|rose|sank|sold"
    r"|sang|saw|set|spoke|stood|struck|taught|told|wrote|drew|flew|knew|gave|got|hit|lies|lives"
    r"|comes|works)\b|^(?:it|he|she|they|we|this|that)\s+\w+",
    re.IGNORECASE,
)
_CORRECTED = re.compile(r"(?:.*,\s*)?not\s+(?:\S+\s+){1,4}?but\s+(?:rather\s+)?(.+)", re.IGNORECASE)
_CONCLUDED = re.compile(
    r".*\b(?:answer|result)\s+(?:is|was|must be|should be)\s*:?\s+(.+)", re.IGNORECASE | re.DOTALL
)
_CLAUSE = re.compile(
    r".*\b(?:is|are|was|were|equals|in|on|by|to|as|=)\s+(?:(?:the|a|an|called|named)\s+)?(.+)",
    re.DOTALL,
)
_NEGATION = re.compile(
    r"\b(?:not|never|no|neither|nor|or|either|unless|maybe|perhaps|possibly|instead|rather|wrong"
    r"|incorrect|false|except|without|near|than|if|whom|whose|ruled out|excluded|denied|before"
    r"|after|unlike|contrary)\b|n't\b",
    re.IGNORECASE,
)
_APPOSITION = re.compile(r",\s+(?:an?|the|who|which|whose|where)\s.*", re.DOTALL)
_MATH = re.compile(r"\$([^$]*[\\=^_][^$]*)\$")
_NUMBER = re.compile(r"[$\u20ac\u00a3]?-?\d[\d,]*(?:\.\d+)?(?:/\d+)?%?")
_DATE = re.compile(r"(?:\w+ )?\d{1,2},? \w+,? \d{4}|[A-Z]\w+ \d{1,2}, \d{4}")


def is_hedged(text: str) -> bool:
    """Whether the text denies, doubts or leaves open."""
    return _NEGATION.search(text) is not None


def says(found: str, wanted: str, same: Callable[[str], bool]) -> bool:
    """Whether the last clause of `found` ends in, or names, what `same` accepts."""
    concluded = _CONCLUDED.fullmatch(found)
    if concluded is not None and not _NEGATION.search(concluded[1]) and same(concluded[1]):
        return True
    found = _APPOSITION.sub("", found)
    if same(found):
        return True
    clause = re.split(r";\s+|(?<=[a-z\d])[.:]\s+", found)[-1]
    clause = clause.replace("none other than ", "")
    match = _CORRECTED.fullmatch(clause)
    if match is not None and not _NEGATION.search(match[1]):
        return same(match[1])
    if len(clause.split()) > MAX_WORDS or _NEGATION.search(clause):
        return False
    if clause != found and same(clause):
        return True
    math = _MATH.findall(clause)
    if math:
        return same(math[-1])
    if not _VERB.search(clause) or len(clause.split()) < 3:
        return False
    if any(same(date) for date in _DATE.findall(clause)[-1:]):
        return True
    match = _CLAUSE.fullmatch(clause)
    if match is not None and same(match[1]):
        return True
    numbers = _NUMBER.findall(clause)
    if numbers and re.fullmatch(r"[\d.,/$%-]+", wanted):
        return same(numbers[-1].rstrip(","))
    return _names(clause, wanted)


def _names(clause: str, wanted: str) -> bool:
    """Whether the clause holds the words of the gold together, and no other name or number."""
    words = clause.split()
    gold = tokens(wanted)
    if not gold or not any(map(str.isalpha, gold)):
        return False
    others = tokens(" ".join([words[0].lower(), *words[1:]]))
    for place in range(len(others) - len(gold) + 1):
        if others[place : place + len(gold)] == gold:
            break
    else:
        return False
    capitals = {token for word in words[1:] if word[:1].isupper() for token in tokens(word)}
    numbers = {token for token in others if token.isdigit()}
    return (capitals | numbers) <= set(gold) and (wanted != wanted.lower() or len(gold) > 1)
