"""Sentences: the clause that answers, hedges, denials, and equivalent sentences."""

from __future__ import annotations

import re
from collections.abc import Callable

from agentenv.envs.grading.numbers import words_as_digits
from agentenv.envs.grading.text import Tables, lines, named_again, sentences
from agentenv.envs.grading.words import (
    tokens,
)

_SENTENCE_TABLES = Tables("sentences")
MAX_WORDS = 60

_VERB = _SENTENCE_TABLES.pattern("verb", re.IGNORECASE)
_CORRECTED = _SENTENCE_TABLES.pattern("corrected", re.IGNORECASE)
_REJECTED = _SENTENCE_TABLES.pattern("rejected", re.IGNORECASE)
_AUXILIARY = _SENTENCE_TABLES.pattern("auxiliary", re.IGNORECASE)
_CONCLUDED = _SENTENCE_TABLES.pattern("concluded", re.IGNORECASE | re.DOTALL)
_CLAUSE = _SENTENCE_TABLES.pattern("clause", re.DOTALL)
_SUBJECT = _SENTENCE_TABLES.pattern("subject", re.DOTALL | re.IGNORECASE)
_SURE = _SENTENCE_TABLES.pattern("sure", re.IGNORECASE)
_CLEFT = _SENTENCE_TABLES.pattern("cleft", re.DOTALL | re.IGNORECASE)
_NEGATION = _SENTENCE_TABLES.pattern("negation", re.IGNORECASE)
_DENIAL = _SENTENCE_TABLES.pattern("denial", re.IGNORECASE)
_CHANGED = _SENTENCE_TABLES.pattern("changed", re.IGNORECASE | re.DOTALL)
_APPOSITION = _SENTENCE_TABLES.pattern("apposition", re.DOTALL)
_AMOUNT = _SENTENCE_TABLES.pattern("amount")
_DATE = re.compile(r"(?:\w+ )?\d{1,2},? \w+,? \d{4}|[A-Z]\w+ \d{1,2}, \d{4}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_PREDICATED = re.compile(
    rf"(?:{_VERB.pattern})(?=\s)"
    r"|\b(?:it|he|she|they|them|there|we|you|me|us|I(?='|\s+[a-z]))\b(?=['\s])"
)
_COLON = re.compile(r"(?<=[a-z\d)]):\s+")


def is_hedged(text: str) -> bool:
    """Whether the text denies, doubts or leaves open."""
    return _NEGATION.search(text) is not None


def is_denied(text: str) -> bool:
    """Whether the text denies or doubts; narrower than whether it is hedged."""
    return _DENIAL.search(text) is not None


def has_verb(text: str) -> bool:
    """Whether the text contains a verb, so that it is a clause and no name or phrase."""
    words = _COMMAND.sub(" ", text).split()
    first = [word for word in words[:1] if not (word[:1].isupper() and word.endswith("ed"))]
    verb = _VERB.search(" ".join([*first, *(word for word in words[1:] if word[:1].islower())]))
    return verb is not None and (len(words) > 2 or not verb[0].endswith("ed"))


def is_statement(text: str) -> bool:
    """Whether a text is a sentence: a subject, a verb; no phrase that begins with a participle. The
    word after an article is no verb: a uniformed officer, in a flowerbed."""
    first = text.partition(" ")[0]
    rest = _OF_A_NOUN.sub("N", text).partition(" ")[2]
    is_subject = _PRONOUN.match(text) is not None and not first.isupper()
    return (is_subject and " " in text) or (
        (first[:1].isupper() or first[:1].isdigit() or first.lower() in _SUBJECTS)
        and _PREDICATED.search(rest) is not None
    )


def states(found: str, wanted: str, same: Callable[[str], bool]) -> bool:
    """Whether `found` ends in, or names, a text that `same` accepts."""
    found = _SURE.sub("", found)
    changed = _CHANGED.fullmatch(found)
    if changed is not None:
        right = changed["right"] or changed["other"] or changed["next"]
        return not _NEGATION.search(right) and (same(right) or states(right, wanted, same))
    concluded = _CONCLUDED.fullmatch(found)
    if concluded is not None and not _NEGATION.search(concluded[1]) and same(concluded[1]):
        return True
    kept = affirmed(found, wanted)
    if kept != found:
        return not _NEGATION.search(kept) and (same(kept) or states(kept, wanted, same))
    found = _APPOSITION.sub("", found)
    if same(found):
        return True
    first, *others = _clauses(found)
    if others and ";" not in found and not _NEGATION.search(found) and same(first):
        return True
    clause = (others or [first])[-1].replace("none other than ", "")
    match = _CORRECTED.fullmatch(clause)
    if match is not None and not _NEGATION.search(match["right"]):
        return same(match["right"])
    if len(clause.split()) > MAX_WORDS or _NEGATION.search(clause):
        return False
    return (clause != found and same(clause)) or _clause_states(clause, wanted, same)


def _clauses(text: str) -> list[str]:
    pieces = [text]
    for cut in (lines, sentences, named_again, _COLON.split):
        pieces = [piece for whole in pieces for piece in cut(whole) if piece.strip()]
    return pieces or [""]


def affirmed(text: str, wanted: str) -> str:
    """It is X, for It is X, not Y: the text without the denial at its end, unless that denies X."""
    match = _REJECTED.fullmatch(text)
    if match is None or _AUXILIARY.search(match["right"]):
        return text
    gold = tokens(wanted)
    if not gold or set(gold) <= set(tokens(match["wrong"])):
        return text
    return match["right"]


def _clause_states(clause: str, wanted: str, same: Callable[[str], bool]) -> bool:
    if len(clause.split()) < 3:
        return False
    if "=" in clause and same(clause.rpartition("=")[2]):
        return True
    if not _VERB.search(clause):
        return _amounts_to(clause, wanted, same, has_verb=False)
    if any(same(date) for date in _DATE.findall(clause)[-1:]):
        return True
    for form in (_CLAUSE, _SUBJECT, _CLEFT):
        match = form.fullmatch(clause)
        if match is not None and same(match[1]):
            return True
    return _amounts_to(clause, wanted, same)


_GOVERNED = re.compile(r"\b(of|by|from|than|with|near|under|over|before|after)(?: the)?\s*$", re.I)


def _amounts_to(
    clause: str, wanted: str, same: Callable[[str], bool], *, has_verb: bool = True
) -> bool:
    """Whether the last number of the clause is the gold, alone or with the words after it."""
    clause, wanted = words_as_digits(clause), words_as_digits(wanted)
    amounts = list(_AMOUNT.finditer(clause))
    if not amounts:
        return False
    last = amounts[-1]
    governor = _GOVERNED.search(clause[: last.start()])
    is_plain = re.fullmatch(r"[\d.,/$%-]+", wanted) is not None
    if governor is not None and not (is_plain and governor[1].lower() == "of"):
        return False
    if is_plain:
        return has_verb and same(last[0].rstrip(","))
    return len(amounts) == 1 and same(clause[last.start() :])


# Two sentences.

_SUBJECTS = frozenset(str.split("the a an one there all both each no some many most every"))
_OF_A_NOUN = re.compile(
    r"(?:^[Aa]n?|\ban?|\b[Tt]he)\s+(?:\w+ly\s+(?=\w+\s+(?!(?:to|in|by|at|on|from|for|the|an?)\b)))?\S+"
)
_PRONOUN = re.compile(r"(?:it|he|she|they|this|that)\b", re.IGNORECASE)
