"""Dates, times of day, and ranges of numbers and dates: 7 to 10 percent,
March 3-5, at most 30, after 1850, once every five years, the mid-18th century.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from fractions import Fraction

from msgspec.structs import replace

from agentenv.envs.grading.numbers import han_as_digits, leading_number, words_as_digits
from agentenv.envs.grading.quantities import Quantity, quantity, same_quantity
from agentenv.envs.grading.text import Tables, rewritten

_DATE_TABLES = Tables("dates")

MAX_CHARS = 60
MONTH = _DATE_TABLES.text("month")
_MONTH = re.compile(rf"\b(?:{MONTH})")
_FIRST_LETTERS = "janfebmaraprmayjunjulaugsepoctnovdec"
_DATES = _DATE_TABLES.rewrites("dates")
_FORMS = _DATE_TABLES.patterns("forms")
_TIME = _DATE_TABLES.pattern("time", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?:\s*(?:hours|hrs|h))?", re.IGNORECASE)
_PAST = re.compile(r"(half|quarter|\d{1,2}(?: minutes)?) (past|to) (\d{1,2})\b(.*)", re.IGNORECASE)
_NOON = {"noon": 720, "midday": 720, "midnight": 0, "12 noon": 720, "12 midnight": 0}
_HAN_TIME = _DATE_TABLES.pattern("han_time")
Date = tuple[int, int, int]


def dates(text: str) -> frozenset[Date]:
    """Each (year, month, day) that the text may mean, 0 for an omitted part; empty for no date."""
    if len(text) > MAX_CHARS:
        return frozenset()
    text = words_as_digits(text.strip().lower())
    text = han_as_digits(text) if re.search("[\u5e74\u6708]", text) else text
    text = _MONTH.sub(_in_digits, rewritten(text, _DATES))
    text = " ".join(text.split()).rstrip(".")
    found = (form.fullmatch(text) for form in _FORMS.values())
    return frozenset(day for match in found if match is not None for day in _valid(match))


def _in_digits(month: re.Match[str]) -> str:
    return f"<{_FIRST_LETTERS.index(month[0][:3]) // 3 + 1}>"


def _valid(match: re.Match[str]) -> list[Date]:
    year, month, day = (int(match.groupdict().get(part) or 0) for part in ("y", "m", "d"))
    if year and len(match["y"]) == 2:  # as POSIX reads it
        year += 1900 if year > 68 else 2000
    try:
        datetime(year or 2000, month, day or 1)
    except ValueError:
        return []
    return [(year, month, day)]


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


_SPAN_TABLES = Tables("spans")

SPAN_MAX_CHARS = 120

# Between two ends.

_BETWEEN = _SPAN_TABLES.pattern("between", re.IGNORECASE)
_START = _SPAN_TABLES.pattern("start", re.IGNORECASE)
_BOTH_YEARS = re.compile(r"(1[5-9]|20)(\d{2})\s*-\s*(\d{2})")

_PIECE = re.compile(r"\d+|(?<!\d)[^\W\d_]+")

Ends = tuple[Quantity, Quantity]
Days = tuple[frozenset[Date], frozenset[Date]]


def span(text: str) -> Ends | None:
    """The two ends of 1870 to 1939, 5-10 years or between 7% and 10%; None for anything else."""
    for start, end in _ends(text):
        low, high = quantity(start), quantity(end)
        if low is None or high is None:
            continue
        if not low.has_unit:  # 7 to 10 percent
            low = replace(high, value=low.value)
        if low.in_base_units < high.in_base_units:
            return low, high
    return None


def same_span(one: Ends, other: Ends) -> bool:
    """Whether both ends are the same."""
    return all(same_quantity(*pair) for pair in zip(one, other, strict=True))


def days(text: str) -> Days | None:
    """The first and the last day, or month, of June 3 to July 5, 2014, or March 3-5, 2014."""
    for start, end in () if dates(text) else _ends(text):
        # either may omit what the other has: March 3 to 5, 2014
        heads = [start[: piece.start()] for piece in _PIECE.finditer(start)]
        tails = [end[piece.end() :] for piece in _PIECE.finditer(end)] + [""]
        last = next(filter(None, (dates(head + end) for head in reversed(heads))), None)
        first = next(filter(None, (dates(start + tail) for tail in tails)), None)
        if first and last:
            return first, last
    return None


def same_days(one: Days, other: Days) -> bool:
    """Whether both ends may mean the same days."""
    return all(bool(a & b) for a, b in zip(one, other, strict=True))


def is_span(text: str) -> bool:
    """Whether the text is a range of numbers or dates, a bound, a frequency or a period."""
    forms: tuple[Callable[[str], object], ...] = (period, bound, days, span, frequency)
    return any(form(text) is not None for form in forms)


def _ends(text: str) -> list[tuple[str, str]]:
    """Each way to cut the text into a start and an end."""
    if len(text) > SPAN_MAX_CHARS:
        return []
    start = _START.match(text)
    text = text[start.end() :] if start is not None else text
    is_between = start is not None and "between" in start[1].lower()
    years = _BOTH_YEARS.fullmatch(text)
    if years is not None and years[2] < years[3]:
        text = f"{years[1]}{years[2]}-{years[1]}{years[3]}"  # 1914-18
    found = []
    for match in _BETWEEN.finditer(text):
        if match[0].strip().lower() == "and" and not is_between:
            continue
        found.append((text[: match.start()], text[match.end() :]))
    return found


# Open on one side.

_BOUNDS = _SPAN_TABLES.patterns("bounds")


def bound(text: str) -> tuple[str, str] | None:
    """The open side of a text such as "at least 5 km", and the rest of the text."""
    for name, form in _BOUNDS.items():
        match = form.fullmatch(text) if len(text) <= SPAN_MAX_CHARS else None
        if match is not None:
            return name, next(group for group in match.groups() if group is not None)
    return None


# How often.

_TIMES = {"once": 1, "twice": 2, "thrice": 3}
_ADVERBS: dict[str, str] = _SPAN_TABLES["adverbs"]
_OFTEN = _SPAN_TABLES.pattern("often")


def frequency(text: str) -> tuple[Fraction, str] | None:
    """Times in one of a unit of time: every five years, once every 5 years, twice a year, daily."""
    text = words_as_digits(text.lower().strip()) if len(text) <= SPAN_MAX_CHARS else ""
    if text in _ADVERBS:
        text = f"every {_ADVERBS[text]}"
    match = _OFTEN.fullmatch(text)
    if match is None or (match["one"] and not match["times"]):
        return None
    unit = quantity(f"1 {match['unit']}")
    if unit is None or [name for name, _ in unit.dimension] != ["second"]:
        return None
    times = Fraction(match["count"] or _TIMES.get(match["times"] or "", 1))
    period = Fraction(re.sub(r"\D", "", match["period"] or "") or 1) * (2 if match["other"] else 1)
    return (times / (period * unit.factor), "second") if period else None


# Centuries and decades.

_PERIOD = _SPAN_TABLES.pattern("period", re.IGNORECASE)
_PARTS: dict[str, str] = _SPAN_TABLES["parts"]
_DECADE = _SPAN_TABLES.pattern("decade", re.IGNORECASE)


def period(text: str) -> tuple[str, int, int, bool] | None:
    """Part, first year, number of years and "BC" of a century or decade: the mid-1700s."""
    if len(text) > SPAN_MAX_CHARS:
        return None
    match = _PERIOD.fullmatch(words_as_digits(_DECADE.sub(r"nineteen \1y's", text.strip())))
    if match is None:
        return None
    part = _PARTS.get((match[1] or "").lower(), (match[1] or "").lower())
    is_bc = (match[4] or "").lower() in ("bc", "bce")
    if match[3]:
        year = int(match[3])
        return part, year, 10 if year % 100 else 100, is_bc
    number = leading_number(match[2])
    if number is None or number[1] not in ("", "st", "nd", "rd", "th", "ordinal"):
        return None
    return part, (int(number[0]) - 1) * 100, 100, is_bc
