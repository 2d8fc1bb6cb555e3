"""Dates by dateutil, and times of day."""

from __future__ import annotations

import importlib
import re
from datetime import datetime

from agentenv.envs.grading.han import han_as_digits
from agentenv.envs.grading.numbers import words_as_digits
from agentenv.envs.grading.tables import Tables

_TABLES = Tables(__file__)

MAX_CHARS = 60
MONTH = _TABLES.text("month")
_FILLER = re.compile(r"\b(?:of|the|on|in|month|day|year|date)\b|(?<=\d)(?:st|nd|rd|th)\b|,")
_HOLIDAYS = _TABLES.rewrites("holidays")
_NTH_MONTH = re.compile(r"\b(?:the )?(\d{1,2})(?:st|nd|rd|th) month\b")
MONTHS: list[str] = _TABLES["months"]
_DASHED = re.compile(rf"(\d{{1,2}})-({MONTH})-(\d{{4}})")
_WEEKDAY = re.compile(r"\b(?:mon|tues|wednes|thurs|fri|satur|sun)day\b")
_NAMED = re.compile(rf"(?:\d{{1,4}}\s+){{0,2}}(?:{MONTH})(?:\s+\d{{1,4}}){{0,2}}")
_ORDERED = re.compile(r"\d{4}([-/.])\d{1,2}(?:\1\d{1,2})?")
_COMPACT = re.compile(r"(?:1[5-9]|20)\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])")
_EITHER = re.compile(r"\d{1,2}([-/.])\d{1,2}\1(?:\d{4}|\d{2})")
_MONTH_YEAR = re.compile(r"(\d{1,2})[-/.](\d{4})")
_HAN_DAY = re.compile("(\\d{1,2})\\s*\u6708\\s*(\\d{1,2})\\s*[\u65e5\u53f7]")
_HAN = re.compile("(\\d{4})\\s*\u5e74\\s*(\\d{1,2})\\s*\u6708(?:\\s*(\\d{1,2})\\s*[\u65e5\u53f7])?")
_TIME = _TABLES.pattern("time", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?:\s*(?:hours|hrs|h))?", re.IGNORECASE)
_PAST = re.compile(r"(half|quarter|\d{1,2}(?: minutes)?) (past|to) (\d{1,2})\b(.*)", re.IGNORECASE)
_NOON = {"noon": 720, "midday": 720, "midnight": 0, "12 noon": 720, "12 midnight": 0}
_HAN_TIME = _TABLES.pattern("han_time")
# what a text leaves out is filled in by dateutil, and differs between the two
_FILLED = (datetime(2000, 1, 1), datetime(2004, 2, 2))

Date = tuple[int, int, int]


def dates(text: str) -> frozenset[Date]:
    """What (year, month, day) the text may mean, 0 for what it leaves out; empty for no date."""
    if len(text) > MAX_CHARS:
        return frozenset()
    text = words_as_digits(_WEEKDAY.sub(" ", text.strip().lower(), count=1))
    text = _DASHED.sub(r"\1 \2 \3", _NTH_MONTH.sub(_month, text))
    for name, date in _HOLIDAYS:
        text = name.sub(date, text)
    text = " ".join(_FILLER.sub(" ", text).split()).rstrip(".")
    digits = han_as_digits(text) if re.search("[\u5e74\u6708]", text) else text
    day = _HAN_DAY.fullmatch(digits)
    if day is not None:
        return frozenset({(0, int(day[1]), int(day[2]))})
    han = _HAN.fullmatch(digits)
    if han is not None:
        text = "-".join(part.zfill(2) for part in han.groups() if part)
    month_year = _MONTH_YEAR.fullmatch(text)
    if month_year is not None:
        text = f"{month_year[2]}-{month_year[1].zfill(2)}"
    if _EITHER.fullmatch(text):
        return _parsed(text, day_first=True) | _parsed(text, day_first=False)
    if _COMPACT.fullmatch(text):
        return _parsed(text, day_first=False)
    if _ORDERED.fullmatch(text):
        return _parsed(re.sub(r"[/.]", "-", text), day_first=False)
    if _NAMED.fullmatch(text):
        return _parsed(re.sub(r"\b(\d{3})\b", r"0\1", text), day_first=False)
    return frozenset()


def _month(match: re.Match[str]) -> str:
    number = int(match[1])
    return MONTHS[number - 1] if 1 <= number <= 12 else match[0]


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
    """Minutes since midnight of a time of day: 3 pm, 15:00, half past three in the afternoon."""
    text = " ".join(words_as_digits(text.strip().lower()).split()) if len(text) < MAX_CHARS else ""
    text = re.sub(r"^(?:at|a(?= quarter)) ", "", re.sub(r"^at ", "", text))
    if text in _NOON:
        return _NOON[text]
    past = _PAST.fullmatch(text)
    if past is not None:
        amount = {"half": 30, "quarter": 15}.get(past[1]) or int(past[1].split()[0])
        hour = int(past[3]) - (past[2] == "to")
        text = f"{hour}:{amount if past[2] == 'past' else 60 - amount:02}{past[4]}"
    match = _TIME.fullmatch(text)
    if match is not None and 1 <= int(match["hour"]) <= 12:
        is_late = match["half"] == "p" or match["part"] in ("afternoon", "evening")
        is_late = is_late or (match["night"] is not None and int(match["hour"]) >= 6)
        return int(match["hour"]) % 12 * 60 + int(match["minute"] or 0) + (720 if is_late else 0)
    match = _CLOCK.fullmatch(text)
    if match is not None and int(match[1]) < 24 and int(match[2]) < 60:
        return int(match[1]) * 60 + int(match[2])
    match = _HAN_TIME.fullmatch(han_as_digits(re.sub("\u70b9\u949f?", "\u65f6", text)))
    if match is not None and int(match["hour"]) < 24:
        is_late = match["part"] in ("\u4e0b\u5348", "\u665a\u4e0a") and int(match["hour"]) < 12
        minute = 30 if match["half"] else int(match["minute"] or match["clock"] or 0)
        return int(match["hour"]) * 60 + minute + 720 * is_late
    return None
