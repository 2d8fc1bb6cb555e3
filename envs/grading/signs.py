"""Signs that carry a value in words: x > 5, A -> B, C++, blood type A-, a profit of -3; a named A.

Each has one form here, a sign or a word, whichever way it is written; what is punctuation (hyphens
in words, ranges, dates, dashes, bullets) has none.
"""

from __future__ import annotations

import re
import unicodedata

from agentenv.envs.grading.tables import Tables

MINUS = "\N{MINUS SIGN}"  # texts hold hyphens only, once they are unified
_BACK, _BOTH_WAYS = "\N{LEFTWARDS ARROW}", "\N{LEFT RIGHT ARROW}"
_AT_MOST, _AT_LEAST = "\N{LESS-THAN OR EQUAL TO}", "\N{GREATER-THAN OR EQUAL TO}"
_UNEQUAL, _EITHER = "\N{NOT EQUAL TO}", "\N{PLUS-MINUS SIGN}"
SIGNS = f"<>{_AT_MOST}{_AT_LEAST}{_UNEQUAL}{_BACK}{_BOTH_WAYS}{_EITHER}"
NAMED_A = "\N{FULLWIDTH LATIN SMALL LETTER A}"  # a name, which is no article

_TABLES = Tables(__file__, signs=SIGNS)
_WORDS = frozenset({"a", "plus", "minus", "sharp", "flat", "star"})

_COMMANDS: dict[str, str] = _TABLES["commands"]
_FORMAT = _TABLES.words("format")
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_TAG = re.compile(r"</?[a-z][a-z\d]*(?:\s[^<>]*)?/?>|^>\s+(?=[^\W\d])", re.MULTILINE)
_FORMS = _TABLES.rewrites("forms")

_GREEK = re.compile("(?<![\u0370-\u03ff])[\u0391-\u03c9](?![\u0370-\u03ff])")

# A.

_A = re.compile(r"(?<![\w'.])[Aa](?![\w'.])")
_LETTERED = _TABLES.pattern("lettered", re.IGNORECASE)
_BEHIND_A_NAME = _TABLES.pattern("behind_a_name")


def signed(text: str) -> str:
    """A unified text with its signs in one form each, and LaTeX commands as words."""
    text = _GREEK.sub(_greek, _COMMAND.sub(_named, _TAG.sub(" ", text)))
    for form, plain in _FORMS:
        text = form.sub(plain, text)
    return text


def named_a(text: str) -> str:
    """The text with each A marked that is a name: hepatitis A, plan A, A+, the last word."""

    def marked(match: re.Match[str]) -> str:
        before, behind = text[: match.start()], text[match.end() :]
        is_name = (
            _BEHIND_A_NAME.match(behind)
            or _LETTERED.search(before[-20:])
            or (match[0] == "A" and before.strip() and re.match(r"\s+[a-z]", behind))
        )
        return NAMED_A if is_name and len(text.strip()) > 1 else match[0]

    return _A.sub(marked, text)


def is_sign(token: str) -> bool:
    """Whether a token is a sign, a number below zero or a named A."""
    return token in SIGNS or token.startswith(MINUS) or token in _WORDS


def _named(match: re.Match[str]) -> str:
    name = match[1]
    return " " if name in _FORMAT else f" {_COMMANDS.get(name, name)} "


def _greek(match: re.Match[str]) -> str:
    return f" {unicodedata.name(match[0]).rpartition(' ')[2].lower()} "
