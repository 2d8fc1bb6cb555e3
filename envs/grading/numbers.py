r"""Numbers as people write them: 1,234.5, \frac{1}{2}, 1 1/2, 2 x 10^3, 5 million, twenty-one;
Chinese ones by cn2an, with the counted noun.
"""

from __future__ import annotations

import importlib
import re
from fractions import Fraction

from agentenv.envs.grading.text import Tables, rewritten, unify

_HAN_TABLES = Tables("han")
_DIGITS, _SCALES = _HAN_TABLES["digits"], _HAN_TABLES["scales"]
_FORMAL = _HAN_TABLES["formal"]
_NUMBER = re.compile(
    f"[{_FORMAL}][{_FORMAL}{_DIGITS[:2]}{_SCALES}]{{1,30}}"
    f"|[{_DIGITS}][{_DIGITS}{_SCALES}]{{0,30}}|{_SCALES[0]}[{_DIGITS}]?"
)
_FRACTION = re.compile(f"({_NUMBER.pattern}){_HAN_TABLES['part_of']}({_NUMBER.pattern})")
_HAN = re.compile("[\u4e00-\u9fff]")
_HALF = re.compile(f"{_DIGITS[2]}?{_HAN_TABLES['half']}")
_ANY, _PEOPLE = _HAN_TABLES["any"], _HAN_TABLES["people"]
_MEASURE = re.compile(
    f"([{_ANY}{_PEOPLE}{_HAN_TABLES['measures']}])(?:{_HAN_TABLES['people_noun']})?(\\w{{0,10}})$"
)
_PLAIN = [(re.compile(form), plain) for form, plain in _HAN_TABLES["plain"].items()]
_SEPARATOR = re.compile(f"\\s*[{_HAN_TABLES['separators']},;]\\s*")
_TITLE = f"(?:{'|'.join(_HAN_TABLES['titles'])})?"
_TITLED = re.compile(f"{_TITLE}(.{{2,4}}?){_TITLE}")
_KIND = re.compile(f"(?<=..)(?:{'|'.join(_HAN_TABLES['kinds'])})(?=\\(|$)")


def in_han(text: str) -> tuple[Fraction, str] | None:
    """The number at the beginning of the text, and the rest."""
    sign = -1 if text.startswith(tuple(_HAN_TABLES["minus"])) else 1
    text = text[1:] if sign < 0 else text
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
    half = re.match(f"[{_ANY}]{_HAN_TABLES['half']}", rest)  # one and a half hours
    if half is not None:
        value, rest = value + Fraction(1, 2), rest[half.end() :]
    return sign * value, rest


def han_as_digits(text: str) -> str:
    """The text with its Chinese numbers in digits."""

    def digits(match: re.Match[str]) -> str:
        value = _value(match[0])
        return match[0] if value is None or value.denominator != 1 else str(value)

    return _NUMBER.sub(digits, text)


def counted(rest: str) -> str | None:
    """The words after a Chinese number: people for several measure words, the general
    one omitted, then the noun; None without a measure word at the beginning."""
    match = _MEASURE.match(rest)
    if match is None:
        return None
    measure, noun = match.groups()
    kind = "" if measure in _ANY else "people" if measure in _PEOPLE else measure
    return f"{kind} {noun}".strip()


def is_list(rest: str) -> bool:
    """Whether the Chinese words after a number begin another answer."""
    return (
        _HAN.search(rest) is not None
        and re.search(rf"[\d{_HAN_TABLES['separators']}]", rest) is not None
    )


def han_core(text: str) -> str:
    """A Chinese name without the words around it: a title, the kind of place, a short clause."""
    if not _HAN.search(text):
        return ""
    text = rewritten(unify(text).strip(" ."), _PLAIN)
    return ",".join(_untitled(part) for part in _SEPARATOR.split(han_as_digits(text)))


def _untitled(text: str) -> str:
    titled = _TITLED.fullmatch(text)
    text = text if titled is None else titled[1]
    return _KIND.sub("", text) or text


def _value(number: str) -> Fraction | None:
    cn2an = importlib.import_module("cn2an")
    try:
        return Fraction(str(cn2an.cn2an(number, "smart")))
    except (LookupError, ValueError):  # characters of numbers that form no number
        return None


