"""Numbers with units: 12 cm = 0.12 m, $5 = 5 dollars, 50% = 1/2, 90 degrees, 3rd."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

from msgspec import Struct

from envs.grading.numbers import leading_number, letter_scale
from envs.grading.units import Dimension, Unit, unit_of

MAX_CHARS = 200  # no number with its unit is longer


class Quantity(Struct, frozen=True):
    """A value with its unit: `dimension` and `factor` of a known one, else `words`; all empty
    for a plain number."""

    value: Fraction
    dimension: Dimension = ()
    factor: Fraction = Fraction(1)
    offset: Fraction = Fraction(0)
    words: str = ""

    @property
    def has_unit(self) -> bool:
        return bool(self.dimension or self.words)

    @property
    def in_base_units(self) -> Fraction:
        return self.value * self.factor + self.offset


_SPEEDS = {"mph": "mile/hour", "kph": "km/h", "kmh": "km/h", "fps": "ft/s"}
_CURRENCY = re.compile("([+-]?)\\s*(US\\s?\\$|USD|EUR|GBP|RMB|CNY|[$\u20ac\u00a3\u00a5])\\s*")
_DETERMINER = re.compile(r"^(?:the\s+|an?\s+(?=hundred|thousand|million|billion))(?=\w)", re.I)
_POWERS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3, "cu": 3}
_UNIT_TOKEN = re.compile(
    r"(per\b|/)|([^\W\d_]+|[%$\u20ac\u00a3\u00a5\u00b0][CF]?)(?:\s*\^\s*\{?\s*(-?\d)\s*\}?|(\d))?"
    r"|(\\cdot|\*|-|\s)"
)
_NOT_A_NOUN = frozenset(str.split("or and to but not minus plus times if where when x than of"))
_BC: Dimension = (("era_bc", 1),)
_POUNDS: dict[Dimension, Fraction] = {
    (("money_gbp", 1),): Fraction(1),
    (("kilogram", 1),): Fraction(45359237, 100000000),
}
_FIRST_UNIT = re.compile(r"([^\W\d_]+)\.?,?\s+(?:and\s+)?(?=\d)")
_NOUN = re.compile(r"[^\W\d_][\w'-]*(?:\s+[^\W\d_][\w'-]*){0,3}")


def quantity(text: str) -> Quantity | None:
    """A cleaned text as a number with an optional unit; None when it is anything else."""
    if len(text) > MAX_CHARS:
        return None
    text = _DETERMINER.sub("", text).removeprefix("\u7b2c")
    currency = _CURRENCY.match(text)
    if currency is not None:
        text = currency[1] + text[currency.end() :]
    found = leading_number(text) or _one(text)
    if found is None:
        return None
    value, rest = found
    if currency is not None:
        scale, rest = letter_scale(rest)
        name = currency[2].replace(" ", "").lower()
        if rest.strip().lower() not in ("", "usd", "dollars", "dollar", name):
            return None
        unit = unit_of(name)
        assert unit is not None, "every sign of money is in numbers.toml"
        return Quantity(value * scale, unit.dimension, unit.factor)
    rest = re.sub(r"\bper cent\b", "percent", rest.strip().strip("{}").strip())
    if not rest:
        return Quantity(value)
    unit = _unit(rest)
    if unit is not None:
        return Quantity(value, unit.dimension, unit.factor, unit.offset)
    compound = _compound(value, rest)
    if compound is not None:
        return compound
    words = rest.lower()
    if not _NOUN.fullmatch(words) or _NOT_A_NOUN & set(words.split()) or len(words) < 2:
        return None
    return Quantity(value, words=words)


def _one(text: str) -> tuple[Fraction, str] | None:
    """A fortnight as 1 fortnight."""
    match = re.match(r"(?:an?|one)\s+(?=\w+$)", text, re.IGNORECASE)
    return (Fraction(1), text[match.end() :]) if match and unit_of(text[match.end() :]) else None


def same_quantity(answer: Quantity, gold: Quantity) -> bool:
    """Equal in value, in the same kind of unit; a unit that one side leaves out is forgiven."""
    if (answer.dimension == _BC) != (gold.dimension == _BC):
        return False
    if answer.has_unit and gold.has_unit:
        answer, gold = _settled(answer, gold), _settled(gold, answer)
    percent = (("percent", 1),)
    if (answer.dimension == percent) != (gold.dimension == percent):
        if answer.has_unit and gold.has_unit:
            return False
        return answer.value == gold.value or (answer.in_base_units == gold.in_base_units)
    if not (answer.has_unit and gold.has_unit):
        return answer.value == gold.value
    if answer.dimension and gold.dimension:
        return answer.dimension == gold.dimension and answer.in_base_units == gold.in_base_units
    if answer.dimension or gold.dimension:  # a known unit against a noun
        return False
    found, wanted = ({_singular(word) for word in side.words.split()} for side in (answer, gold))
    return answer.value == gold.value and (found <= wanted or wanted <= found)


def _settled(one: Quantity, other: Quantity) -> Quantity:
    """Pounds are money or weight, whichever the other side is."""
    if one.dimension != (("pound", 1),) or other.dimension not in _POUNDS:
        return one
    return Quantity(one.value, other.dimension, _POUNDS[other.dimension])


def _compound(value: Fraction, rest: str) -> Quantity | None:
    """A sum such as 1 hour 30 minutes, in the unit of its first part."""
    match = _FIRST_UNIT.match(rest)
    unit = _unit(match[1]) if match is not None else None
    if match is None or unit is None:
        return None
    more = quantity(rest[match.end() :])
    if more is None or more.dimension != unit.dimension or not more.dimension:
        return None
    return Quantity(value + more.in_base_units / unit.factor, unit.dimension, unit.factor)


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word


def _unit(text: str) -> Unit | None:
    """The unit of a text such as km/h, square feet, m s^{-1}; None if unknown."""
    text = text.replace("\u5e73\u65b9", "square ").replace("\u7acb\u65b9", "cubic ")
    text = " ".join(text.replace(".", "").split())
    text = re.sub(r"\bdegrees? (celsius|fahrenheit)\b", r"\1", text, flags=re.IGNORECASE)
    alone = unit_of(text) if text.isalpha() else None
    if alone is not None:
        return alone
    text = _SPEEDS.get(text.lower(), text)
    dimensions: Counter[str] = Counter()
    factor, side, power, place = Fraction(1), 1, 1, 0
    offset, num_units = Fraction(0), 0
    while place < len(text):
        match = _UNIT_TOKEN.match(text, place)
        if match is None:
            return None
        place = match.end()
        per, name, exponent = match[1], match[2], match[3] or match[4]
        if per:
            side = -1
        elif name and name.lower() in _POWERS:
            if name.lower() in ("squared", "cubed"):
                return None
            power = _POWERS[name.lower()]
        elif name:
            known = unit_of(name)
            if known is None:
                return None
            times = side * power * (int(exponent) if exponent else 1)
            for base, own in known.dimension:
                dimensions[base] += times * own
            factor, offset, power = factor * known.factor**times, known.offset, 1
            num_units += 1
    found = tuple(sorted((name, times) for name, times in dimensions.items() if times))
    return Unit(found, factor, offset if num_units == 1 else Fraction(0)) if found else None
