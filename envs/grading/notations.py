"""Numbers in a base, ranges and ratios, degrees under a sine."""

from __future__ import annotations

import re

from envs.grading.words import tokens

_BASE = re.compile(r"([0-9A-Z]+)\s*_\s*\{?\s*(\w+)\s*\}?")
_RANGE = re.compile(r"(?:from\s+|between\s+)?([\d.]+)\s*(-|:|to|and)\s*([\d.]+)")


def in_base(found: str, wanted: str) -> bool | None:
    """Digits with a base as subscript; an answer may leave the base out."""
    gold = _BASE.fullmatch(wanted)
    if gold is None:
        return None
    answer = _BASE.fullmatch(found)
    if answer is None:
        return found == gold[1]
    return answer[1] == gold[1] and tokens(answer[2]) == tokens(gold[2])


def same_range(found: str, wanted: str) -> bool | None:
    """1939-1945 and from 1939 to 1945; 3:2 and 3 to 2. None when either is no such pair."""
    answer, gold = _RANGE.fullmatch(found), _RANGE.fullmatch(wanted)
    if answer is None or gold is None:
        return None
    if answer[2] != gold[2] and "to" not in (answer[2], gold[2]):
        return None
    return (answer[1], answer[3]) == (gold[1], gold[3])


def in_radians(text: str) -> str:
    """Degrees under a trigonometric function as radians; elsewhere the sign is dropped."""
    if re.search(r"\\(?:sin|cos|tan|cot|sec|csc)", text):
        return re.sub(r"(\d+(?:\.\d+)?)\s*\N{DEGREE SIGN}", r"(\\frac{\1\\pi}{180})", text)
    return text.replace("\N{DEGREE SIGN}", "")
