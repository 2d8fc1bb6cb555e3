"""What separates two parts of an answer, from the strongest to the weakest: lines, sentences, words
such as "or" and "aka", brackets, dashes, colons, commas, signs of equality."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal

from agentenv.envs.grading.spelling import FRAME
from agentenv.envs.grading.tables import Tables

_TABLES = Tables(__file__, frame=FRAME)

# How a part is attached to the text before it: "" is a new start, as after a full stop; "or" is an
# alternative, which describes nothing that stands beside it.
Joint = Literal["", "or", "alias", "bracket", "dash", "colon", "comma", "list", "equals"]
Cut = Callable[[str], list[str]]

_LINES = _TABLES.pattern("lines")
_LABEL = re.compile(r"(?:^|(?<=[\s,;.(\"'{]))([^\W\d]+)\s?#?(?:\d{1,2})?[\"']?\s*[:=]\s*")
_SYMBOLS = _TABLES.pattern("symbols")
_SCRIPTS = _TABLES.pattern("scripts")
_MARKS = _TABLES.pattern("marks")
_ENUMERATED = re.compile(
    r"(?:^|(?<=\s))(?:\(?([1-9a-eA-E]|i{1,3}|iv|v)[).:]|#?([1-9])(?:[.)]|\s-))(?=\s)"
)
_END = _TABLES.pattern("end")
_ABBREVIATIONS = _TABLES.words("abbreviations")
_LAST_WORD = re.compile(r"(?:[^\W\d_]\.)*[^\W\d_]{1,9}$")
_NAMES = _TABLES.text("names")
_SUBJECT = _TABLES.text("subject")
_CLAUSE = _TABLES.pattern("clause", re.IGNORECASE)
_SPLICE = re.compile(rf",\s+(?={_SUBJECT}(?:'s|\s+(?:is|was|are|were|could|might|may))\s)", re.I)
_CAPITALS = re.compile(r"(?:[A-Z\d$\"][^\s,]{0,40}\s+){0,8}[A-Z\d$\"][^\s,]{0,40},\s")
_STATES = re.compile(rf"{_SUBJECT}(?:'s|\s+(?:is|was|are|were|could|might|may))\s", re.I)
_NAMED = re.compile(rf",?\s*(?<!\w)(?:{_NAMES})(?!\w),?:?\s*", re.IGNORECASE)
_WORDS = _TABLES.pattern("words", re.IGNORECASE)
_BRACKET = _TABLES.pattern("bracket")
_DASHES = _TABLES.pattern("dashes")
_COLONS = _TABLES.pattern("colons")
_COMMAS = _TABLES.pattern("commas")
_LISTS = _TABLES.pattern("lists")
EQUALS = _TABLES.pattern("equals")
_CORRECTION = _TABLES.pattern("correction", re.IGNORECASE)


def lines(text: str) -> list[str]:
    """Lines, and answers that are labelled as such."""
    return _LINES.split(text)


def labels(text: str) -> list[str]:
    """Around labels that come twice: Result: A Result: B; answer 1 = A, answer 2 = B."""
    found = list(_LABEL.finditer(text))
    names = [match[1].lower() for match in found]
    ends = [(match.start(), match.end()) for match in found if names.count(match[1].lower()) > 1]
    starts = [0, *(end for _, end in ends)]
    stops = [*(start for start, _ in ends), len(text)]
    return [text[start:stop] for start, stop in zip(starts, stops, strict=True)]


def symbols(text: str) -> list[str]:
    """Around signs that are no letters, digits or punctuation of a name, and words of another
    script than the text before and after."""
    return [part for piece in _SCRIPTS.split(text) for part in _SYMBOLS.split(piece)]


def marks(text: str) -> list[str]:
    """Cells, bullets, numbered alternatives, boxes and spans of markup that follow each other."""
    found = list(_ENUMERATED.finditer(text))
    values = [match[1] or match[2] for match in found]
    if len(values) > 1 and values[0] in ("1", "a", "A", "i") and len(set(values)) == len(values):
        ends = [0, *(match.start() for match in found), len(text)]
        pieces = [text[start:end] for start, end in pairwise(ends)]
        bare = [_ENUMERATED.sub("", piece, count=1) for piece in pieces]
        if all(piece.strip() for piece in bare[1:]):
            return [part for piece in bare for part in _MARKS.split(piece)]
    return _MARKS.split(text)


def sentences(text: str) -> list[str]:
    """What full stops, semicolons, marks and ellipses end; not abbreviations and initials."""
    found, start = [], 0
    for match in _END.finditer(text):
        if match["stop"] and _is_abbreviated(text[: match.start()], text[match.end() :]):
            continue
        found.append(text[start : match.start()])
        start = match.end()
    return [*found, text[start:]]


def _is_abbreviated(before: str, after: str) -> bool:
    word = _LAST_WORD.search(before[-20:])
    if word is None:
        return False
    short = word[0].lower()
    if len(short) == 1 and word[0].isupper():
        return word[0] not in "IVX"
    if short in ("no", "nos", "b", "d", "c", "r"):
        return after[:1].isdigit()
    return "." in short or (short in _ABBREVIATIONS and bool(after))


def named_again(text: str) -> list[str]:
    """Around aka, i.e. and "also known as"."""
    return _NAMED.split(text)


def clauses(text: str) -> list[str]:
    """Around "and it is" and "but the answer was", which begin a sentence of their own."""
    halves = _CLAUSE.split(text)
    return [
        one
        for half in halves
        for one in (_SPLICE.split(half) if _STATES.match(half) or _CAPITALS.match(half) else [half])
    ]


def alternatives(text: str) -> list[str]:
    """Around or, hence, possibly and the like, and arrows."""
    return _WORDS.split(text)


def corrections(text: str) -> list[str]:
    """Around no, wait, sorry and "the final answer is"."""
    found, start = [], 0
    for match in _CORRECTION.finditer(text):
        if not _is_condition(text, match):
            found.append(text[start : match.start()])
            start = match.end()
    return [*found, text[start:]]


def _is_condition(text: str, match: re.Match[str]) -> bool:
    """Whether a correction is only thought of, as in "if that is wrong", or is a label that two
    answers have: the final answer is 13, the final answer is 14."""
    before = text[: match.start()]
    is_repeated = "answer" in match[0].lower() and match[0].strip().lower() in before.lower()
    is_asked = text[match.end() :].rstrip(" .)]\"'").endswith("?")  # or rather Paris?
    return (
        is_repeated
        or is_asked
        or re.search(r"\b(?:if|unless|maybe|perhaps|possibly)\s*$", before, re.I) is not None
    )


def last_correction(text: str, *, is_truth: bool = False) -> Iterator[str]:
    """What follows each correction, the last first; `is_truth`: "no" is an answer and corrects
    nothing."""
    for match in reversed(list(_CORRECTION.finditer(text))):
        is_answer = is_truth and match[0].lower().startswith("no")
        if not is_answer and not _is_condition(text, match):
            yield text[match.end() :]


LEVELS: tuple[tuple[Joint, Cut], ...] = (
    ("or", marks),
    ("or", symbols),
    ("", lines),
    ("", corrections),
    ("", sentences),
    ("", clauses),
    ("alias", named_again),
    ("or", alternatives),
    ("bracket", _BRACKET.split),
    ("dash", _DASHES.split),
    ("colon", _COLONS.split),
    ("comma", _COMMAS.split),
    ("list", _LISTS.split),
    ("equals", EQUALS.split),
)
OF_A_CLAUSE = (alternatives, _COMMAS.split, _LISTS.split, EQUALS.split)  # these belong to a clause
OF_A_SENTENCE = tuple(cut for _, cut in LEVELS[6:])
