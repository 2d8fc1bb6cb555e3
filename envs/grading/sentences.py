"""Sentences: the clause that answers, hedges, denials, and equivalent sentences."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable

from agentenv.envs.grading import dates
from agentenv.envs.grading.numbers import words_as_digits
from agentenv.envs.grading.text import Tables, lines, named_again, sentences
from agentenv.envs.grading.words import (
    is_numeral,
    singular,
    tokens,
)

_SENTENCE_TABLES = Tables("sentences")
MAX_WORDS = 60
MAX_STATEMENT_CHARS = 500

_VERB = _SENTENCE_TABLES.pattern("verb", re.IGNORECASE)
_CORRECTED = _SENTENCE_TABLES.pattern("corrected", re.IGNORECASE)
_REJECTED = _SENTENCE_TABLES.pattern("rejected", re.IGNORECASE)
_AUXILIARY = _SENTENCE_TABLES.pattern("auxiliary", re.IGNORECASE)
_CONCLUDED = _SENTENCE_TABLES.pattern("concluded", re.IGNORECASE | re.DOTALL)
_CLAUSE = _SENTENCE_TABLES.pattern("clause", re.DOTALL)
_PREDICATE = _SENTENCE_TABLES.pattern("predicate", re.DOTALL)
_SUBJECT = _SENTENCE_TABLES.pattern("subject", re.DOTALL | re.IGNORECASE)
_ELLIPSIS = _SENTENCE_TABLES.pattern("ellipsis", re.I)
_PREAMBLE = re.compile(r"^(?:after|upon|on|having) [\w -]{1,30}ing\b[^,.]{0,40},\s*", re.IGNORECASE)
_CLEFT = _SENTENCE_TABLES.pattern("cleft", re.DOTALL | re.IGNORECASE)
_NEGATION = _SENTENCE_TABLES.pattern("negation", re.IGNORECASE)
_DENIAL = _SENTENCE_TABLES.pattern("denial", re.IGNORECASE)
_CHANGED = _SENTENCE_TABLES.pattern("changed", re.IGNORECASE | re.DOTALL)
_SURE = _SENTENCE_TABLES.pattern("sure", re.IGNORECASE)
_APPOSITION = _SENTENCE_TABLES.pattern("apposition", re.DOTALL)
_MATH = re.compile(r"\$([^$]*[\\=^_][^$]*)\$")
_AMOUNT = _SENTENCE_TABLES.pattern("amount")
_DATE = re.compile(r"(?:\w+ )?\d{1,2},? \w+,? \d{4}|[A-Z]\w+ \d{1,2}, \d{4}")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_PREDICATED = re.compile(
    rf"(?:{_VERB.pattern})(?=\s)"
    r"|\b(?:it|he|she|they|them|there|we|you|me|us|I(?='|\s+[a-z]))\b"
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
    found = _SURE.sub("", _PREAMBLE.sub("", found))
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
    if others and ";" not in found and not _DENIAL.search(found) and same(first):
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
    math = _MATH.findall(clause)
    if math:
        return same(math[-1])
    if len(clause.split()) < 3:
        return False
    if "=" in clause and same(clause.rpartition("=")[2]):
        return True
    if not _VERB.search(clause):
        return _amounts_to(clause, wanted, same, has_verb=False)
    if any(same(date) for date in _DATE.findall(clause)[-1:]):
        return True
    for form in (_CLAUSE, _PREDICATE, _SUBJECT, _CLEFT, _ELLIPSIS):
        match = form.fullmatch(clause)
        if match is not None and same(match[1]):
            return True
    return _amounts_to(clause, wanted, same)


_GOVERNED = re.compile(r"\b(of|by|from|than|near|under|over|before|after)(?: the)?\s*$", re.I)


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

_BE = _SENTENCE_TABLES.text("be")
MIN_STATEMENT_WORDS = 4
_FILLERS = _SENTENCE_TABLES.words("fillers")
_SUBJECTS = frozenset(str.split("the a an one there all both each no some many most every"))
_OF_A_NOUN = re.compile(
    r"(?:^[Aa]n?|\ban?|\b[Tt]he)\s+(?:\w+ly\s+(?=\w+\s+(?!(?:to|in|by|at|on|from|for|the|an?)\b)))?\S+"
)
_PRONOUN = re.compile(r"(?:it|he|she|they|this|that)\b", re.IGNORECASE)
_PHRASES = tuple(
    (re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE), word)
    for word, phrase in _SENTENCE_TABLES["phrases"].items()
)
_SENTENCE_DEGREES = re.compile("\\s*\N{DEGREE SIGN}\\s?C\\b")
_BY = re.compile(r"\bby\b", re.IGNORECASE)
_SYNONYMS: dict[str, str] = {
    word: name for name, words in _SENTENCE_TABLES["synonyms"].items() for word in words
}
_WHERE = _SENTENCE_TABLES.pattern("where")
_PASSIVE = _SENTENCE_TABLES.pattern("passive")


def same_statement(found: str, wanted: str) -> bool:
    """Whether two sentences state the same in the same words: in another order, with common
    synonyms, or with a pronoun for the subject. Names are in the same order and on the same side of
    the verb, unless one sentence is passive or both are copular."""
    if len(found) > MAX_STATEMENT_CHARS:
        return False
    found, wanted = _phrased(found), _phrased(wanted)
    if _turns(found, wanted) or _turns(wanted, found):
        return True
    words, gold = _content(found), _content(wanted)
    if (
        not words
        or len(gold) < MIN_STATEMENT_WORDS
        or not (_VERB.search(found) and _VERB.search(wanted))
    ):
        return False
    if not _same_round(found, wanted):
        return False
    if _PRONOUN.match(found):
        missing = Counter(gold) - Counter(words)
        subject = gold[: sum(missing.values())]
        return Counter(subject) == missing and sorted(words) == sorted(gold[len(subject) :])
    if sorted(words) != sorted(gold):
        return False
    is_passive = bool(_BY.search(found)) != bool(_BY.search(wanted))
    return is_passive or _is_copular(found, wanted) or _subjects(found) == _subjects(wanted)


def _phrased(text: str) -> str:
    text = _SENTENCE_DEGREES.sub(" degrees celsius", text).replace("%", " percent")
    for pattern, word in _PHRASES:
        text = pattern.sub(word, text)
    return text


def _same_round(found: str, wanted: str) -> bool:
    """Whether the common names, numbers and verbs of both texts are in the same cyclic order."""
    capitals = [
        {token for word in text.split()[1:] if word[:1].isupper() for token in tokens(word)}
        for text in (found, wanted)
    ]
    sides = [
        [
            _SYNONYMS.get(token, token)
            for token in tokens(text)
            if (token in capitals[0] | capitals[1] and token not in dates.MONTHS)
            or token in _SYNONYMS
            or is_numeral(token)
        ]
        for text in (found, wanted)
    ]
    both = set(sides[0]) & set(sides[1])
    one, other = ([token for token in side if token in both] for side in sides)
    if len(one) != len(other) or len(one) > MAX_WORDS:
        return False
    return not one or any(one[turn:] + one[:turn] == other for turn in range(len(one)))


def _subjects(text: str) -> set[str]:
    """The capitalized words, but the first, before the verb."""
    verb = _VERB.search(text)
    words = text[: verb.start() if verb is not None else 0].split()[1:]
    return {token for word in words if word[:1].isupper() for token in tokens(word)}


def _is_copular(*texts: str) -> bool:
    return all(re.search(rf"\b{_BE}\b", text) for text in texts)


def _turns(one: str, other: str) -> bool:
    where = _WHERE.fullmatch(one)
    if where is not None:
        straight = f"{where['what']} in {where['place']}"
        if _content(straight) == _content(other):
            return True
    passive = _PASSIVE.fullmatch(one)
    if passive is None:
        return False
    subject, verb, objects = map(_content, passive.group("subject", "verb", "object"))
    words = _content(other)
    if len(words) != len(subject) + 1 + len(objects) or not subject or not objects:
        return False
    middle = words[len(subject)]
    return (
        words[: len(subject)] == subject
        and words[len(subject) + 1 :] == objects
        and stem(middle) == stem(verb[0] if verb else "")
    )


def _content(text: str) -> list[str]:
    found = (token for token in tokens(text) if token not in _FILLERS)
    return [_SYNONYMS.get(token, singular(token)) for token in found]


def stem(verb: str) -> str:
    """The consonants of a verb without its ending: sings, sang and sung are one."""
    bare = re.sub(r"[aeiou]", "", re.sub(r"(?:s|d|n)$", "", verb[1:]))
    return verb[:1] + re.sub(r"(.)\1", r"\1", bare)
