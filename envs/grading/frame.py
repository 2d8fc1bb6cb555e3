"""The frame of an answer: the words of answering round the gold, which name nothing themselves.

What stands beside the gold is the frame and a rest, whatever separates them. Without a rest the
answer names the gold alone; a rest that reads as a whole answer is a second one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec import Struct

from agentenv.envs.grading.text import Joint, Tables, unify

_TABLES = Tables("frame")
_SAID = _TABLES.words("said")
_BEFORE_BUT = _SAID | _TABLES.words("taken_back")
_JOINS = _TABLES.words("joining")
_JOINING = _SAID | _JOINS
_SURE = _TABLES.pattern("sure", re.IGNORECASE)
_NUMBERED = _TABLES.pattern("numbered", re.IGNORECASE)
_TAG = _TABLES.pattern("tag", re.IGNORECASE)
_OBJECT = _TABLES.pattern("object", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+")
_PUNCTUATION = re.compile(r"""(?:[^\W\d_]|[\s.,;:!'"()\[\]{}*#>`$-])*""")
_BUT = re.compile(r"\b(?:but|however)\b", re.IGNORECASE)
_BEFORE, _AFTER = r"""(?:^|(?<=[\s"'(\[{*`$]))""", r"""(?=$|[\s"')\]}*`$]|[.,;:!]+(?:\W|$))"""
_COPULA = re.compile(r"(?:^|[^\w\s]|\b(?:is|be|was|says?))\s*$", re.IGNORECASE)
_ALONE = r"(?<![A-Za-z\d$-])(?<!\d[.,/:])", r"(?![A-Za-z\d]|[.,/:]\d)"
_SCRIPT = re.compile(r"[\u0370-\u06ff\u0900-\u0eff\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]+")
_START, _END = r"(?:[^\w\\(\[{$+-]|[-+](?=\s)|[({\[](?=[A-Za-z])|_)*", r"(?:[^\w)\]}$%!]|_)*$"
_FIRST = re.compile(rf"{_START}((?:[A-Za-z]+|{_SCRIPT.pattern}))(?![\w(^])")
_LAST = re.compile(rf"(?<![\w\\])([A-Za-z]+|{_SCRIPT.pattern})[)\]]?{_END}")
_EDGES = re.compile(_START), re.compile(_END)
_JOINTS: dict[str, Joint] = {"(": "bracket", ",": "comma", ":": "colon", "-": "dash", "=": "equals"}


def _bare(text: str) -> str:
    return _NUMBERED.sub(" ", _SURE.sub(" ", _TAG.sub(" ", unify(text)))).strip()


def is_framed(text: str, gold: str, *, is_word: bool) -> bool:
    """Whether a text is the gold, word for word, in a frame that denies and doubts nothing. A gold
    that `is_word` of the frame itself, as yes and the letter A are, stands alone in it."""
    gold = unify(gold).strip().rstrip(".")
    parts = re.split(_BEFORE + re.escape(gold) + _AFTER, _bare(text)) if gold else []
    if len(parts) < 2 or not all(map(_PUNCTUATION.fullmatch, parts)):
        return False
    before, after = parts[0], " ".join(parts[1:])
    words = {*_words(gold)}
    is_word = is_word or (bool(words) and words <= _JOINING)
    if is_word and not (_COPULA.search(before) and re.match(r"\W*$|[^\w\s]", after)):
        return False
    if _BUT.search(after) or re.search(r"\b(?:above|before|from|of|by|more|s)\W*$|[-+]\W*$", before):
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
        return "" if _WORD.search(signs) else _JOINTS.get(signs[:1], "")

    @property
    def is_joined(self) -> bool:
        """Whether nothing but signs and words that join two answers stand between the two."""
        return not {*_words(self.between)} & _SAID - _JOINS


def rests(text: str, gold: str) -> Iterator[Rest]:
    """The text before, between and after the mentions of the gold, each without the frame at its
    ends; none that a preposition makes a part of a longer phrase."""
    gold = unify(gold).strip().rstrip(".")
    parts = re.split(_ALONE[0] + re.escape(gold) + _ALONE[1], _bare(text)) if gold else []
    for place, part in enumerate(parts if len(parts) > 1 else ()):
        start, end = 0, len(part)
        while match := _FIRST.match(part, start, end):
            if not _is_frame(match[1]):
                break
            start = match.end()
        while match := _LAST.search(part, start, end):
            if not _is_frame(match[1]):
                break
            end = match.start()
        start = _EDGES[0].match(part, start, end).end()  # type: ignore[union-attr]
        end = _EDGES[1].search(part, start, end).start()  # type: ignore[union-attr]
        if start < end and not _OBJECT.search(part[:start]):
            is_before = place == 0
            yield Rest(part[start:end], part[end:] if is_before else part[:start], is_before)


def _is_frame(word: str) -> bool:
    return word.casefold() in _JOINING or _SCRIPT.fullmatch(word) is not None
