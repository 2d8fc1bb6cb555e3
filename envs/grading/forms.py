r"""Answers of a fixed form: letters of a multiple choice, yes and no, values such as infinity, and
lists: 1, 2 and 3; {1, 2}; (3, 4); x = 1 or x = -1; \pm 2.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import accumulate
from typing import Literal

from msgspec import Struct

from agentenv.envs.grading.text import Tables, clean, squashed
from agentenv.envs.grading.words import is_wordy, tokens

_CHOICE_TABLES = Tables("choice")

_LETTER = re.compile(r"[(\[]?\s*([A-J])\s*[)\].:]?", re.IGNORECASE)
_NAMED_CHOICE = _CHOICE_TABLES.pattern("named_choice", re.IGNORECASE | re.DOTALL)
_LABELLED = _CHOICE_TABLES.pattern("labeled", re.DOTALL)
_LIST = _CHOICE_TABLES.pattern("list")
_DENIED = _CHOICE_TABLES.pattern("denied", re.IGNORECASE)
_ASCENDING = re.compile(r"[A-J]{2,5}")


_PIECES = _CHOICE_TABLES.pattern("pieces", re.IGNORECASE)
_NAMED_LETTERS = _CHOICE_TABLES.pattern("named_letters")
_CONDITION = _CHOICE_TABLES.pattern("condition", re.IGNORECASE)
_JOINED = re.compile(r"\bA(?=(?:\s+[^\W\d_]+){1,2}\s+[(\[]?[A-J]\b)")  # no article: A or else (B)
_MARKED = re.compile(r"(\([^()]{2,}\))|(?<![\w(])([A-J])(?=\))")  # C), not (vitamin C)
_SENTENCES = re.compile(r"\b(?:i\.e|e\.g)\b|[.;\n]")
_REASON = re.compile(r"\bbecause\b.*", re.IGNORECASE | re.DOTALL)
_PROPER = _CHOICE_TABLES.pattern("proper")


def is_choice(gold: str) -> bool:
    """Whether a gold is a letter, or several, of a multiple-choice question."""
    gold = gold.strip()
    return bool(_LETTER.fullmatch(gold) and gold.upper() == gold) or _several(gold) is not None


def labeled(gold: str) -> tuple[str, str] | None:
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
    label = labeled(answer)
    if label is not None:
        return frozenset(label[0])
    groups = letters(answer) if _NAMED_CHOICE.match(answer) else set()
    return next(iter(groups)) if len(groups) == 1 else frozenset()


def letters(answer: str) -> set[frozenset[str]]:
    """The letters of options that each part of an answer names and does not deny."""
    found: set[frozenset[str]] = set()
    answer = _JOINED.sub("A,", _MARKED.sub(r"\1(\2", _CONDITION.sub("or", answer)))
    for sentence in _SENTENCES.split(answer):
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


_SPECIAL_TABLES = Tables("special")
_TRUTH = {word: kind == "yes" for kind in ("yes", "no") for word in _SPECIAL_TABLES[kind]}
_SPECIAL = _SPECIAL_TABLES.patterns("special")
_NO_ANSWER = _SPECIAL_TABLES.pattern("no_answer")
_CLAIM = _SPECIAL_TABLES.pattern("claim")


# A first word answers only before a pause or a clause: No, they ...; Yes it is; not No Country for
# Old Men, right triangle or n - 1.
_OPENING = _SPECIAL_TABLES.pattern("opening")
_SHORT_TRUTH = _SPECIAL_TABLES.pattern("short_truth")


def truth(text: str) -> bool | None:
    """True for yes, False for no, None for anything else."""
    return _TRUTH.get(text.lower())


def truth_of(found: str) -> bool | None:
    """The truth value of an answer, alone or as the first word of a sentence without the other."""
    low = found.lower().strip(" .!")
    low = low[match.end() :] if (match := _CLAIM.match(low)) else low
    if low in _TRUTH:
        return _TRUTH[low]
    short = _SHORT_TRUTH.fullmatch(low)
    if short is not None:
        return short[1] is None and short["bare"] is None
    if _NO_ANSWER.match(low):
        return None
    words = tokens(low)
    opening = _OPENING.match(low)
    first = _TRUTH.get(words[0]) if words and opening is not None else None
    if first is None or any(_TRUTH.get(word) is (not first) for word in words[1:]):
        return None
    return first


def special(text: str) -> str:
    """The name of the special value in the text; "" if none."""
    return next((name for name, form in _SPECIAL.items() if form.fullmatch(text)), "")


MAX_ELEMENTS = 40

Compare = Callable[[str, str], bool | None]

_AND = _SPECIAL_TABLES.pattern("and")
_NAMED_VALUE = _SPECIAL_TABLES.pattern("named_value", re.DOTALL)
_ITEM = re.compile(r"(?:^|[,;]\s+|(?<!\s)\s+(?:[,;]\s+)?)(?:\(?\d{1,2}[.)]|[-*\N{BULLET}])\s+")
_OR = re.compile(r"\b[oO]r\b")
_JOINT = re.compile(r"\b(?:and|or)\b", re.IGNORECASE)
_SIGN = Tables("formulas").pattern("sign")
_OPEN = {"(": ")", "[": "]", "{": "}"}


class Several(Struct, frozen=True):
    """Elements, and the brackets around them: with braces or none the order does not count."""

    elements: tuple[str, ...]
    opening: Literal["", "{", "(", "["] = ""
    closing: Literal["", "}", ")", "]"] = ""

    @property
    def brackets(self) -> str:
        return self.opening + self.closing

    @property
    def ordered(self) -> bool:
        return self.opening in ("(", "[")


def several(text: str) -> Several | None:
    """The elements of a list, set, tuple or interval; None for a single value."""
    text = (
        re.sub(r"\\([{}])", r"\1", text.strip()).replace(r"\lbrace", "{").replace(r"\rbrace", "}")
    )
    opening = closing = ""
    if len(text) > 1 and text[0] in _OPEN and text[-1] in ")]}" and _wraps(text):
        opening, closing, text = text[0], text[-1], text[1:-1]
    if re.match(r"\(?1[.)]\s|[-*\N{BULLET}]\s+[^\W\d_]", text):  # an enumeration
        text = _ITEM.sub(",", text).lstrip(",")
    text = re.sub(r"^(?:both|not only)\s+|,?\s+respectively$", "", text)
    parts = _split(_AND.sub(",", text))
    parts = [both for part in parts for both in _both_signs(part)]
    if len(parts) > MAX_ELEMENTS or not all(parts) or (len(parts) < 2 and opening != "{"):
        return None
    return Several(tuple(parts), opening, closing)  # type: ignore[arg-type]


def same_list(
    answer: Several, gold: Several, same: Compare, *, ordered: bool = False
) -> bool | None:
    """Whether the elements agree, with `ordered` one by one unless they are in braces; None when
    a pair of elements cannot be decided."""
    if len(answer.elements) != len(gold.elements):
        return False
    if answer.opening and gold.opening and answer.brackets != gold.brackets:
        return False
    ordered = ordered and "{" not in (answer.opening, gold.opening)
    one_by_one = answer.ordered or gold.ordered or ordered
    left, undecided = list(answer.elements), False
    for element in gold.elements:
        outcomes = [same(one, element) for one in (left[:1] if one_by_one else left)]
        best = True if True in outcomes else None if None in outcomes else False
        if best is False:
            return False
        if best or one_by_one:
            del left[outcomes.index(best)]
        undecided = undecided or best is None
    return None if undecided else True


def in_order(found: str, wanted: str) -> tuple[tuple[str, str], ...]:
    """The pairs of items of two lists whose order counts; none for sets and for single values."""
    if r"\begin" in found + wanted:  # a matrix: its rows are no items
        return ()
    answers, golds = several(without_name(found)), several(without_name(wanted))
    if answers is None or golds is None or "{" in (answers.opening, golds.opening):
        return ()
    return tuple(zip(answers.elements, golds.elements, strict=False))


def without_name(text: str) -> str:
    """The right side of x = 5 or f(x) = x + 1; the text itself when it is no such equation."""
    match = _NAMED_VALUE.fullmatch(text)
    return match[1] if match is not None and "=" not in match[1] else text


def _depths(text: str) -> list[int]:
    """The number of open brackets after each character."""
    return [*accumulate((sign in "([{") - (sign in ")]}") for sign in text)]


def _wraps(text: str) -> bool:
    """Whether the first bracket closes only at the end."""
    *inner, last = _depths(text)
    return last == 0 and 0 not in inner


def _split(text: str) -> list[str]:
    """Parts between commas outside of brackets."""
    pairs = zip(text, _depths(text), strict=True)
    marked = ("\0" if sign == "," and depth == 0 else sign for sign, depth in pairs)
    return [part.strip() for part in "".join(marked).split("\0")]


def _both_signs(part: str) -> list[str]:
    if part.count(r"\pm") != 1:
        return [part]
    before, _, after = part.partition(r"\pm")
    after = after.strip()
    if before.strip() and not before.strip().endswith("="):
        return [f"{before.strip()} + {after}", f"{before.strip()} - {after}"]
    return [before + after, f"{before}-{after}"]


def same_answers(found: str, wanted: str, same: Compare, *, ordered: bool = False) -> bool | None:
    """Whether two texts list the same, with `ordered` in the same order; None when they are no
    lists, or `same` cannot decide."""

    def element(one: str, other: str) -> bool | None:
        return _same_element(one, other, same)

    bounds = [text for text in (found, wanted) if _SIGN.search(text)]
    if {word.lower() for text in bounds for word in _JOINT.findall(text)} == {"and", "or"}:
        return None  # x < 2 or x > 7 is no x > 7 and x < 2
    golds, answers = several(without_name(wanted)), several(without_name(found))
    if golds is None or answers is None:
        known = golds or answers
        if known is None or known.opening != "{" or len(known.elements) > 1:
            return None
        golds, answers = golds or Several((wanted,)), answers or Several((found,))
    if is_wordy(wanted) and _OR.search(found) and not _OR.search(wanted):
        return False  # one of them, not all
    outcome = same_list(answers, golds, element, ordered=ordered)
    if outcome is not False or (ordered and same_list(answers, golds, element)):
        return outcome
    if is_wordy(wanted):  # a comma in a name or a place
        return (not ordered and _share_a_noun(answers, golds)) or None
    is_open = answers.ordered != golds.ordered and "{" not in (answers.opening, golds.opening)
    return None if is_open else False


def _share_a_noun(answer: Several, gold: Several) -> bool:
    """Civil, military and censorial offices; military offices, censorial and civil offices."""
    sides = [[tokens(element) for element in side.elements] for side in (answer, gold)]
    nouns = [side[-1][-1:] for side in sides]
    if len(sides[0]) != len(sides[1]) or nouns[0] != nouns[1] or len(sides[0]) < 2:
        return False
    bare = [
        sorted(words[:-1] if words[-1:] == noun else words for words in side)
        for side, noun in zip(sides, nouns, strict=True)
    ]
    return all(bare[0]) and all(bare[1]) and bare[0] == bare[1]


def _same_element(found: str, wanted: str, same: Compare) -> bool | None:
    if "=" in found and "=" in wanted and _name(found) != _name(wanted):
        return False
    found, wanted = clean(without_name(found)), clean(without_name(wanted))
    return squashed(found) == squashed(wanted) or same(found, wanted)


def _name(equation: str) -> str:
    return equation.partition("=")[0].strip()
