r"""Numbers as people write them: 1,234.5, \frac{1}{2}, 1 1/2, 2 x 10^3, 5 million, twenty-one."""

from __future__ import annotations

import importlib
import re
import tomllib
from fractions import Fraction
from pathlib import Path

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
CARDINALS: dict[str, int] = _TABLES["cardinals"]
ORDINALS: dict[str, int] = _TABLES["ordinals"]
_PARTS: dict[str, int] = _TABLES["parts"]
_SCALES: dict[str, int] = _TABLES["scales"]

# digits are bounded so that comparing stays instant, whatever the policy writes
_PLAIN = re.compile(
    r"([+-]?)(?:(\d{1,3}(?:,\d{3}){1,10}|\d{1,40})(?:\.(\d{0,40}))?|\.(\d{1,40}))(?:/(\d{1,40}))?"
)
_DECIMAL = (
    r"(?:(?:\d{1,3}(?:,\d{3}){1,10}|\d{1,3}(?: \d{3}){1,10}|\d{1,40})(?:\.\d{0,40})?|\.\d{1,40})"
)
_FRACTION = r"\\frac\s*(?:\{\s*(-?\d{1,40})\s*\}|(\d))\s*(?:\{\s*(\d{1,40})\s*\}|(\d))"
_FORMS = {
    "mixed": re.compile(rf"(\d{{1,20}})\s*{_FRACTION}"),
    "mixed_slash": re.compile(r"(\d{1,20})(?:\s+and)?[ -]+(\d{1,20})/(\d{1,20})(?![\d/])"),
    "fraction": re.compile(_FRACTION),
    "repeating": re.compile(r"(\d{0,20})\.(\d{0,20})\\overline\s*\{(\d{1,20})\}"),
    "scientific": re.compile(
        rf"({_DECIMAL})\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*(?:\{{\s*|\()?([+-]?\d{{1,2}})(?!\d)[}})]?"
    ),
    "power": re.compile(r"10\s*\^\s*(?:\{\s*|\()?([+-]?\d{1,2})(?!\d)[})]?"),
    "exponent": re.compile(rf"({_DECIMAL})[eE]([+-]?\d{{1,2}})(?![\w.])"),
    "slash": re.compile(rf"({_DECIMAL})\s*/\s*(-?\d{{1,40}}(?:\.\d{{1,40}})?)(?![\d/])"),
    "decimal": re.compile(rf"({_DECIMAL})(?!\d)"),
}
_SCALE_WORD = re.compile(
    r"\s*-?\s*(hundred|thousand|million|billion|trillion|dozen|mn|bn)s?\b"
    "|\\s*([\u767e\u5343\u4e07\u4ebf])",
    re.IGNORECASE,
)
_LETTER_SCALE = re.compile(r"([kKMB])(?![A-Za-z])")
_LETTERS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}
_WORD = re.compile(r"[A-Za-z]+")


def as_number(text: str) -> Fraction | None:
    """A plain number such as -5, 1,234.50, .5 or 3/4; None for anything else."""
    match = _PLAIN.fullmatch(text.strip().replace("\N{MINUS SIGN}", "-"))
    if match is None:
        return None
    sign, whole, decimals, only_decimals, denominator = match.groups(default="")
    decimals += only_decimals
    if denominator and not int(denominator):
        return None
    digits = int((whole.replace(",", "") + decimals) or "0")
    value = Fraction(digits, 10 ** len(decimals) * int(denominator or 1))
    return -value if sign == "-" else value


def leading_number(text: str) -> tuple[Fraction, str] | None:
    """The number that `text` begins with, in any of the usual forms, and what follows it."""
    text = text.strip()
    sign = 1
    match = re.match(r"([+-]|minus\b|negative\b)\s*", text, re.IGNORECASE)
    if match is not None:
        sign = 1 if match[1] == "+" else -1
        text = text[match.end() :]
    found = _in_digits(text) or _in_words(text) or in_han(text)
    if found is None:
        return None
    value, rest = found
    scale = _SCALE_WORD.match(rest)
    if scale is not None:
        value, rest = value * _SCALES[(scale[1] or scale[2]).lower()], rest[scale.end() :]
    return sign * value, rest.strip()


def letter_scale(rest: str) -> tuple[int, str]:
    """The factor of a money scale letter, as in $5M, and what follows it."""
    match = _LETTER_SCALE.match(rest)
    return (_LETTERS[match[1]], rest[match.end() :]) if match else (1, rest)


def _in_digits(text: str) -> tuple[Fraction, str] | None:
    for form, pattern in _FORMS.items():
        match = pattern.match(text)
        if match is not None:
            value = _value(form, match)
            if value is not None:
                return value, text[match.end() :]
    return None


