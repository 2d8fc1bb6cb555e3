"""Dates and times of day, in the usual orders."""

from __future__ import annotations

import re

_MONTHS = {
    name: number
    for number, names in enumerate(
        str.split(
            "january/jan february/feb march/mar april/apr may june/jun july/jul august/aug "
            "september/sep/sept october/oct november/nov december/dec"
        ),
        start=1,
    )
    for name in names.split("/")
}
_MONTH = "(" + "|".join(sorted(_MONTHS, key=len, reverse=True)) + r")\.?"
_DAY = r"(\d{1,2})(?:st|nd|rd|th)?"
_WEEKDAY = re.compile(
    r"(?:(?:on|in|the month of)\s+)?(?:(?:mon|tues|wednes|thurs|fri|satur|sun)day,?\s+)?", re.I
)
_FORMS = (
    (re.compile(rf"{_MONTH}\s+(?:the\s+)?{_DAY}(?:\s*,\s*|\s+)(\d{{3,4}})"), "mdy"),
    (re.compile(rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?{_MONTH}(?:\s*,\s*|\s+)(\d{{3,4}})"), "dmy"),
    (re.compile(rf"{_MONTH}\s+(?:the\s+)?{_DAY}"), "md"),
    (re.compile(rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?{_MONTH}"), "dm"),
    (re.compile(rf"{_MONTH}(?:\s+of)?,?\s+(\d{{3,4}})"), "my"),
    (re.compile(_MONTH), "m"),
    (re.compile(r"(\d{4})[-/.](\d{1,2})[-/.](\d{1,2})"), "ymd"),
    (
        re.compile("(\\d{4})\\s*\u5e74\\s*(\\d{1,2})\\s*\u6708\\s*(\\d{1,2})\\s*[\u65e5\u53f7]"),
        "ymd",
    ),
    (re.compile("(\\d{4})\\s*\u5e74\\s*(\\d{1,2})\\s*\u6708"), "ym"),
    (re.compile(r"(\d{1,2})[/.](\d{1,2})[/.](\d{4})"), "either"),
)
_TIME = re.compile(r"(\d{1,2})(?::(\d{2}))?(?::00)?\s*([ap])\.?\s*m\.?", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?:\s*(?:hours|h))?", re.IGNORECASE)


def dates(text: str) -> frozenset[tuple[int, int, int]]:
    """What (year, month, day) the text may mean, 0 for what it leaves out; empty for no date."""
    text = _WEEKDAY.sub("", text.strip().lower(), count=1)
    for pattern, order in _FORMS:
        match = pattern.fullmatch(text)
        if match is None:
            continue
        found = [_MONTHS.get(group.strip("."), 0) or int(group) for group in match.groups()]
        if order == "either":
            first, second, year = found
            return _valid((year, first, second), (year, second, first))
        parts = dict(zip(order, found, strict=True))
        return _valid((parts.get("y", 0), parts["m"], parts.get("d", 0)))
    return frozenset()


def minutes(text: str) -> int | None:
    """Minutes since midnight of a time of day such as 3 pm or 15:00."""
    match = _TIME.fullmatch(text.strip())
    if match is not None and 1 <= int(match[1]) <= 12:
        return int(match[1]) % 12 * 60 + int(match[2] or 0) + (720 if match[3] in "pP" else 0)
    match = _CLOCK.fullmatch(text.strip())
    if match is not None and int(match[1]) < 24 and int(match[2]) < 60:
        return int(match[1]) * 60 + int(match[2])
    return None


def _valid(*found: tuple[int, int, int]) -> frozenset[tuple[int, int, int]]:
    return frozenset((y, m, d) for y, m, d in found if 1 <= m <= 12 and 0 <= d <= 31)
