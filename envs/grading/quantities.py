"""Numbers with units: 12 cm = 0.12 m, $5 = 5 dollars, 50% = 1/2, 90 degrees, 3rd.

Units by pint; money, percent, ordinals and eras, which are unknown to pint or plain numbers for it,
and the Chinese names of units are in numbers.toml.
"""

from __future__ import annotations

import importlib
import re
from collections import Counter
from fractions import Fraction
from functools import lru_cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from agentenv.envs.grading.numbers import counted, is_list, leading_number, letter_scale
from agentenv.envs.grading.text import Tables, rewritten

Dimension = tuple[tuple[str, int], ...]

_UNIT_TABLES, _TABLES = Tables("numbers"), Tables("quantities")
_OWN = {
    name: (((dimension, 1),), Fraction(factor))
    for dimension, units in _UNIT_TABLES["units"].items()
    for name, factor in units.items()
}
_NAMES = _UNIT_TABLES.by_form("names")
_PREFIXED = _TABLES.words("prefixed")
_LETTERS = frozenset("mgshlLJNWVAK")
MAX_NAME_CHARS = 40
MAX_CHARS = 200  # no number with its unit is longer


class Quantity(Struct, frozen=True):
    """A value with its unit: `dimension` and `factor` of a known unit, and `words` for the other
    words about the counted thing; all empty for a plain number. The value in base units is `factor`
    times the value plus `offset`."""

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


@lru_cache(maxsize=4096)
def unit_of(name: str) -> Quantity | None:
    """One of the unit of a name such as km, gallons or USD; None if there is none."""
    low = name.lower()
    own = _OWN.get(low) or _OWN.get(low.removesuffix("s"))
    if own is not None:
        return Quantity(Fraction(1), *own)
    if len(name) > MAX_NAME_CHARS or (len(name) == 1 and name.isascii() and name not in _LETTERS):
        return None
    known = _NAMES.get(low) or _NAMES.get(low.removesuffix("s"))
    return _of_pint(known or name)


@lru_cache(maxsize=1)
def load() -> Any:
    """The registry of units; the first call takes half a second."""
    pint = importlib.import_module("pint")
    importlib.import_module("cn2an")  # and the reader of Chinese numbers
    return pint.UnitRegistry(non_int_type=Fraction)


def _of_pint(name: str) -> Quantity | None:
    registry = load()
    readings = (registry.parse_unit_name(name, is_sensitive) for is_sensitive in (True, False))
    known = (one for reading in readings for one in reading if not one[0] or one[1] in _PREFIXED)
    prefix, unit, _ = next(known, ("", "", ""))
    if not unit:
        return None
    try:
        zero, one = (registry.Quantity(Fraction(n), prefix + unit).to_base_units() for n in (0, 1))
    except (ArithmeticError, TypeError, ValueError):  # a logarithm, as dB: not of fractions
        return None
    powers = {base: Fraction(power) for base, power in one.unit_items()}
    if not powers or any(power.denominator != 1 for power in powers.values()):
        return None
    dimension = tuple(sorted((base, int(power)) for base, power in powers.items()))
    offset = Fraction(zero.magnitude)
    return Quantity(Fraction(1), dimension, Fraction(one.magnitude) - offset, offset)


