"""The parts of an answer, and whether a part names something, describes its neighbor, or counts."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache
from itertools import pairwise

from msgspec import Struct

from agentenv.envs.grading import dates
from agentenv.envs.grading.forms import truth
from agentenv.envs.grading.names import STATES, country_of, is_titled, provinces
from agentenv.envs.grading.numbers import leading_number, words_as_digits
from agentenv.envs.grading.quantities import PERCENT, Quantity, quantity, unit_of
from agentenv.envs.grading.text import Cut, Joint, Tables, clean, lines, marks, sentences, unify
from agentenv.envs.grading.words import has_cjk, is_wordy, tokens

# The frame of an answer: the filler words around the gold.
#
# The text beside the gold is the frame and a rest, whatever separates them. Without a rest the
# answer names the gold alone; a rest that reads as a whole answer is a second one.

_FRAMES = Tables("frame")
ANSWERING = _FRAMES.words("answering")
GUESSING = _FRAMES.words("guessing")
FRAME = ANSWERING | GUESSING | _FRAMES.words("joining")
_BEFORE_BUT = ANSWERING | _FRAMES.words("retracted")
MASK = "\0"  # in place of the gold
_SURE = _FRAMES.pattern("sure", re.IGNORECASE)
_NUMBERED = _FRAMES.pattern("numbered", re.IGNORECASE)
_TAG = _FRAMES.pattern("tag", re.IGNORECASE)
_NEXT = _FRAMES.pattern("next", re.IGNORECASE)
_NAME_BEFORE = _FRAMES.pattern("name_before")
_NAME_AFTER = _FRAMES.pattern("name_after")
_WORD = re.compile(r"[^\W\d_]+")
_PUNCTUATION = re.compile(r"""(?:[^\W\d_]|[\s.,;:!'"()\[\]{}*#>`$-])*""")
_BUT = re.compile(r"\b(?:but|however)\b", re.IGNORECASE)
_WHOLE = r"""(?:^|(?<=[\s"'(\[{*`$]))""", r"""(?=$|[\s"')\]}*`$]|[.,;:!]+(?:\W|$))"""
_CITED = re.compile(r"^\d[.)]\s+|\[\d{1,2}\]")
_ALTERED = _FRAMES.pattern("altered", re.IGNORECASE)
_LETTERS = re.compile(r"\b[A-HJ-Z]\b")
_LETTER = re.compile(r"\b[A-HJ-Z]\b(?!\s+\w|')")  # of an option, no article
_ALONE = r"(?<![A-Za-z\d-])(?<!\d[.,/:])(?<!frac\{)(?<!\}\{)", r"(?![A-Za-z\d]|[.,/:]\d)"
_SCRIPT = re.compile(r"[\u0370-\u06ff\u0900-\u0eff\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af]+")


def _parts(text: str, golds: Sequence[str], ends: tuple[str, str]) -> list[str]:
    """The text around the mentions of the gold, in any of its forms."""
    forms = {_plain(gold).rstrip(".") for gold in golds} - {""}
    text = _plain(text)
    if not any(re.search(r"\d", form) for form in forms):
        text = _CITED.sub(" ", text).strip()
    if not any(map(_SCRIPT.search, forms)):
        text = _SCRIPT.sub(r" \g<0> ", text)
    either = "|".join(map(re.escape, sorted(forms, key=len, reverse=True)))
    return re.split(f"{ends[0]}(?:{either}){ends[1]}", text) if forms else []


def _plain(text: str) -> str:
    """The text without tags, words of certainty and numbers of sources."""
    return _NEXT.sub("or", _NUMBERED.sub(" ", _SURE.sub(" ", _TAG.sub(" ", unify(text))))).strip()


def masked(text: str, golds: Sequence[str]) -> str:
    """A text with a mask for each mention of the gold; "" if there is none."""
    parts = _parts(text, golds, _ALONE)
    return f" {MASK} ".join(parts) if len(parts) > 1 else ""


def is_framed(text: str, golds: Sequence[str], *, is_word: bool) -> bool:
    """Whether a text is the gold, word for word in one of its forms, in a frame that denies and
    doubts nothing. A gold that `is_word` of the frame itself, such as yes or the letter A, must end
    a clause."""
    parts = _parts(text, golds, _WHOLE)
    if len(parts) < 2 or not all(map(_PUNCTUATION.fullmatch, parts)):
        return False
    before, after = parts[0], " ".join(parts[1:])
    is_word = is_word or {*golds[0].casefold().split()} <= FRAME
    if is_word and (
        not re.match(r"\W*$|\s*[^\w\s]", after) or _LETTERS.search(f"{before} {after}")
    ):
        return False
    if _BUT.search(after) or _LETTER.search(f"{before} {after}") or _ALTERED.search(before):
        return False
    if golds[0].strip()[:1].isalpha():
        if any(map(_NAME_BEFORE.search, parts[:-1])) or any(map(_NAME_AFTER.match, parts[1:])):
            return False
    elif re.search(r"[-+]\W*$", before):
        return False
    *rejected, before = _BUT.split(before)
    is_left = {*_words(" ".join(rejected))} <= _BEFORE_BUT
    return is_left and {*_words(f"{before} {after}")} <= ANSWERING


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


_TABLES = Tables("phrases")
LABELS, ASIDES, _NOTES = (frozenset(_TABLES[name]) for name in ("labels", "asides", "notes"))
_PROVINCES = frozenset(_TABLES["provinces"]) | provinces("GB", "CA", "AU", "IN")
_STATES = frozenset(map(str.lower, STATES.values()))


_OPERATORS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
MAX_SUM_CHARS = 60
MAX_LEADS = 30


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
OPENING = _TABLES.pattern("opening", re.IGNORECASE)
FUNCTION_WORDS = _TABLES.words("function_words")
_LEADS = (
    ANSWERING - ASIDES - FUNCTION_WORDS - _TABLES.words("changing")
    | GUESSING
    | {"that", "which", "who"}
)
_LEAD = re.compile(Tables("phrases", answering="|".join(_LEADS)).text("lead"))
_PRONOUN = _TABLES.pattern("pronoun", re.IGNORECASE)
_OCCUPATION = re.compile(r"[a-z]{3,}(?:ist|er|or|ian|man|woman|ess|ician|smith|ant|ee|ary)s?")
_NATIONAL = re.compile(r"(?:^|-)[A-Z][a-z]+(?:ish|ese|ian|ean|ican|ch)$")
ARTICLE = re.compile(r"^(?:an?|the|one of)\s+", re.IGNORECASE)
_CAPITAL = re.compile(r"[A-Z][a-z]+")
FORMULA = re.compile(r"(?:[A-Z][a-z]?\d*){1,4}")  # of a substance


def without_lead(text: str, gold: str, *, is_truth: bool = False) -> tuple[str, bool]:
    """A part without "or perhaps", "option 2:" and the like, unless the gold begins so, and whether
    "it is" led to it."""
    start, end, lower = 0, len(text.partition("\n")[0]), text.lower()  # letters are compared faster
    for _ in range(MAX_LEADS):
        match = None if text.startswith(gold, start) else _LEAD.match(lower, start, end)
        if match is None or (is_truth and truth(match[0].strip(" ,\n\r\t")) is not None):
            break
        start = match.end()
    return text[start:], start > 0 and _PRONOUN.search(text[:start]) is not None


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
    return amount if not capitals or has_cjk(text) else None


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
    kept = [word for word in words if word and word.lower() not in FUNCTION_WORDS]
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
    if {one.dimension, other.dimension} == {(), PERCENT} and not one.words + other.words:
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
    """0 for a place, 1 for a state, 2 for a country."""
    name = " ".join(tokens(text))
    return 1 if name in _PROVINCES else 2 if country_of(text) else int(name in _STATES)


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
