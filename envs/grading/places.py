"""A place with the country behind it: Washington, D.C., United States; Oxford (England)."""

from __future__ import annotations

import re

from agentenv.envs.grading.tables import Tables
from agentenv.envs.grading.words import tokens

_TABLES = Tables(__file__)
_COUNTRIES: dict[str, str] = {
    " ".join(tokens(name)): country
    for country in _TABLES["countries"]
    for name in (country, *_TABLES["names"].get(country, ()))
}
_FORMS = tuple(
    re.compile(rf"(\S|\S.*\S){form}")
    for form in (
        r"\s*,\s*(?:in\s+)?([^,()]+)",
        r"\s+in\s+([^,()]+)",
        r"\s+\(([^()]+)\)",
    )
)
_VENUE = _TABLES.pattern("venue", re.IGNORECASE)
_IN_A_CITY = re.compile(r"(\S.*\S)(?:\s+in|,)\s+([A-Z][\w.'-]*(?:\s[A-Z][\w.'-]*){0,2})")
MAX_CHARS = 120


def country_of(name: str) -> str:
    """The country that a text names; "" if it names none."""
    return _COUNTRIES.get(" ".join(tokens(name)), "")


def placed(text: str) -> tuple[str, str]:
    """A place without the country behind it, and the country; a building also without its city.
    The text and "" where there is none, or where the rest names a country too, as in a list."""
    for form in _FORMS if len(text) <= MAX_CHARS else ():
        match = form.fullmatch(text)
        country = country_of(match[2]) if match is not None else ""
        if match is not None and country and match[1][0].isupper():
            others = re.split(r",|;|\band\b", match[1])
            return (text, "") if any(map(country_of, others)) else (match[1], country)
    match = _IN_A_CITY.fullmatch(text) if len(text) <= MAX_CHARS else None
    if match is not None and _VENUE.fullmatch(match[1]) and not _VENUE.fullmatch(match[2]):
        return match[1], match[2]
    return text, ""
