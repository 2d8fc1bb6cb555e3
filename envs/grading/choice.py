"""Multiple choice: the letters that an answer chooses."""

from __future__ import annotations

import re

_LETTER = re.compile(r"[(\[]?\s*([A-J])\s*[)\].:]?", re.IGNORECASE)
_NAMED_CHOICE = re.compile(
    r"(?:(?:the\s+)?(?:correct\s+)?(?:option|choice|answer)(?:\s+is)?:?\s*"
    r"|(?:i\s+)?(?:choose|pick)\s+|\u9009\u9879?\s*)[(\[]?\s*([A-J])\s*[)\]]?(?![A-Za-z])(.*)",
    re.IGNORECASE | re.DOTALL,
)
_LABELLED = re.compile(
    r"(?:\(([A-Ja-j])\)|\[([A-J])\]|([A-J]\s*[).:\]]|[a-j]\)))\s*(?![A-Z]\.)(\S.*)", re.DOTALL
)
_LIST = re.compile(
    r"[(\[]?[A-J][)\]]?(?:\s*(?:,|;|/|&|\band\b|\s)\s*(?:and\s+)?[(\[]?[A-J][)\]]?){1,9}"
)
_DENIED = re.compile(
    r"\b(?:not|never|wrong|incorrect|false|excluded|eliminated|ruled out|except)\b|n't\b",
    re.IGNORECASE,
)
_EITHER = re.compile(r"[(\[]?[A-J][)\]]?(?:\s*,\s*[(\[]?[A-J][)\]]?)*,?\s+or\s+[(\[]?[A-J][)\]]?")
_ASCENDING = re.compile(r"[A-J]{2,5}")


_BETWEEN = re.compile(
    r"[^\w\s'()\[\]]+|\n|\b(?:or|and|aka|then|possibly|perhaps|maybe|alternatively|wait|sorry|no)\b"
)
_ALONE = re.compile(r"[\s()\[\]]*[A-J](?:[\s()\[\]]+[A-J])*[\s()\[\]]*")
_NAMED_LETTER = re.compile(
    r"\b(?:option|choice|answer(?:\s+is)?|it(?:'s| is))\s*[(\[]?([A-J])(?!\w|\s+[a-z]+\s)",
    re.IGNORECASE,
)


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


def letters(answer: str) -> frozenset[str]:
    """The letters of options that an answer names, alone or as an option, and does not deny."""
    found: set[str] = set()
    for piece in _BETWEEN.split(answer):
        if _DENIED.search(piece):
            continue
        if _ALONE.fullmatch(piece):
            found.update(re.findall("[A-J]", piece))
        found.update(re.findall(r"(?:\(|\s|^)([A-J])\)", piece))
        found.update(letter.upper() for letter in _NAMED_LETTER.findall(piece))
    return frozenset(found)


def _several(text: str) -> frozenset[str] | None:
    if _LIST.fullmatch(text):
        return frozenset(re.findall(r"[A-J]", text))
    if _ASCENDING.fullmatch(text) and list(text) == sorted(set(text)):
        return frozenset(text)
    return None
