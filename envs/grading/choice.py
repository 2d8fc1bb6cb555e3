"""Multiple choice: the letters that an answer chooses."""

from __future__ import annotations

import re

from agentenv.envs.grading.tables import Tables

_TABLES = Tables(__file__)

_LETTER = re.compile(r"[(\[]?\s*([A-J])\s*[)\].:]?", re.IGNORECASE)
_NAMED_CHOICE = _TABLES.pattern("named_choice", re.IGNORECASE | re.DOTALL)
_LABELLED = _TABLES.pattern("labelled", re.DOTALL)
_LIST = _TABLES.pattern("list")
_DENIED = _TABLES.pattern("denied", re.IGNORECASE)
_EITHER = re.compile(r"[(\[]?[A-J][)\]]?(?:\s*,\s*[(\[]?[A-J][)\]]?)*,?\s+or\s+[(\[]?[A-J][)\]]?")
_ASCENDING = re.compile(r"[A-J]{2,5}")


_PIECES = _TABLES.pattern("pieces", re.IGNORECASE)
_NAMED_LETTERS = _TABLES.pattern("named_letters")
_CONDITION = _TABLES.pattern("condition", re.IGNORECASE)
_SENTENCES = re.compile(r"\b(?:i\.e|e\.g)\b|[.;\n]")
_REASON = re.compile(r"\bbecause\b.*", re.IGNORECASE | re.DOTALL)
_PROPER = _TABLES.pattern("proper")


def is_choice(gold: str) -> bool:
    """Whether a gold is a letter, or several, of a multiple-choice question."""
    gold = gold.strip()
    return bool(_LETTER.fullmatch(gold) and gold.upper() == gold) or _several(gold) is not None


def is_either(answer: str) -> bool:
    """Whether an answer leaves open which of several letters it means."""
    return _EITHER.fullmatch(answer.strip()) is not None


def labelled(gold: str) -> tuple[str, str] | None:
    """The letter and the text of a gold such as '(B) Paris'."""
    match = _LABELLED.fullmatch(gold.strip())
    if match is None:
        return None
    return (match[1] or match[2] or match[3])[0].upper(), match[4].strip()


def chosen(answer: str) -> frozenset[str]:
    """The letters that the answer chooses; empty when it chooses none."""
    answer = answer.strip()
    match = _LETTER.fullmatch(answer)
    if match is not None:
        return frozenset(match[1].upper())
    several = _several(answer)
    if several is not None:
        return several
    match = _NAMED_CHOICE.fullmatch(answer)
    if match is not None:
        if re.match(r"\s*(?:,|/|or|and)\s*[(\[]?[A-J][)\]]?\b", match[2]):
            return frozenset()  # hedged between two options
        if _DENIED.search(match[2]):
            return chosen(match[2].rpartition(";")[2]) if ";" in match[2] else frozenset()
        return frozenset(match[1].upper())
    shown = set(re.findall(r"\(([A-J])\)", answer))
    if len(shown) == 1:
        return frozenset(shown)
    label = labelled(answer)
    return frozenset(label[0]) if label is not None else frozenset()


def letters(answer: str) -> set[frozenset[str]]:
    """The letters of options that each part of an answer names and does not deny."""
    found: set[frozenset[str]] = set()
    for sentence in _SENTENCES.split(_CONDITION.sub("or", answer)):
        clause = _REASON.sub("", sentence)
        if _DENIED.search(clause):
            continue
        for piece in _PIECES.split(clause):
            named = [
                match[0]
                for match in _NAMED_LETTERS.finditer(piece)
                if not _PROPER.search(piece[: match.start()])
                and (len(match[0]) == 1 or _ASCENDING.fullmatch(match[0]))
            ]
            if named:
                found.add(frozenset("".join(named)))
    return found


def _several(text: str) -> frozenset[str] | None:
    if _LIST.fullmatch(text):
        return frozenset(re.findall(r"[A-J]", text))
    if _ASCENDING.fullmatch(text) and list(text) == sorted(set(text)):
        return frozenset(text)
    return None
