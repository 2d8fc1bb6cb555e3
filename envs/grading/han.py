"""Numbers in Chinese characters, up to thousands."""

from __future__ import annotations

import re
from fractions import Fraction

_HAN = {
    sign: number
    for number, sign in enumerate("\u96f6\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d")
} | {"\u4e24": 2, "\u3007": 0}
_HAN_SCALE = {"\u5341": 10, "\u767e": 100, "\u5343": 1000}
_HAN_NUMBER = re.compile(
    "[\u96f6\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d\u4e24\u3007\u5341\u767e\u5343]{1,12}"
)


def in_han(text: str) -> tuple[Fraction, str] | None:
    """The number that the text begins with, and what follows it."""
    match = _HAN_NUMBER.match(text)
    if match is None:
        return None
    total = digit = 0
    if all(sign in _HAN for sign in match[0]):  # digits one by one, as in a year
        return Fraction("".join(str(_HAN[sign]) for sign in match[0])), text[match.end() :]
    for sign in match[0]:
        if sign in _HAN:
            digit = _HAN[sign]
        else:
            total, digit = total + (digit or 1) * _HAN_SCALE[sign], 0
    return Fraction(total + digit), text[match.end() :]