_CURRENCY = _TABLES.pattern("currency")
_POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3}
_UNIT_TOKEN = _TABLES.pattern("unit_token")
_NOT_A_NOUN = _TABLES.words("not_a_noun")
_BC: Dimension = (("era_bc", 1),)
PERCENT: Dimension = (("percent", 1),)
_POUNDS: dict[Dimension, Fraction] = {
    (("money_gbp", 1),): Fraction(1),
    (("kilogram", 1),): Fraction(45359237, 100000000),
}
_FIRST_UNIT = _TABLES.pattern("first_unit")
_NOUN = re.compile(r"[^\W\d_][\w'-]*(?:\s+[^\W\d_][\w'-]*){0,5}")
_SPELT = _TABLES.rewrites("spelt")
_WHOLE = _TABLES.rewrites("whole")
_ONE = re.compile(r"(?:an?|one)\s+(?=\w+$)", re.IGNORECASE)
_PER_OR_OF = re.compile(r"(?:per|an?|each|every|of|in|on|from|at)\b|/")
_NOT_UNITS = _TABLES.words("not_units")
# words after a unit that do not change its meaning
_MEASURED = _TABLES.pattern("measured", re.IGNORECASE)
_OF_WHAT = re.compile(r"(?:of|in|on|from|at)\s+(?:all\s+|the\s+|its\s+|their\s+)?[a-z]\D{0,80}")


_CAPITALS = re.compile(r"\b[A-Z][a-z]")


def quantity(text: str) -> Quantity | None:
    """A cleaned text as a number with an optional unit; None when it is anything else."""
    if len(text) > MAX_CHARS:
        return None
    text = rewritten(text, _WHOLE)
    currency = _CURRENCY.match(text)
    if currency is not None:
        return _money(currency, text[currency.end() :])
    found, one = leading_number(text), _ONE.match(text)
    if found is None and one is not None and unit_of(text[one.end() :]) is not None:
        found = Fraction(1), text[one.end() :]  # a fortnight
    if found is None:
        return None
    scale, rest = letter_scale(found[1]) if found[1] in ("k", "M", "B") else (1, found[1])
    return _with_unit(found[0] * scale, rest.strip("{} "))


def _money(currency: re.Match[str], text: str) -> Quantity | None:
    """An amount after a currency sign: $1.5 million, $5M, $5 per hour, $5 each."""
    sign = currency[2].replace(" ", "").lower()
    unit, found = unit_of(sign), leading_number(currency[1] + text)
    assert unit is not None, "every currency sign is in numbers.toml"
    if found is None:
        return None
    scale, rest = letter_scale(found[1])
    if sign.endswith("$"):
        rest = re.sub(r"^\s*(?:us\b\s*)?(?:dollars?$)?", "", rest, flags=re.IGNORECASE)
    name, rest = unit.dimension[0][0].removeprefix("money_"), rest.strip()
    again = unit_of(rest) if rest else unit  # $5 USD
    if again is not None and again != unit:
        return None
    amount = _with_unit(found[0] * scale, name if again else f"{name} {rest}")
    if (
        amount is None
        or not amount.dimension
        or (amount.words and not _PER_OR_OF.match(amount.words))
    ):
        return None
    return amount


def _with_unit(value: Fraction, rest: str) -> Quantity | None:
    """A number and the words after it: a unit, a sum of units, a unit and a noun, a noun."""
    rest = rewritten(rest, _SPELT)
    if not rest:
        return Quantity(value)
    parts, compound = _unit_and_rest(rest), _compound(value, rest)
    if compound is not None and (parts is None or parts[1]):
        return compound
    if parts is not None:
        unit, words = parts
        words = _MEASURED.sub("", words).strip(" ,").lower()
        if words and not _OF_WHAT.fullmatch(words) and not _is_noun(words):
            return None
        return replace(unit, value=value, words=words)
    named = counted(rest)
    if named is not None:
        return Quantity(value, words=named.lower())
    is_name = len(_CAPITALS.findall(rest)) > 1  # of one thing: 1984 South Asian Games
    words = rest.lower()
    if is_list(rest) or is_name or not _is_noun(words) or len(words) < 2:
        return None
    return Quantity(value, words=words)


def _is_noun(words: str) -> bool:
    return _NOUN.fullmatch(words) is not None and not _NOT_A_NOUN & set(words.split())


