"""The frame of an answer: the filler words around the gold.

The text beside the gold is the frame and a rest, whatever separates them. Without a rest the answer
names the gold alone; a rest that reads as a whole answer is a second one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct

from agentenv.envs.grading.parts import (
    is_number,
)
from agentenv.envs.grading.quantities import unit_of
from agentenv.envs.grading.sentences import has_verb
from agentenv.envs.grading.text import Joint, Tables, unify

_TABLES = Tables("frame")
_ARTICLES = {"a", "an", "the"}
_ANSWERING = _TABLES.words("answering")
_BEFORE_BUT = _ANSWERING | _TABLES.words("retracted")
_JOINS = _TABLES.words("joining")
_JOINING = _ANSWERING | _JOINS
FRAME = _JOINING
MASK = "\0"  # in place of the gold
_SURE = _TABLES.pattern("sure", re.IGNORECASE)
_NUMBERED = _TABLES.pattern("numbered", re.IGNORECASE)
_TAG = _TABLES.pattern("tag", re.IGNORECASE)
_NEXT = _TABLES.pattern("next", re.IGNORECASE)
_OBJECT = _TABLES.pattern("object", re.IGNORECASE)
_NAME_BEFORE = _TABLES.pattern("name_before")
_NAME_AFTER = _TABLES.pattern("name_after")
_RETRACTED = _TABLES.pattern("retracted", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+")
_PUNCTUATION = re.compile(r"""(?:[^\W\d_]|[\s.,;:!'"()\[\]{}*#>`$-])*""")
_APART = re.compile(r"[^\w\s]|\b(?:and|or|but|while|whereas|then)\b", re.IGNORECASE)
_ADJACENT = re.compile(r"\s?(?:(?:an?|the)\s)?", re.IGNORECASE)
_BUT = re.compile(r"\b(?:but|however)\b", re.IGNORECASE)
_WHOLE = r"""(?:^|(?<=[\s"'(\[{*`$]))""", r"""(?=$|[\s"')\]}*`$]|[.,;:!]+(?:\W|$))"""
_CITED = re.compile(r"^\d[.)]\s+|\[\d{1,2}\]")
_ALTERED = re.compile(  # above 13
    r"\b(?:above|before|after|since|up to|from|of|by|more|"
    r"(?:all|any\w*|every\w*) but(?: the)?)\W*$",
    re.IGNORECASE,
)
_LETTERS = re.compile(r"\b[A-HJ-Z]\b")
_LETTER = re.compile(r"\b[A-HJ-Z]\b(?!\s+\w|')")  # of an option, no article
_ALONE = r"(?<![A-Za-z\d-])(?<!\d[.,/:])(?<!frac\{)(?<!\}\{)", r"(?![A-Za-z\d]|[.,/:]\d)"
_SCRIPT = re.compile(r"[\u0370-\u06ff\u0900-\u0eff\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]+")
_TOKEN = re.compile(
    rf"(?P<word>(?<![\\\w])[A-Za-z]+(?![\w(^])|{_SCRIPT.pattern})|(?P<sign>[^\w\s]|_)|\w+"
)
_OPENS = re.compile(r"\\|\$(?=\d)|[(\[{](?![A-Za-z'\"])|[-+](?=\S)")  # a formula
_CLOSES = re.compile(r"[%!]|(?<![A-Za-z'\"])[)\]}]")
_JOINTS: dict[str, Joint] = {"(": "bracket", ",": "comma", ":": "colon", "-": "dash", "=": "equals"}


def _parts(text: str, golds: Sequence[str], ends: tuple[str, str]) -> list[str]:
    """The text around the mentions of the gold, in any of its forms."""
    forms = {_plain(gold).rstrip(".") for gold in golds} - {""}
    text = _plain(text)
    if not any(re.search(r"\d", form) for form in forms):
        text = _CITED.sub(" ", text).strip()
    if not any(map(_SCRIPT.search, forms)):
        text = _SCRIPT.sub(r" \g<0> ", text)
    either = "|".join(map(re.escape, sorted(forms, key=len, reverse=True)))
    return re.split(f"{ends[0]}(?:{either}){ends[1]}", text) if forms else []


def _plain(text: str) -> str:
    """The text without tags, words of certainty and numbers of sources."""
    return _NEXT.sub("or", _NUMBERED.sub(" ", _SURE.sub(" ", _TAG.sub(" ", unify(text))))).strip()


def masked(text: str, golds: Sequence[str]) -> str:
    """A text with a mask for each mention of the gold; "" if there is none."""
    parts = _parts(text, golds, _ALONE)
    return f" {MASK} ".join(parts) if len(parts) > 1 else ""


def is_framed(text: str, golds: Sequence[str], *, is_word: bool) -> bool:
    """Whether a text is the gold, word for word in one of its forms, in a frame that denies and
    doubts nothing. A gold that `is_word` of the frame itself, such as yes or the letter A, must end
    a clause."""
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
    if golds[0].strip()[:1].isalpha():
        if any(map(_NAME_BEFORE.search, parts[:-1])) or any(map(_NAME_AFTER.match, parts[1:])):
            return False
    elif re.search(r"[-+]\W*$", before):
        return False
    *rejected, before = _BUT.split(before)
    is_left = {*_words(" ".join(rejected))} <= _BEFORE_BUT
    return is_left and {*_words(f"{before} {after}")} <= _ANSWERING


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


class Rest(Struct, frozen=True):
    """The text beside the gold that is no frame, and the words between the two."""

    text: str
    between: str
    is_before: bool

    @property
    def joint(self) -> Joint:
        """The joint between the rest and the gold."""
        signs = self.between.strip(" \"'*`")
        signs = signs if self.is_before else f"{signs}{self.text}"
        return "" if {*_words(self.between)} - _ARTICLES else _JOINTS.get(signs[:1], "")

    @property
    def is_one_clause(self) -> bool:
        """Whether one of the two is predicated of the other: Spain has Madrid as its capital."""
        return not self.is_joined and not _APART.search(self.between)

    @property
    def is_joined(self) -> bool:
        """Whether only signs and words that join two answers are between the two."""
        return not {*_words(self.between)} & (_ANSWERING - _JOINS)

    @property
    def is_known(self) -> bool:
        """Whether each word between the two is one of the frame."""
        return {*_words(self.between)} <= _JOINING


def rests(text: str, golds: Sequence[str]) -> Iterator[Rest]:
    """The text before, between and after the mentions of the gold, each without the frame at its
    ends, except texts that a preposition makes a part of a longer phrase."""
    parts = _parts(text, golds, _ALONE)
    for place, part in enumerate(parts if len(parts) > 1 else ()):
        tokens = [*_TOKEN.finditer(part)]
        first, last = 0, len(tokens)
        for is_last in (False, False, True):  # up to two unknown words beside the gold
            while first < last and _is_frame(part, tokens[first], _OPENS):
                first += 1
            while first < last and _is_frame(part, tokens[last - 1], _CLOSES):
                last -= 1
            if is_last or last - first < 2:
                break
            word = tokens[first if place else last - 1]
            if not _joins(part, word):
                break
            first, last = (first + 1, last) if place else (first, last - 1)
        if first == last:
            continue
        start, end = tokens[first].start(), tokens[last - 1].end()
        between = part[:start] if place else part[end:]
        is_phrase = _ADJACENT.fullmatch(between) is not None
        if is_phrase or any(map(_OBJECT.search, (between, "" if place else part[:start]))):
            continue  # a part of a longer phrase
        if place or not _RETRACTED.search(f"{part[:start]}@{between}"):
            yield Rest(part[start:end], between, not place)


def _is_frame(part: str, token: re.Match[str], edge: re.Pattern[str]) -> bool:
    """Whether a token is a sign that begins or ends no formula, or a word of the frame that belongs
    to no name (United States)."""
    word = token["word"]
    if word is None:
        return token["sign"] is not None and edge.match(part, token.start()) is None
    is_name = len(word) == 1 or re.search(r"\w\s+$", part[: token.start()][-20:])
    if word[0].isupper() and word != "I" and is_name:
        return False
    return word.casefold() in _JOINING or _SCRIPT.fullmatch(word) is not None


def _joins(part: str, token: re.Match[str]) -> bool:
    """Whether a token is a single unknown word between spaces, such as "eller"."""
    word = token[0]
    return (
        re.fullmatch(r"[\s.]\s?|", f"{part[token.end() :][:1]}") is not None
        and re.fullmatch(r"[^\W\d_]{1,7}", word) is not None
        and word.islower()
        and not word.endswith(("s", "ed", "ing", "ly"))
        and not has_verb(word)
        and unit_of(word) is None
        and not is_number(word)
    )
