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


_PIECES = re.compile(
    r"[.;:!?\n\u2028\u2029\t|/=~\u2026\u3001\u3002\uff0c\uff1b\uff1a\uff08\uff09()\[\]{}<>*_`\"]+"
    r"|[\u2013\u2014\u300c\u300d\u3010\u3011+\u2190-\u21ff\u2248]|\s-+\s|--+|\\approx"
    r"|\b(?:or|either|if not|aka|then|possibly|perhaps|maybe|alternatively|also|wait|sorry|versus"
    r"|vs|otherwise|else|alias|namely|equals|known as|that is|as well as|plus|i\.e|e\.g|others)\b"
    "|\u6216\u8005?",
    re.IGNORECASE,
)
_NAMED_LETTERS = re.compile(
    r"(?<![\w'\u2019\\-])(?:[B-HJ]|A(?!\s+(?!(?:is|was|seems|and|or|but|other)\b)[a-z])|I(?!\s+[a-z])|[A-J]{2,5})"
    r"(?![\w'\u2019])"
)
_CONDITION = re.compile(
    r"\bif (?:not|(?:that|this|it)(?:'s| is| was) (?:not|wrong|incorrect)\b)"
    r"|\bnot (?:sure|to mention)\b",
    re.IGNORECASE,
)
_SENTENCES = re.compile(r"\b(?:i\.e|e\.g)\b|[.;\n]")
_REASON = re.compile(r"\bbecause\b.*", re.IGNORECASE | re.DOTALL)
_PROPER = re.compile(
    r"(?!(?i:option|choice|answer|letter|is|hence|thus|so|or|and|also"
    r"|but|then|therefore|maybe|perhaps|possibly|finally|no|not)\b)\b[A-Z][a-z]+\s+$"
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
