"""Sentences: the clause that answers, hedges, denials, and equivalent sentences."""

from __future__ import annotations

import re
from collections.abc import Callable

from agentenv.envs.grading.numbers import words_as_digits
from agentenv.envs.grading.text import Tables, clauses, lines, named_again, sentences
from agentenv.envs.grading.words import tokens

_TABLES = Tables("sentences")
MAX_WORDS = 60

_VERB = _TABLES.pattern("verb", re.IGNORECASE)
_REJECTED = _TABLES.pattern("rejected", re.IGNORECASE)
_AUXILIARY = _TABLES.pattern("auxiliary", re.IGNORECASE)
_CONCLUDED = _TABLES.pattern("concluded", re.IGNORECASE | re.DOTALL)
_CLAUSE = _TABLES.pattern("clause", re.DOTALL)
_SUBJECT = _TABLES.pattern("subject", re.DOTALL | re.IGNORECASE)
_CLEFT = _TABLES.pattern("cleft", re.DOTALL | re.IGNORECASE)
_HEDGE = _TABLES.pattern("hedge", re.IGNORECASE)
_DENIAL = _TABLES.pattern("denial", re.IGNORECASE)
_APPOSITION = _TABLES.pattern("apposition", re.DOTALL)
_AMOUNT = _TABLES.pattern("amount")
_DATE = re.compile(r"(?:\w+ )?\d{1,2},? \w+,? \d{4}|[A-Z]\w+ \d{1,2}, \d{4}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_SURE = _TABLES.pattern("sure", re.IGNORECASE)
_BEGINNING = _TABLES.pattern("beginning")
_OF_A_NOUN = _TABLES.pattern("of_a_noun")
_COLON = re.compile(r"(?<=[a-z\d)]):\s+")


def is_hedged(text: str) -> bool:
    """Whether the text denies, doubts or leaves open."""
    return _HEDGE.search(text) is not None


def is_denied(text: str) -> bool:
    """Whether the text denies or doubts; narrower than whether it is hedged."""
    return _DENIAL.search(text) is not None


def has_verb(text: str) -> bool:
    """Whether the text contains a verb, so that it is a clause and no name or phrase."""
    words = _COMMAND.sub(" ", text).split()
    first = [word for word in words[:1] if not (word[:1].isupper() and word.endswith("ed"))]
    verb = _VERB.search(
        " ".join([*first, *(word for word in words[1:] if word[:1].islower() or word == "I")])
    )
    return verb is not None and (len(words) > 2 or not verb[0].endswith("ed"))


def is_statement(text: str) -> bool:
    """Whether a text is a sentence: a subject, a verb; no phrase. The word after an article is no
    verb: a uniformed officer, in a flowerbed."""
    is_subject = not text[:1].islower() or _BEGINNING.match(text) is not None
    return is_subject and has_verb(_OF_A_NOUN.sub("N", text))


def states(found: str, wanted: str, same: Callable[[str], bool]) -> bool:
    """Whether `found` ends in, or names, a text that `same` accepts."""
    found = _SURE.sub("", found)
    concluded = _CONCLUDED.fullmatch(found)
    if concluded is not None and not is_hedged(concluded[1]) and same(concluded[1]):
        return True
    kept = affirmed(found, wanted)
    if kept != found:
        return not is_hedged(kept) and (same(kept) or states(kept, wanted, same))
    found = _APPOSITION.sub("", found)
    if same(found):
        return True
    first, *others = _clauses(found)
    if others and ";" not in found and not is_hedged(found) and same(first):
        return True
    clause = (others or [first])[-1].replace("none other than ", "")
    if len(clause.split()) > MAX_WORDS or is_hedged(clause):
        return False
    return (clause != found and same(clause)) or _clause_states(clause, wanted, same)


def _clauses(text: str) -> list[str]:
    pieces = [text]
    for cut in (lines, sentences, clauses, named_again, _COLON.split):
        pieces = [piece for whole in pieces for piece in cut(whole) if piece.strip()]
    return pieces or [""]


def affirmed(text: str, wanted: str) -> str:
    """The text without what it rejects, unless that is the gold: It is X, for It is X, not Y, and
    for Not Y, it is X."""
    gold, kept, start = set(tokens(wanted)), "", 0
    for match in _REJECTED.finditer(text):
        before = text[: match.start()]
        if before.strip() and _AUXILIARY.search(before):
            continue
        if not gold or gold <= set(tokens(match["wrong"])):
            return text
        kept, start = f"{kept}{text[start : match.start()]} ", match.end()
    return (kept + text[start:]).strip() or text


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
