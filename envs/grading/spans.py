"""What is neither one number nor one date: 7 to 10 percent, at most 30, the mid-18th century."""

from __future__ import annotations

import re

from msgspec.structs import replace

from envs.grading.numbers import leading_number
from envs.grading.quantities import Quantity, quantity, same_quantity

MAX_CHARS = 120

_BETWEEN = re.compile(r"\s+(?:to|until|till|through|and)\s+|\s*-\s*", re.IGNORECASE)
_START = re.compile(r"(from|between)\s+", re.IGNORECASE)


def span(text: str) -> tuple[Quantity, Quantity] | None:
    """The two ends of 1870 to 1939, 5-10 years or between 7% and 10%; None for anything else."""
    if len(text) > MAX_CHARS:
        return None
    start = _START.match(text)
    text = text[start.end() :] if start is not None else text
    is_between = start is not None and start[1].lower() == "between"
    for match in _BETWEEN.finditer(text):
        if match[0].strip().lower() == "and" and not is_between:
            continue
        low, high = quantity(text[: match.start()]), quantity(text[match.end() :])
        if low is None or high is None:
            continue
        if not low.has_unit:  # 7 to 10 percent
            low = replace(high, value=low.value)
        if low.in_base_units < high.in_base_units:
            return low, high
    return None


def same_span(one: tuple[Quantity, Quantity], other: tuple[Quantity, Quantity]) -> bool:
    """Whether both ends are the same."""
    return all(same_quantity(*pair) for pair in zip(one, other, strict=True))


_BOUNDS = (
    ("most", r"(?:(?:at|the) most|up to|no more than|not more than|a maximum of|maximum)\s+(.+)"
             r"|(.+?)\s+(?:or (?:less|fewer)|at most|maximum)"),
    ("least", r"(?:at least|no (?:less|fewer) than|not (?:less|fewer) than|a minimum of|minimum)"
              r"\s+(.+)|(.+?)\s+(?:or (?:more|greater)|at least|minimum)"),
    ("over", r"(?:more than|over|greater than|above|exceeding|in excess of)\s+(.+)"),
    ("under", r"(?:less than|fewer than|under|below)\s+(.+)"),
)  # fmt: skip
_BOUND_FORMS = [(name, re.compile(form, re.IGNORECASE | re.DOTALL)) for name, form in _BOUNDS]


def bound(text: str) -> tuple[str, str] | None:
    """The side that a text such as "at least 5 km" leaves open, and the rest of it."""
    for name, form in _BOUND_FORMS:
        match = form.fullmatch(text) if len(text) <= MAX_CHARS else None
        if match is not None:
            return name, next(group for group in match.groups() if group is not None)
    return None


_PERIOD = re.compile(
    r"(?:in\s+)?(?:the\s+)?(?:(early|beginning|start|mid|middle|late|end)(?:[\s-]+(?:part\s+)?)"
    r"(?:of\s+)?(?:the\s+)?)?(?:(\w+(?:[\s-]\w+)?)[\s-]+century|(\d{2,3}0)s)(?:\s+(bc|bce|ad|ce))?",
    re.IGNORECASE,
)
_PARTS = {"beginning": "early", "start": "early", "middle": "mid", "end": "late"}


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
