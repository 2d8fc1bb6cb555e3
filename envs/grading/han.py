"""Chinese: numbers by cn2an, what is counted, and the small words round an answer."""

from __future__ import annotations

import importlib
import re
import tomllib
from fractions import Fraction
from pathlib import Path

from agentenv.envs.grading.spelling import unify

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
_FORMAL = str.maketrans(_TABLES["formal"])
_TRADITIONAL = str.maketrans(_TABLES["traditional"])
_DIGITS, _SCALES = _TABLES["digits"], _TABLES["scales"]
_FORMAL_NUMBER = re.compile(f"[{''.join(_TABLES['formal'])}{_DIGITS[:2]}{_SCALES}]{{2,30}}")
_NUMBER = re.compile(f"[{_DIGITS}][{_DIGITS}{_SCALES}]{{0,30}}|{_SCALES[0]}[{_DIGITS}]?")
_FRACTION = re.compile(f"({_NUMBER.pattern}){_TABLES['part_of']}({_NUMBER.pattern})")
_HAN = re.compile("[\u4e00-\u9fff]")
_HALF = re.compile(f"{_DIGITS[2]}?{_TABLES['half']}")
_ANY, _PEOPLE = _TABLES["any"], _TABLES["people"]
_MEASURE = re.compile(
    f"([{_ANY}{_PEOPLE}{_TABLES['measures']}])(?:{_TABLES['people_noun']})?(\\w{{0,10}})$"
)
_PLAIN = [(re.compile(form), plain) for form, plain in _TABLES["plain"].items()]
_AROUND = re.compile(
    f"^(?:{'|'.join(_TABLES['before'])})(?=..)|(?<=..)(?:{'|'.join(_TABLES['after'])})$"
)
_COUNTED = re.compile(f"(?<=\\d)[{_ANY}{_PEOPLE}](?!{_TABLES['month']})")
_SEPARATOR = re.compile(f"\\s*[{_TABLES['separators']},;]\\s*")
_TITLES: list[str] = _TABLES["titles"]
_KIND = re.compile(f"(?<=..)(?:{'|'.join(_TABLES['kinds'])})(?=\\(|$)")


def in_han(text: str) -> tuple[Fraction, str] | None:
    """The number that the text begins with, and what follows it."""
    sign = -1 if text.startswith(_TABLES["minus"]) else 1
    text = plain_numerals(text[1:] if sign < 0 else text)
    half = _HALF.match(text)
    if half is not None:
        return sign * Fraction(1, 2), text[half.end() :]
    parts = _FRACTION.match(text)
    if parts is not None:
        bottom, top = _value(parts[1]), _value(parts[2])
        return (sign * top / bottom, text[parts.end() :]) if top is not None and bottom else None
    match = _NUMBER.match(text)
    value = _value(match[0]) if match is not None else None
    if match is None or value is None:
        return None
    rest = text[match.end() :]
    half = re.match(f"[{_ANY}]{_TABLES['half']}", rest)  # one and a half hours
    if half is not None:
        value, rest = value + Fraction(1, 2), rest[half.end() :]
    return sign * value, rest


def han_as_digits(text: str) -> str:
    """The text with its Chinese numbers in digits."""

    def digits(match: re.Match[str]) -> str:
        value = _value(match[0])
        return match[0] if value is None or value.denominator != 1 else str(value)

    return _NUMBER.sub(digits, plain_numerals(text))


def plain_numerals(text: str) -> str:
    """The text with traditional numerals, and those of cheques (two or more), in ordinary ones."""
    text = text.translate(_TRADITIONAL)
    return _FORMAL_NUMBER.sub(lambda match: match[0].translate(_FORMAL), text)


def counted(rest: str) -> str | None:
    """The words after a Chinese number: people for several measure words, the general
    one left out, then the noun; None when no measure word opens it."""
    match = _MEASURE.match(rest)
    if match is None:
        return None
    measure, noun = match.groups()
    kind = "" if measure in _ANY else "people" if measure in _PEOPLE else measure
    return f"{kind} {noun}".strip()


def is_list(rest: str) -> bool:
    """Whether Chinese words behind a number go on with another answer."""
    return (
        _HAN.search(rest) is not None
        and re.search(rf"[\d{_TABLES['separators']}]", rest) is not None
    )


def han_core(text: str) -> str:
    """A Chinese name without what stands round it: a title, the kind of place, a short clause."""
    if not _HAN.search(text):
        return ""
    text = unify(text).strip(" .")
    text = _AROUND.sub("", text) or text
    for pattern, replacement in _PLAIN:
        text = pattern.sub(replacement, text)
    text = _COUNTED.sub("", han_as_digits(text))
    return ",".join(_untitled(part) for part in _SEPARATOR.split(text))


def _untitled(text: str) -> str:
    for _ in range(2):
        title = next((one for one in _TITLES if one in (text[: len(one)], text[-len(one) :])), "")
        rest = text[len(title) :] if text.startswith(title) else text[: -len(title)]
        text = rest if title and 1 < len(rest) <= 4 else text
    return _KIND.sub("", text) or text


def _value(number: str) -> Fraction | None:
    cn2an = importlib.import_module("cn2an")
    try:
        return Fraction(str(cn2an.cn2an(number.replace("\u3007", "\u96f6"), "smart")))
    except (LookupError, ValueError):  # characters of numbers that make none
        return None
