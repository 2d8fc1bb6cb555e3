"""What is neither one number nor one date: 7 to 10 percent, March 3-5, at most 30, after 1850, once
every five years, the mid-18th century."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from msgspec.structs import replace

from agentenv.envs.grading import dates
from agentenv.envs.grading.numbers import leading_number, words_as_digits
from agentenv.envs.grading.quantities import Quantity, quantity, same_quantity
from agentenv.envs.grading.tables import Tables

_TABLES = Tables(__file__)

MAX_CHARS = 120

# Between two ends.

_BETWEEN = _TABLES.pattern("between", re.IGNORECASE)
_START = _TABLES.pattern("start", re.IGNORECASE)
_BOTH_YEARS = re.compile(r"(\d{2})(\d{2})\s*-\s*(\d{2})")

Ends = tuple[Quantity, Quantity]
Days = tuple[frozenset[dates.Date], frozenset[dates.Date]]


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
    for start, end in _ends(text):
        whole = _completed(start, end)
        first, last = (dates.dates(side) for side in whole)
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
    """Each way to cut the text in a start and an end."""
    if len(text) > MAX_CHARS:
        return []
    start = _START.match(text)
    text = text[start.end() :] if start is not None else text
    is_between = start is not None and "between" in start[1].lower()
    years = _BOTH_YEARS.fullmatch(text)
    if (
        years is not None
        and years[2] < years[3]
        and years[1] in ("15", "16", "17", "18", "19", "20")
    ):
        text = f"{years[1]}{years[2]}-{years[1]}{years[3]}"  # 1914-18
    found = []
    for match in _BETWEEN.finditer(text):
        if match[0].strip().lower() == "and" and not is_between:
            continue
        found.append((text[: match.start()], text[match.end() :]))
    return found


_HAN_YEAR = re.compile("(\\d{4}\u5e74)(\\d{1,2}\u6708)?.*")
_YEAR = re.compile(r"\b\d{4}\b")
_MONTH_NAME = re.compile(rf"\b(?:{dates.MONTH})", re.IGNORECASE)


def _completed(start: str, end: str) -> tuple[str, str]:
    """Both ends with the month and the year that one of them leaves out."""
    han = _HAN_YEAR.match(start)
    if han is not None:
        return start if start[-1] in "\u65e5\u53f7\u6708" else f"{start}\u65e5", _han_end(han, end)
    months = _MONTH_NAME.search(start), _MONTH_NAME.search(end)
    if months[0] is None and months[1] is not None:  # 3 to 5 March 2014
        start = f"{start} {months[1][0]}"
    if months[0] is not None and months[1] is None:  # March 3 to 5, 2014
        end = f"{months[0][0]} {end}"
    years = _YEAR.search(start), _YEAR.search(end)
    if years[0] is None and years[1] is not None:
        start = f"{start} {years[1][0]}"
    return start, end


def _han_end(start: re.Match[str], end: str) -> str:
    if "\u5e74" in end:
        return end
    return f"{start[1]}{end}" if "\u6708" in end else f"{start[1]}{start[2] or ''}{end}"


# Open on one side.

_BOUNDS = _TABLES.patterns("bounds")


def bound(text: str) -> tuple[str, str] | None:
    """The side that a text such as "at least 5 km" leaves open, and the rest of it."""
    for name, form in _BOUNDS.items():
        match = form.fullmatch(text) if len(text) <= MAX_CHARS else None
        if match is not None:
            return name, next(group for group in match.groups() if group is not None)
    return None


# How often.

_TIMES = {"once": 1, "twice": 2, "thrice": 3}
_ADVERBS: dict[str, str] = _TABLES["adverbs"]
_OFTEN = _TABLES.pattern("often")


def frequency(text: str) -> tuple[Fraction, str] | None:
    """Times in one of a unit of time: every five years, once every 5 years, twice a year, daily."""
    text = words_as_digits(text.lower().strip()) if len(text) <= MAX_CHARS else ""
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

_PERIOD = _TABLES.pattern("period", re.IGNORECASE)
_PARTS: dict[str, str] = _TABLES["parts"]


def period(text: str) -> tuple[str, int, int, bool] | None:
    """Part, first year, number of years and "BC" of a century or decade: the mid-1700s."""
    match = _PERIOD.fullmatch(text.strip()) if len(text) <= MAX_CHARS else None
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
