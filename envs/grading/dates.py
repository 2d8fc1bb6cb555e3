"""Dates by dateutil, and times of day."""

from __future__ import annotations

import importlib
import re
from datetime import datetime

from envs.grading.numbers import han_as_digits

MAX_CHARS = 60
_MONTH = (
    r"(?:jan|feb|mar|apr|may|jun|jul|aug|sept?|oct|nov|dec)\b\.?|january|february|march|april"
    r"|june|july|august|september|october|november|december"
)
_FILLER = re.compile(r"\b(?:of|the|on|in|month|day)\b|(?<=\d)(?:st|nd|rd|th)\b|,")
_WEEKDAY = re.compile(r"\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b")
_NAMED = re.compile(rf"(?:\d{{1,4}}\s+){{0,2}}(?:{_MONTH})(?:\s+\d{{1,4}}){{0,2}}")
_ORDERED = re.compile(r"\d{4}([-/.])\d{1,2}(?:\1\d{1,2})?")
_EITHER = re.compile(r"\d{1,2}([-/.])\d{1,2}\1\d{4}")
_MONTH_YEAR = re.compile(r"(\d{1,2})[-/.](\d{4})")
_HAN = re.compile("(\\d{4})\\s*\u5e74\\s*(\\d{1,2})\\s*\u6708(?:\\s*(\\d{1,2})\\s*[\u65e5\u53f7])?")
_TIME = re.compile(r"(\d{1,2})(?::(\d{2}))?(?::00)?\s*([ap])\.?\s*m\.?", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?:\s*(?:hours|h))?", re.IGNORECASE)
# what a text leaves out is filled in by dateutil, and differs between the two
_FILLED = (datetime(2000, 1, 1), datetime(2004, 2, 2))

Date = tuple[int, int, int]


def dates(text: str) -> frozenset[Date]:
    """What (year, month, day) the text may mean, 0 for what it leaves out; empty for no date."""
    if len(text) > MAX_CHARS:
        return frozenset()
    text = _WEEKDAY.sub(" ", text.strip().lower(), count=1)
    text = " ".join(_FILLER.sub(" ", text).split()).rstrip(".")
    han = _HAN.fullmatch(han_as_digits(text) if "\u5e74" in text else text)
    if han is not None:
        text = "-".join(part.zfill(2) for part in han.groups() if part)
    month_year = _MONTH_YEAR.fullmatch(text)
    if month_year is not None:
        text = f"{month_year[2]}-{month_year[1].zfill(2)}"
    if _EITHER.fullmatch(text):
        return _parsed(text, day_first=True) | _parsed(text, day_first=False)
    if _ORDERED.fullmatch(text):
        return _parsed(re.sub(r"[/.]", "-", text), day_first=False)
    if _NAMED.fullmatch(text):
        return _parsed(re.sub(r"\b(\d{3})\b", r"0\1", text), day_first=False)
    return frozenset()


def _parsed(text: str, *, day_first: bool) -> frozenset[Date]:
    parse = importlib.import_module("dateutil.parser").parse
    try:
        one, other = (parse(text, default=filled, dayfirst=day_first) for filled in _FILLED)
    except (ValueError, OverflowError):
        return frozenset()
    pairs = zip(one.timetuple()[:3], other.timetuple()[:3], strict=True)
    year, month, day = (a if a == b else 0 for a, b in pairs)
    return frozenset({(year, month, day)})


def minutes(text: str) -> int | None:
    """Minutes since midnight of a time of day such as 3 pm or 15:00."""
    match = _TIME.fullmatch(text.strip())
    if match is not None and 1 <= int(match[1]) <= 12:
        return int(match[1]) % 12 * 60 + int(match[2] or 0) + (720 if match[3] in "pP" else 0)
    match = _CLOCK.fullmatch(text.strip())
    if match is not None and int(match[1]) < 24 and int(match[2]) < 60:
        return int(match[1]) * 60 + int(match[2])
    return None
