"""The frame of an answer: the words of answering round the gold, which name nothing themselves.

What stands beside the gold is the frame and a rest, whatever separates them. Without a rest the
answer names the gold alone; a rest that reads as a whole answer is a second one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from agentenv.envs.grading.text import Joint, Tables, unify

_TABLES = Tables("frame")
_ARTICLES = {"a", "an", "the"}
_SAID = _TABLES.words("said")
_BEFORE_BUT = _SAID | _TABLES.words("taken_back")
_JOINS = _TABLES.words("joining")
_JOINING = _SAID | _JOINS
_SURE = _TABLES.pattern("sure", re.IGNORECASE)
_NUMBERED = _TABLES.pattern("numbered", re.IGNORECASE)
_TAG = _TABLES.pattern("tag", re.IGNORECASE)
_OBJECT = _TABLES.pattern("object", re.IGNORECASE)
_TAKEN_BACK = _TABLES.pattern("taken_back", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+")
_PUNCTUATION = re.compile(r"""(?:[^\W\d_]|[\s.,;:!'"()\[\]{}*#>`$-])*""")
_BUT = re.compile(r"\b(?:but|however)\b", re.IGNORECASE)
_WHOLE = r"""(?:^|(?<=[\s"'(\[{*`$]))""", r"""(?=$|[\s"')\]}*`$]|[.,;:!]+(?:\W|$))"""
_CITED = re.compile(r"^\d[.)]\s+|\[\d{1,2}\]")
_ALTERED = re.compile(r"\b(?:above|before|from|of|by|more)\W*$", re.IGNORECASE)  # above 13
_LETTERS = re.compile(r"\b[A-HJ-Z]\b")
_LETTER = re.compile(r"\b[A-HJ-Z]\b(?!\s+\w|')")  # of an option, no article
_ALONE = r"(?<![A-Za-z\d$-])(?<!\d[.,/:])", r"(?![A-Za-z\d]|[.,/:]\d)"
_SCRIPT = re.compile(r"[\u0370-\u06ff\u0900-\u0eff\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]+")
_START, _END = r"(?:[^\w\\(\[{$+-]|[-+](?=\s)|[({\[](?=[A-Za-z])|_)*", r"(?:[^\w)\]}$%!]|_)*$"
_FIRST = re.compile(rf"{_START}([A-Za-z]+(?![\w(^])|{_SCRIPT.pattern})")
_LAST = re.compile(rf"((?<![\w\\])[A-Za-z]+|{_SCRIPT.pattern})[)\]]?{_END}")
_EDGES = re.compile(_START), re.compile(_END)
_JOINTS: dict[str, Joint] = {"(": "bracket", ",": "comma", ":": "colon", "-": "dash", "=": "equals"}


def _parts(text: str, golds: Sequence[str], ends: tuple[str, str]) -> list[str]:
    """The text around the mentions of the gold, in any of its forms."""
    forms = {unify(gold).strip().rstrip(".") for gold in golds} - {""}
    text = _NUMBERED.sub(" ", _SURE.sub(" ", _TAG.sub(" ", unify(text)))).strip()
    if not any(re.search(r"\d", form) for form in forms):
        text = _CITED.sub(" ", text).strip()
    either = "|".join(map(re.escape, sorted(forms, key=len, reverse=True)))
    return re.split(f"{ends[0]}(?:{either}){ends[1]}", text) if forms else []


def is_framed(text: str, golds: Sequence[str], *, is_word: bool) -> bool:
    """Whether a text is the gold, word for word in one of its forms, in a frame that denies and
    doubts nothing. A gold that `is_word` of the frame itself, as yes and the letter A are, ends a
    clause of it."""
    parts = _parts(text, golds, _WHOLE)
    if len(parts) < 2 or not all(map(_PUNCTUATION.fullmatch, parts)):
        return False
    before, after = parts[0], " ".join(parts[1:])
    is_word = is_word or {*golds[0].casefold().split()} <= _JOINING
    if is_word and (
        not re.match(r"\W*$|\s*[^\w\s]", after) or _LETTERS.search(f"{before} {after}")
    ):
        return False
    if _BUT.search(after) or _LETTER.search(f"{before} {after}") or _ALTERED.search(before):
        return False
    if not golds[0].strip()[:1].isalpha() and re.search(r"[-+]\W*$", before):
        return False
    *rejected, before = _BUT.split(before)
    is_left = {*_words(" ".join(rejected))} <= _BEFORE_BUT
    return is_left and {*_words(f"{before} {after}")} <= _SAID


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


class Rest(Struct, frozen=True):
    """What stands beside the gold and is no frame, and the words between the two."""

    text: str
    between: str
    is_before: bool

    @property
    def joint(self) -> Joint:
        """How it is attached to the gold."""
        signs = self.between.strip()
        return "" if {*_words(signs)} - _ARTICLES else _JOINTS.get(signs[:1], "")

    @property
    def is_joined(self) -> bool:
        """Whether nothing but signs and words that join two answers stand between the two."""
        return not {*_words(self.between)} & (_SAID - _JOINS)


def rests(text: str, golds: Sequence[str]) -> Iterator[Rest]:
    """The text before, between and after the mentions of the gold, each without the frame at its
    ends; none that a preposition makes a part of a longer phrase."""
    parts = _parts(text, golds, _ALONE)
    for place, part in enumerate(parts if len(parts) > 1 else ()):
        start, end = 0, len(part)
        while match := _FIRST.match(part, start, end):
            if not _is_frame(part, match):
                break
            start = match.end()
        while match := _LAST.search(part, start, end):
            if not _is_frame(part, match):
                break
            end = match.start()
        start = _EDGES[0].match(part, start, end).end()  # type: ignore[union-attr]
        end = _EDGES[1].search(part, start, end).start()  # type: ignore[union-attr]
        is_before = place == 0
        between = part[end:] if is_before else part[:start]
        if start == end or (not between.strip() and len(between) < 2) or _OBJECT.search(between):
            continue  # nothing, or a part of a longer phrase
        if not (is_before and _TAKEN_BACK.search(f"{part[:start]}@{between}")):
            yield Rest(part[start:end], between, is_before)


def _is_frame(part: str, match: re.Match[str]) -> bool:
    """Whether a word is one of the frame, and of no name: United States."""
    word, before = match[1], part[: match.start(1)]
    if word[0].isupper() and word != "I" and (len(word) == 1 or re.search(r"\w\s+$", before)):
        return False
    return word.casefold() in _JOINING or _SCRIPT.fullmatch(word) is not None
