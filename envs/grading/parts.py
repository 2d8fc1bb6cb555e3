"""The parts of an answer, and whether a part names something, describes its neighbor, or counts."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from msgspec import Struct

from agentenv.envs.grading import dates
from agentenv.envs.grading.forms import truth
from agentenv.envs.grading.names import STATES, country_of, is_titled, provinces
from agentenv.envs.grading.numbers import leading_number, words_as_digits
from agentenv.envs.grading.quantities import Quantity, quantity, unit_of
from agentenv.envs.grading.text import (
    Cut,
    Joint,
    Tables,
    clean,
    lines,
    marks,
    sentences,
)
from agentenv.envs.grading.words import has_cjk, is_wordy, tokens

_PHRASE_TABLES = Tables("phrases")
LABELS, ASIDES, _NOTES = (frozenset(_PHRASE_TABLES[name]) for name in ("labels", "asides", "notes"))
_PROVINCES = frozenset(_PHRASE_TABLES["provinces"]) | provinces("GB", "CA", "AU", "IN")
_STATES = frozenset(map(str.lower, STATES.values()))
_CONTINENTS = frozenset(_PHRASE_TABLES["continents"])


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_PERCENT = (("percent", 1),)
MAX_SUM_CHARS = 60


class Part(Struct, frozen=True):
    """A text between two separators and how it is attached to the text before it (the first part:
    to the text after it); `led` is whether a lead-in such as "it is" was removed."""

    text: str
    joint: Joint = ""
    meets: bool = False
    led: bool = False
    is_first: bool = False

    @property
    def starts(self) -> bool:
        """Whether nothing attaches it to its neighbor."""
        return self.joint in ("", "or")


EDGE = " \t\n.,;:!?*_`\"'\u201c\u201d\u2018\u2019\u300c\u300d()[]<>~|#"
_LEAD = _PHRASE_TABLES.pattern("lead", re.IGNORECASE)
OPENING = _PHRASE_TABLES.pattern("opening", re.IGNORECASE)
_SMALL = _PHRASE_TABLES.words("small")
FUNCTION_WORDS = _PHRASE_TABLES.words("function_words")
_OCCUPATION = re.compile(r"[a-z]{3,}(?:ist|er|or|ian|man|woman|ess|ician|smith|ant|ee|ary)s?")
_NATIONAL = re.compile(r"(?:^|-)[A-Z][a-z]+(?:ish|ese|ian|ean|ican|ch)$")
ARTICLE = re.compile(r"^(?:an?|the|one of)\s+", re.IGNORECASE)
_CAPITAL = re.compile(r"[A-Z][a-z]+")
_COUNTED = _PHRASE_TABLES.words("counted")
FORMULA = re.compile(r"(?:[A-Z][a-z]?\d*){1,4}")  # of a substance


def without_lead(text: str, *, is_truth: bool = False) -> tuple[str, bool]:
    """A part without "or perhaps", "option 2:" and the like, and whether "it is" led to it."""
    led = False
    for _ in range(6):
        match = _LEAD.match(text, 0, len(text.partition("\n")[0]))
        if match is None or match.end() >= len(text):
            break
        if is_truth and truth(match[0].strip(" ,\n\r\t")) is not None:
            break
        led = led or match["pronoun"] is not None  # it is, it is now
        text = text[match.end() :]
    return text, led


def is_range(text: str) -> bool:
    """Whether the text is a range, a bound, a frequency or a period, with a number in it."""
    if not re.search(r"\d", words_as_digits(text)) and dates.frequency(text) is None:
        return False
    return dates.is_span(text)


@lru_cache(maxsize=4096)
def amount_of(text: str) -> Quantity | None:
    """A number with its unit or noun; None for a title that begins with one: Seven Samurai."""
    amount = quantity(text)
    words = amount.words if amount is not None else ""
    inner = quantity(words) if words else None
    if (inner is not None and not inner.words) or any(map(is_number, words.split()[1:])):
        return None  # two amounts: 5 six years, 5 kg of thirteen
    if amount is None or not amount.words or text.split()[-1][:1].islower():
        return amount
    in_small = quantity(text.lower())
    if in_small is not None and not in_small.words:  # 26 Kilometers
        return in_small
    capitals = [word for word in _CAPITAL.findall(text) if not _is_number_or_unit(word)]
    if not capitals or capitals[-1].lower() in _COUNTED or has_cjk(text):
        return amount
    return None


def is_number(word: str) -> bool:
    """Whether a word is a number by itself: 13, thirteen."""
    found = leading_number(word.lower())
    return found is not None and not found[1]


def _is_number_or_unit(word: str) -> bool:
    return leading_number(word.lower()) is not None or unit_of(word.lower()) is not None


@lru_cache(maxsize=4096)
def is_split(text: str, *cuts: Cut) -> bool:
    """Whether a text is more than one line or sentence, or is cut by others of `cuts`."""
    every = (marks, lines, sentences, *cuts)
    return any(len([one for one in cut(text) if one.strip(EDGE)]) > 1 for cut in every)


def trimmed(text: str) -> str:
    """The text without an unmatched bracket at an end."""
    text = text.strip().rstrip(",;\\").strip()
    text = re.sub(r"^(?:[*_`~]+(?=[-\w$])|[/|&]\s+)+|(?<=\w)(?:[_`~]+|\*{2,})$", "", text)
    text = re.sub(r"\s+(?:which|that|who|and|or|but|as well as)$", "", text)
    if not re.fullmatch(r"\\[(\[].*\\[)\]]", text, re.DOTALL):
        text = re.sub(r"^\\[(\[]|\\[)\]]$", "", text)
    pairs = ("()", "[]", "{}", *(("<>",) if not re.match(r"[<>]\s*[-+.$\d\\]", text) else ()))
    excess = {pair: text.count(pair[0]) - text.count(pair[1]) for pair in pairs}
    if not sum(excess.values()):
        return text
    for pair, count in excess.items():
        if count > 0:
            text = text.removesuffix(pair[0]).strip()
            escape = "" if pair[0] == "{" else "\\\\?"  # the braces of a set are its own
            text = re.sub(rf"^(?:\\left)?{escape}{re.escape(pair[0])}\s*", "", text)
        elif count < 0:
            text = text.removesuffix(pair[1]).strip().removeprefix(pair[1]).strip()
    return text


def is_named(text: str) -> bool:
    """Whether every content word begins with a capital or a digit."""
    words = [word.strip(EDGE) for word in re.split(r"[\s/-]+", text)]
    kept = [word for word in words if word and word.lower() not in _SMALL | FUNCTION_WORDS]
    if not kept or has_cjk(text) or "\\" in text:
        return False
    return all(not word[0].islower() for word in kept) and any(
        sign.isalpha() for word in kept for sign in word
    )


def is_expression(text: str) -> bool:
    """Whether a cleaned part is mathematics that could be an answer: no lone name such as f(x)."""
    if is_wordy(text) or re.fullmatch(r"[A-Za-z](?:_\{?\w+\}?)?(?:\([a-z]\))?", text):
        return False
    return re.search(r"[\w\\]", text) is not None


def value_of(text: str) -> Fraction | None:
    """The value of a sum that is written out, 5 + 8 or 9 x 2; None for anything else."""
    text = re.sub(r"\\(?:times|cdot)|[x\u00d7\u00b7]", "*", text).replace("\u00f7", "/")
    text = re.sub(r"[$%\s]|,(?=\d{3})", "", text)
    if len(text) > MAX_SUM_CHARS or not re.fullmatch(r"[\d.()+*/-]+", text) or "**" in text:
        return None
    try:
        return _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None


def _evaluated(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as value):
            return Fraction(str(value))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_evaluated(left), _evaluated(right))
    raise ValueError("no sum")


def is_sum_of_names(text: str) -> bool:
    """Whether a side of an equation names a value and is not to be solved: x, m + n, f(0) + f(1),
    10p + q; not x + 5."""
    if not re.search(r"[A-Za-z]", text) or re.search(r"\b(?:and|or|to|if|is)\b|[,;]", text):
        return False
    if amount_of(clean(text)) is not None:
        return False
    bare = re.sub(r"\([^()]*\)|_\{?\w+\}?|\\(?:left|right|text|cdot|frac|quad)(?![a-z])", "", text)
    names = set(re.findall(r"[A-Za-z]", bare))
    return len(names) > 1 or not re.search(r"\d", bare)


def is_conversion(one: Quantity, other: Quantity, text: str) -> bool:
    """Whether one is the other in another unit, rounded: 5 ft (1.5 m), 38.6 for 270/7."""
    if {one.dimension, other.dimension} == {(), _PERCENT} and not one.words + other.words:
        text = re.sub(r"(\d\.\d+)(?=\s*(?:%|percent))", r"\g<1>00", text)
        one, other = (
            Quantity(side.value / (100 if side.dimension else 1)) for side in (one, other)
        )
    if one.dimension != other.dimension or one.words != other.words:
        return False
    if one.dimension and one.factor != other.factor:
        low, high = sorted((abs(one.in_base_units), abs(other.in_base_units)))
        return high > 0 and (high - low) / high <= Fraction(3, 100)
    decimals = re.search(r"\d\.(\d{1,12})(?!\d)", text)
    if decimals is None or other.value.denominator in (1, 2, 4, 5, 10, 20, 25, 50, 100, 1000):
        return False
    return abs(one.value - other.value) <= Fraction(1, 10 ** len(decimals[1]))


def rank_of(text: str) -> int:
    """0 for a place, 1 for a state, 2 for a country, 3 for a continent."""
    name = " ".join(tokens(text))
    if name in _PROVINCES:
        return 1
    if country_of(text):
        return 2
    return 1 if name in _STATES else 3 if name in _CONTINENTS else 0


def is_of_place(bare: str, rank: int, part: Part) -> bool:
    """Whether a part is the state or country that a place lies in."""
    if part.joint not in ("comma", "bracket") or part.is_first:
        return False
    found = rank_of(bare) or (1 if bare in STATES else 0)
    return found > rank


def is_role(text: str) -> bool:
    """King of Spain, 44th President of the United States, Director."""
    words = re.sub(
        r"^(?:(?:the|an?|former|current|then|first|\d+(?:st|nd|rd|th))\s+)+", "", text, flags=re.I
    )
    first = words.split()[:1]
    return bool(first) and is_titled(first[0]) and words.split()[1:2] in ([], ["of"])


def is_note(text: str, part: Part) -> bool:
    """Whether a part names the kind of its neighbor: film, 2010 film, physicist."""
    last = text.split()[-1].strip(EDGE) if text.split() else ""
    is_kind = last.lower() in _NOTES or _OCCUPATION.fullmatch(last) is not None
    if is_kind and (not is_named(text) or (part.joint == "bracket" and " " not in text)):
        return True
    return (not part.starts or part.led) and is_nationality(text)


def is_nationality(text: str) -> bool:
    """Whether a text is, or ends in, the adjective of a country: Italian, African-American."""
    return _NATIONAL.search(text) is not None


BETWEEN = re.compile(r"(?:between|from)\s[^,;]{1,60}\s(?:and|to)\s", re.IGNORECASE)
MAX_COMPOUND = 60


def is_compound(text: str) -> bool:
    """Whether a text is one amount in two units: 3 hours and 24 minutes."""
    pieces = re.split(r",?\s+and\s+|,\s+", text) if len(text) < MAX_COMPOUND else []
    amounts = [amount_of(clean(piece)) for piece in pieces]
    known = [one for one in amounts if one is not None and one.dimension and not one.words]
    if len(known) != len(pieces) or len({one.dimension for one in known}) != 1 or len(known) < 2:
        return False
    return all(one.factor > other.factor for one, other in pairwise(known))