def _value(form: str, match: re.Match[str]) -> Fraction | None:
    found = [group for group in match.groups() if group is not None]
    if form in ("mixed", "mixed_slash"):
        number, top, bottom = (int(group) for group in found)
        return number + Fraction(top, bottom) if bottom else None
    if form == "fraction":
        return Fraction(int(found[0]), int(found[1])) if int(found[1]) else None
    if form == "repeating":
        fixed, cycle = match[2], match[3]
        nines = (10 ** len(cycle) - 1) * 10 ** len(fixed)
        whole = Fraction(int((match[1] or "0") + fixed), 10 ** len(fixed))
        return whole + Fraction(int(cycle), nines)
    if form == "power":
        return Fraction(10) ** int(found[0])
    value = _decimal(found[0])
    if form in ("scientific", "exponent"):
        return value * Fraction(10) ** int(found[1])
    if form == "slash":
        divisor = Fraction(found[1])
        return value / divisor if divisor else None
    return value


def _decimal(digits: str) -> Fraction:
    digits = digits.replace(",", "").replace(" ", "")
    return Fraction(f"0{digits}" if digits.startswith(".") else digits.removesuffix("."))


def _in_words(text: str) -> tuple[Fraction, str] | None:
    """English number words; stops at the first word that is none."""
    total = current = 0
    place, seen = 0, False
    while True:
        match = re.compile(r"[\s-]*(?:and\s+)?([A-Za-z]+)" if seen else r"([A-Za-z]+)").match(
            text, place
        )
        word = match[1].lower() if match else ""
        if word in CARDINALS:
            current += CARDINALS[word]
        elif word in ORDINALS and (not seen or current % 10 == 0):
            current, seen, place = current + ORDINALS[word], True, match.end() if match else place
            return Fraction(total + current), " ordinal" + text[place:]
        elif word == "hundred":
            current = max(current, 1) * 100
        elif word in ("thousand", "million", "billion", "trillion"):
            total, current = total + max(current, 1) * _SCALES[word], 0
        else:
            break
        assert match is not None
        seen, place = True, match.end()
    if seen:
        part = re.match(r"[\s-]*(\w+?)s?\b", text[place:])
        if part is not None and part[1].lower() in _PARTS:
            return Fraction(total + current, _PARTS[part[1].lower()]), text[place + part.end() :]
        return Fraction(total + current), text[place:]
    match = re.match(r"(?:(?:an?\s+|one\s+)?(half|quarter|dozen))\b", text, re.IGNORECASE)
    if match is None:
        return None
    value = {"half": Fraction(1, 2), "quarter": Fraction(1, 4)}.get(match[1].lower(), Fraction(12))
    return value, text[match.end() :]


# Numbers in Chinese characters.

_HAN_DIGITS = "\u96f6\u3007\u4e00\u4e8c\u4e09\u56db\u4e94\u516d\u4e03\u516b\u4e5d\u4e24"
_HAN_SCALES = "\u5341\u767e\u5343\u4e07\u4ebf\u70b9"  # ten to a hundred million, and a point
_HAN_NUMBER = re.compile(
    f"[{_HAN_DIGITS}][{_HAN_DIGITS}{_HAN_SCALES}]{{0,30}}|\u5341[{_HAN_DIGITS}]?"
)
_HAN_FRACTION = re.compile(f"({_HAN_NUMBER.pattern})\u5206\u4e4b({_HAN_NUMBER.pattern})")


def in_han(text: str) -> tuple[Fraction, str] | None:
    """The number that the text begins with, and what follows it."""
    sign = -1 if text.startswith("\u8d1f") else 1
    text = text[1:] if sign < 0 else text
    parts = _HAN_FRACTION.match(text)
    if parts is not None:
        bottom, top = _han(parts[1]), _han(parts[2])
        return (sign * top / bottom, text[parts.end() :]) if top is not None and bottom else None
    match = _HAN_NUMBER.match(text)
    value = _han(match[0]) if match is not None else None
    return None if match is None or value is None else (sign * value, text[match.end() :])


def han_as_digits(text: str) -> str:
    """The text with its Chinese numbers in digits."""

    def digits(match: re.Match[str]) -> str:
        value = _han(match[0])
        return match[0] if value is None or value.denominator != 1 else str(value)

    return _HAN_NUMBER.sub(digits, text)


def _han(number: str) -> Fraction | None:
    cn2an = importlib.import_module("cn2an")
    try:
        return Fraction(str(cn2an.cn2an(number.replace("\u3007", "\u96f6"), "smart")))
    except (LookupError, ValueError):  # characters of numbers that make none
        return None