_NUMBER_TABLES = Tables("numbers")
_IN_ORDER = (*range(20), *range(20, 100, 10))
CARDINALS: dict[str, int] = dict(zip(_NUMBER_TABLES["cardinals"], _IN_ORDER, strict=True))
ORDINALS: dict[str, int] = dict(zip(_NUMBER_TABLES["ordinals"], _IN_ORDER, strict=True))
_PARTS: dict[str, int] = {
    **{word: value for word, value in ORDINALS.items() if value > 2},
    **_NUMBER_TABLES["parts"],
}
_NUMBER_SCALES: dict[str, int] = _NUMBER_TABLES["scales"]
_SCALE_WORDS = ("hundred", "thousand", "million", "billion", "trillion")
_WORDS = {**CARDINALS, **ORDINALS, **{word: _NUMBER_SCALES[word] for word in _SCALE_WORDS}}
MAX_NUMBER_WORDS = 20

LONG_DECIMALS = 9  # a gold with this many means the exact value that rounds to it
FLOAT_STEP = Fraction(1, 1 << 52)
_LONG = re.compile(rf"(?<![\d.])(-?\d{{0,40}})\.(\d{{{LONG_DECIMALS},40}})(?![\d.])")

# digits are bounded so that a comparison is fast for any text of the policy
_NUMBER_PLAIN = _NUMBER_TABLES.pattern("plain")
_FORMS = _NUMBER_TABLES.patterns("forms")
_SCALE_WORD = _NUMBER_TABLES.pattern("scale_word", re.IGNORECASE)
_LETTER_SCALE = re.compile(r"([kKMB])(?![A-Za-z])")
_LETTERS = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9}
_GAPS = str.maketrans("", "", ", ")
_WORD = re.compile(r"[A-Za-z]+")
_NEXT_WORD = re.compile(r"(?:(?<=\w)[\s-]+(and\s+)?)?([A-Za-z]+)")
_POINT = _NUMBER_TABLES.pattern("point", re.IGNORECASE)
_PART = _NUMBER_TABLES.pattern("part", re.IGNORECASE)
_NUMBER_HALF = _NUMBER_TABLES.pattern("half", re.IGNORECASE)


def as_number(text: str) -> Fraction | None:
    """A plain number such as -5, 1,234.50, .5 or 3/4; None for anything else."""
    match = _NUMBER_PLAIN.fullmatch(text.strip().replace("\N{MINUS SIGN}", "-"))
    if match is None:
        return None
    top, _, bottom = match[0].replace(",", "").partition("/")
    divisor = int(bottom or 1)
    return Fraction(top) / divisor if divisor else None


def same_plain(answer: str, gold: str) -> bool | None:
    """Whether two plain numbers are equal; None if one of the texts is no plain number."""
    value, wanted = as_number(answer), as_number(gold)
    if value is None or wanted is None:
        return None
    return value == wanted or is_rounded(value, wanted, answer, gold)


def is_rounded(value: Fraction, wanted: Fraction, answer: str, gold: str) -> bool:
    """Whether the gold is the value of the answer, written out to many decimals."""
    places = long_decimals(gold, answer).get(abs(wanted))
    return places is not None and rounds_to(value, wanted, places)


def long_decimals(gold: str, answer: str) -> dict[Fraction, int]:
    """The decimals of a gold that are so long that they mean an exact value, each with its places;
    none if the answer itself contains a decimal point."""
    if "." in answer:
        return {}
    found = {}
    for match in _LONG.finditer(gold):
        if len((match[1] + match[2]).strip("-0")) >= LONG_DECIMALS:
            found[abs(Fraction(match[0]))] = len(match[2])
    return found


def rounds_to(value: Fraction, decimal: Fraction, places: int) -> bool:
    """Whether a decimal of this number of places, or a double, is the rounded value."""
    allowed = max(Fraction(1, 2 * 10**places), abs(decimal) * FLOAT_STEP)
    return abs(value - decimal) <= allowed


def leading_number(text: str) -> tuple[Fraction, str] | None:
    """The number at the beginning of `text`, in any of the usual forms, and the rest."""
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
        value, rest = value * _NUMBER_SCALES[(scale[1] or scale[2]).lower()], rest[scale.end() :]
    return sign * value, rest.strip()


