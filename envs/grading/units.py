"""Units by pint: the base units of a unit's name, and what one of it is in them.

Money, percent, ordinals and eras, which pint does not know or reads as plain numbers, and the
Chinese names of units stand in numbers.toml.
"""

from __future__ import annotations

import importlib
import tomllib
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct

Dimension = tuple[tuple[str, int], ...]

_TABLES = tomllib.loads(Path(__file__).with_name("numbers.toml").read_text(encoding="utf-8"))
_OWN = {
    name: (((dimension, 1),), Fraction(factor))
    for dimension, units in _TABLES["units"].items()
    for name, factor in units.items()
}
_NAMES: dict[str, str] = _TABLES["names"]
# pint reads "cats" as centi-atmospheres: prefixes are taken before the units that carry them only
_PREFIXED = frozenset(
    str.split(
        "meter gram second liter watt joule pascal hertz volt ampere newton byte bit calorie ohm "
        "watt_hour electron_volt mole metric_ton parsec kelvin bar"
    )
)
_LETTERS = frozenset("mgshlLJNWVAK")
MAX_NAME_CHARS = 40


class Unit(Struct, frozen=True):
    """A unit: `factor` times the value plus `offset` is the value in base units."""

    dimension: Dimension
    factor: Fraction
    offset: Fraction = Fraction(0)


@lru_cache(maxsize=4096)
def unit_of(name: str) -> Unit | None:
    """The unit of a name such as km, gallons or USD; None if there is none."""
    low = name.lower()
    own = _OWN.get(low) or _OWN.get(low.removesuffix("s"))
    if own is not None:
        return Unit(*own)
    if len(name) > MAX_NAME_CHARS or (len(name) == 1 and name.isascii() and name not in _LETTERS):
        return None
    known = _NAMES.get(low) or _NAMES.get(low.removesuffix("s"))
    return _of_pint(known or name)


def load() -> None:
    """Make the registry now, half a second, rather than with the first unit."""
    _registry()


@lru_cache(maxsize=1)
def _registry() -> Any:
    pint = importlib.import_module("pint")
    return pint.UnitRegistry(non_int_type=Fraction)


def _of_pint(name: str) -> Unit | None:
    registry = _registry()
    found = _parsed(name, True) or _parsed(name, False)
    if found is None:
        return None
    try:
        zero, one = (registry.Quantity(Fraction(n), found).to_base_units() for n in (0, 1))
    except (ArithmeticError, TypeError, ValueError):  # a logarithm, as dB: not of fractions
        return None
    powers = {base: Fraction(power) for base, power in one.unit_items()}
    if not powers or any(power.denominator != 1 for power in powers.values()):
        return None
    dimension = tuple(sorted((base, int(power)) for base, power in powers.items()))
    offset = Fraction(zero.magnitude)
    return Unit(dimension, Fraction(one.magnitude) - offset, offset)


def _parsed(name: str, case_sensitive: bool) -> str | None:
    for prefix, unit, _ in _registry().parse_unit_name(name, case_sensitive):
        if not prefix or unit in _PREFIXED:
            return f"{prefix}{unit}"
    return None
