"""The frame of an answer: the filler words around the gold.

The text beside the gold is the frame and a rest, whatever separates them. Without a rest the answer
names the gold alone; a rest that reads as a whole answer is a second one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from agentenv.envs.grading.text import Tables, unify

_TABLES = Tables("frame")
ANSWERING = _TABLES.words("answering")
GUESSING = _TABLES.words("guessing")
FRAME = ANSWERING | GUESSING | _TABLES.words("joining")
_BEFORE_BUT = ANSWERING | _TABLES.words("retracted")
MASK = "\0"  # in place of the gold
_SURE = _TABLES.pattern("sure", re.IGNORECASE)
_NUMBERED = _TABLES.pattern("numbered", re.IGNORECASE)
_TAG = _TABLES.pattern("tag", re.IGNORECASE)
_NEXT = _TABLES.pattern("next", re.IGNORECASE)
_NAME_BEFORE = _TABLES.pattern("name_before")
_NAME_AFTER = _TABLES.pattern("name_after")
_WORD = re.compile(r"[^\W\d_]+")
_PUNCTUATION = re.compile(r"""(?:[^\W\d_]|[\s.,;:!'"()\[\]{}*#>`$-])*""")
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
    is_word = is_word or {*golds[0].casefold().split()} <= FRAME
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
    return is_left and {*_words(f"{before} {after}")} <= ANSWERING


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]