def letter_scale(rest: str) -> tuple[int, str]:
    """The factor of a money scale letter, as in $5M, and the rest."""
    match = _LETTER_SCALE.match(rest)
    return (_LETTERS[match[1]], rest[match.end() :]) if match else (1, rest)


def _in_digits(text: str) -> tuple[Fraction, str] | None:
    for pattern in _FORMS.values():
        match = pattern.match(text)
        value = _number_value(match) if match is not None else None
        if match is not None and value is not None:
            return value, text[match.end() :]
    return None


def _number_value(match: re.Match[str]) -> Fraction | None:
    """(n + t / b) * 10^e, with a cycle of decimals after the fixed ones."""
    parts = {name: (part or "").translate(_GAPS) for name, part in match.groupdict().items()}
    top, bottom = Fraction(parts.get("t", "0")), Fraction(parts.get("b", "1"))
    if not bottom:
        return None
    value = Fraction("0" + parts.get("n", "")) + top / bottom
    if "cycle" in parts:
        nines = 10 ** len(parts["cycle"]) - 1
        value += Fraction(int(parts["cycle"]), nines * 10 ** len(parts["fixed"]))
    return value * Fraction(10) ** int(parts.get("e", "0"))


def _in_words(text: str) -> tuple[Fraction, str] | None:
    """English number words, and the rest: twenty-one, nineteen seventy-two (a year),
    three quarters, two and a half, half a."""
    found = _run_of_words(text)
    if found is None:
        match = _NUMBER_HALF.match(text)
        if match is None:
            return None
        divisor = _PARTS.get(match[1].lower())
        return Fraction(1, divisor) if divisor else Fraction(12), text[match.end() :]
    number, is_ordinal, end = found
    rest = text[end:]
    if is_ordinal:
        return Fraction(number), " ordinal" + rest
    decimals = _POINT.match(rest)
    if decimals is not None:
        digits = "".join(str(CARDINALS[word]) for word in decimals[1].lower().split())
        return Fraction(f"{number}.{digits}"), rest[decimals.end() :]
    part = _PART.match(rest)
    if part is None or part[2].lower() not in _PARTS:
        return Fraction(number), rest
    divisor, rest = _PARTS[part[2].lower()], rest[part.end() :]
    if part[1]:
        return number + Fraction(CARDINALS.get(part[1].lower(), 1), divisor), rest
    return Fraction(number, divisor), rest


def words_as_digits(text: str) -> str:
    """The text with its English number words in digits: Forty-Five Fathers as 45 Fathers, the
    nineteenth century as the 19th century."""
    kept, place = [], 0
    for match in _WORD.finditer(text):
        if match.start() < place or match[0].lower() not in _WORDS:
            continue
        found = _run_of_words(text[match.start() :])
        if found is None:
            continue
        number, is_ordinal, end = found
        kept.append(text[place : match.start()])
        kept.append(f"{number}{_ending(number)}" if is_ordinal else str(number))
        place = match.start() + end
    return "".join([*kept, text[place:]])


def _ending(number: int) -> str:
    if number % 100 in (11, 12, 13):
        return "th"
    return {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")


def _run_of_words(text: str) -> tuple[int, bool, int] | None:
    """The number that the text begins with in words, whether it is an ordinal, and its end: one
    hundred and two thousand and four, nineteen seventy-two."""
    total, current, place = 0, None, 0
    room, is_scaled, is_year, is_ordinal = 100, False, False, False  # below `room` may follow
    for _ in range(MAX_NUMBER_WORDS):
        match = _NEXT_WORD.match(text, place)
        word = match[2].lower() if match is not None else ""
        value = _WORDS.get(word)
        if match is None or value is None or (match[1] and (room < 100 or value >= 100)):
            break
        if value < 100:
            if value >= room or not (value or room == 100):
                if is_scaled or is_year or value < 10 or not 10 <= (current or 0) < 100:
                    break
                current, is_year = (current or 0) * 100, True
            current = (current or 0) + value
            room = 10 if value >= 20 else 0
        elif is_year or (value == 100 and (current or 0) >= 100):
            break
        else:
            current = (1 if current is None else current) * value
            if value > 100:
                total, current = total + current, None
            room, is_scaled = 100, True
        place, is_ordinal = match.end(), word in ORDINALS
        if is_ordinal:
            break
    return (total + (current or 0), is_ordinal, place) if place else None