def _unit_and_rest(text: str) -> tuple[Quantity, str] | None:
    """The longest unit, all of the text or up to four words, and the words after it."""
    words = text.split()
    for count in (len(words), *range(min(4, len(words) - 1), 0, -1)):
        name = " ".join(words[:count])
        if count < len(words):
            name = name.rstrip(",")
            if _NOT_UNITS & set(name.lower().split()) or name.endswith(("per", "/")):
                continue
        unit = _unit(name)
        if unit is not None:
            return unit, " ".join(words[count:])
    return None


def same_quantity(answer: Quantity, gold: Quantity) -> bool:
    """Equal in value, in the same kind of unit; one side may omit its unit or noun."""
    if (answer.dimension == _BC) != (gold.dimension == _BC):
        return False
    if answer.has_unit and gold.has_unit:
        answer, gold = _settled(answer, gold), _settled(gold, answer)
        if not _same_nouns(answer, gold):
            return False
    if (answer.dimension == PERCENT) != (gold.dimension == PERCENT):
        is_equal = answer.value == gold.value or answer.in_base_units == gold.in_base_units
        return is_equal and not (answer.dimension and gold.dimension)
    if not (answer.dimension and gold.dimension):  # a known unit against a noun
        plain = answer.has_unit and gold.has_unit and answer.dimension != gold.dimension
        return answer.value == gold.value and not plain
    return answer.dimension == gold.dimension and answer.in_base_units == gold.in_base_units


def _same_nouns(answer: Quantity, gold: Quantity) -> bool:
    """Whether the words of one are among those of the other."""
    found, wanted = (
        {_singular(word) for word in re.split(r"[\s-]+", side.words) if word} - _SMALL
        for side in (answer, gold)
    )
    words = {answer.words, gold.words}
    if answer.dimension and "" in words and any(map(_is_per_piece, words)):
        return True  # 5 cents an apple
    return False if (found ^ wanted) & _DECISIVE else found <= wanted or wanted <= found


def _is_per_piece(words: str) -> bool:
    """Whether words name the thing that has an amount each, and no unit."""
    match = re.fullmatch(r"(?:per|for each|each|for every|every|an?) ([a-z]{2,20})", words)
    return match is not None and _unit(match[1]) is None


_SMALL = frozenset(str.split("of in the a an on from at all"))
_DECISIVE = _TABLES.words("decisive")


def _settled(one: Quantity, other: Quantity) -> Quantity:
    """Pounds as money or weight, in agreement with the other side."""
    if one.dimension != (("pound", 1),) or other.dimension not in _POUNDS:
        return one
    return replace(one, dimension=other.dimension, factor=_POUNDS[other.dimension])


def _compound(value: Fraction, rest: str) -> Quantity | None:
    """A sum such as 1 hour 30 minutes, in the unit of its first part."""
    match = _FIRST_UNIT.match(rest)
    unit = _unit(match[1]) if match is not None else None
    if match is None or unit is None:
        return None
    behind = rest[match.end() :]
    more = quantity(
        f"{behind}in" if re.fullmatch(r"\d+\s?m", behind) and match[1][0] == "h" else behind
    )
    if more is None or more.dimension != unit.dimension or not more.dimension:
        return None
    if more.factor >= unit.factor:  # the parts go down
        return None
    whole = value + more.in_base_units / unit.factor
    return replace(unit, value=whole, words=more.words)


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 2 and word.endswith("s") and not word.endswith("ss") else word


def _unit(text: str) -> Quantity | None:
    """One of the unit of a text such as km/h, square feet, m s^{-1}; None if unknown."""
    text = " ".join(text.replace(".", "").split())
    alone = unit_of(text) if text.isalpha() else None
    if alone is not None:
        return alone
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
            if not num_units and per != "/":
                return None
            side = -1
        elif name and name.lower() in _POWERS:
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
    if not found and num_units == 2 and side < 0:  # hours per week
        found = (("rate", 1),)
    if not found:
        return None
    return Quantity(Fraction(1), found, factor, offset if num_units == 1 else Fraction(0))
