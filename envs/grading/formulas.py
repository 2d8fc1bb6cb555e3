r"""Formulas in one form: as Python or in words, vectors, sums of a few terms, inequalities.

All is rewritten for math-verify: x**2 and x squared as x^{2}, 2i - 3j as a column, x > 2
and all real numbers greater than 2 as (2,\infty), 40 in base nine as 40_9.
"""

from __future__ import annotations

import importlib
import re
from fractions import Fraction
from itertools import pairwise
from typing import Any

from agentenv.envs.grading.numbers import as_number, words_as_digits
from agentenv.envs.grading.quantities import Unit, quantity
from agentenv.envs.grading.text import Tables, rewritten

_FORMULA_TABLES = Tables("formulas")

MAX_CHARS = 400
MAX_TERMS = 30


def formulas(found: str, wanted: str) -> tuple[str, str] | None:
    """Both texts rewritten, without a unit that one of them omits; None for two units."""
    (answer, unit), (gold, other) = _measured(found), _measured(wanted)
    if unit is not None and other is not None and unit != other:
        return None
    answer, gold = formula(answer), formula(gold)
    if _COLUMN.fullmatch(gold) and _ROW.fullmatch(answer):
        answer = _column(answer[1:-1].split(","))
    if _COLUMN.fullmatch(answer) and _ROW.fullmatch(gold):
        gold = _column(gold[1:-1].split(","))
    return answer, gold


_COLUMN = re.compile(r"\\begin\s*\{[pb]matrix\}[^&]*\\\\[^&]*\\end\s*\{[pb]matrix\}")
_ROW = re.compile(r"[(\[][^()\[\]]*,[^()\[\]]*[)\]]")
_MEASURED = re.compile(r"(.*\\[a-z].*?)\s+([A-Za-z\N{DEGREE SIGN}][A-Za-z./^{}\d ]{0,40})")
_NO_UNITS = re.compile(r"(?:square |sq\.? |cubic )?units?(?:\^\{?[23]\}?)?")


def _measured(text: str) -> tuple[str, Unit | None]:
    r"""An expression and the unit after it: 5\sqrt{3} cm."""
    match = _MEASURED.fullmatch(text) if len(text) <= MAX_CHARS else None
    if match is None:
        return text, None
    if _NO_UNITS.fullmatch(match[2]):
        return match[1], None
    is_name = len(match[2]) > 1 or match[2] == "m"
    amount = quantity(f"1 {match[2]}") if is_name else None
    if amount is None or not amount.dimension or amount.words:
        return text, None
    return match[1], Unit(amount.dimension, amount.factor)


def formula(text: str) -> str:
    """A cleaned answer, rewritten; unchanged when no rule applies."""
    if len(text) > MAX_CHARS:
        return text
    text = _from_words(_from_python(text))
    text = _RATIO.sub(r"\\frac{\1}{\2}", _in_radians(_with_base(text)))
    return interval(vector(expanded(text))).strip()


# Python, words.

_PYTHON = _FORMULA_TABLES.rewrites("python")
_MATRIX = re.compile(r"(?:(?:Matrix|np\.array|array)\()?\[(\[[^\[\]]*\](?:,\s*\[[^\[\]]*\])*)\]\)?")
_WORDS = _FORMULA_TABLES.rewrites("words")


def _from_python(text: str) -> str:
    text = rewritten(text, _PYTHON)
    matrix = _MATRIX.fullmatch(text)
    if matrix is not None:
        rows = re.findall(r"\[([^\[\]]*)\]", matrix[1])
        text = _column([row.replace(",", " & ") for row in rows])
    return text


def _from_words(text: str) -> str:
    if re.search(r"[a-z]{4}", text) is None:
        return text
    return rewritten(words_as_digits(text), _WORDS)


_BASE = _FORMULA_TABLES.pattern("base")
_RATIO = re.compile(r"^(\d{1,9})\s*(?::|to)\s*([1-9]\d{0,8})$")
_ANGLE = re.compile(r"(\\(?:sin|cos|tan|cot|sec|csc))\s*[({]?(\d{1,4})\s*\N{DEGREE SIGN}[)}]?")


def _with_base(text: str) -> str:
    match = _BASE.fullmatch(text)
    return text if match is None else f"{match[1] or match[4]}_{match[2] or match[3]}"


def _in_radians(text: str) -> str:
    return _ANGLE.sub(lambda match: rf"{match[1]}(\frac{{{match[2]}\pi}}{{180}})", text)


# Vectors.

_UNIT_VECTOR = _FORMULA_TABLES.text("unit_vector")
_TERM = re.compile(r"([+-]?)([^+-]*?)\s*(?:\\cdot|\*)?\s*<([ijk])>")
_ANGLES = re.compile(r"\\langle(.*)\\rangle", re.DOTALL)
_TRANSPOSED = _FORMULA_TABLES.pattern("transposed")


def vector(text: str) -> str:
    r"""3\mathbf{i} - \mathbf{j} + 2k, \langle 3, -1, 2 \rangle and (3, -1, 2)^T as a column."""
    for form in (_ANGLES, _TRANSPOSED):
        match = form.fullmatch(text)
        if match is not None:
            return _column(match[1].split(","))
    plain = re.sub(_UNIT_VECTOR, r"<\1>", text)
    if "<" not in plain or plain == text:
        plain = re.sub(r"(?<![A-Za-z\\])([ijk])(?![A-Za-z])", r"<\1>", text)
        if not {"<i>", "<j>", "<k>"} <= set(re.findall(r"<[ijk]>", plain)):
            return text
    plain = plain.replace(" ", "")
    parts: dict[str, str] = {}
    place = 0
    for match in _TERM.finditer(plain):
        if match.start() != place or match[3] in parts:
            return text
        place = match.end()
        parts[match[3]] = f"{match[1].replace('+', '')}{match[2] or '1'}"
    names = "ijk" if "k" in parts else "ij"
    return _column([parts.get(name, "0") for name in names]) if place == len(plain) else text


def _column(rows: list[str]) -> str:
    lines = r" \\ ".join(row.strip() for row in rows)
    return rf"\begin{{pmatrix}}{lines}\end{{pmatrix}}"


# Sums.

_SUM = _FORMULA_TABLES.pattern("sum")


def expanded(text: str) -> str:
    r"""\sum_{k=0}^{3} x^k as its terms, if the whole is one sum of a few."""
    match = _SUM.fullmatch(text)
    if match is None:
        return text
    name, first, last, body = match[1], int(match[2]), int(match[3] or match[4]), match[5].strip()
    if not 0 < last - first + 1 <= MAX_TERMS or len(body) > 40:
        return text
    variable = re.compile(rf"(?<![A-Za-z\\]){name}(?![A-Za-z])|(?<=[\d^]){name}")
    return " + ".join(
        f"({variable.sub(lambda _, value=number: f'{{{value}}}', body)})"
        for number in range(first, last + 1)
    )


# Inequalities and sets of numbers, as intervals.

_SIGN = _FORMULA_TABLES.text("sign")
_NAME = _FORMULA_TABLES.text("name")
_BUILDER = _FORMULA_TABLES.pattern("builder")
_ALL = _FORMULA_TABLES.pattern("all", re.IGNORECASE)
_FRENCH = re.compile(r"(?<![\w)])([\]\[])([^\[\](){},;]+[,;][^\[\](){},;]+)([\]\[])")  # ]2, 3[
_LITERAL = _FORMULA_TABLES.pattern("literal")
_EVERY = re.compile(rf"^(?:for )?(?:all|any|every) (?={_NAME}\s*{_SIGN})")
_MEMBER = re.compile(rf"({_NAME})\s*\\in\s*(.+)")
_VALUE = rf"(?:(?!{_SIGN}).)+?"
_COMPARED = re.compile(  # 1 < x < 3, x > 2, > 2, 2 < x
    rf"(?:(?P<low>{_VALUE})\s*(?P<first>{_SIGN})\s*(?={_NAME}))??(?:{_NAME}\s*)?"
    rf"(?:(?P<second>{_SIGN})\s*(?P<high>{_VALUE}))?"
)
_NOT_EQUAL = re.compile(rf"({_NAME})\s*\\ne\s*(.+)")
_EXCEPT = _FORMULA_TABLES.pattern("except", re.IGNORECASE)
_BETWEEN = _FORMULA_TABLES.pattern("between", re.IGNORECASE)
_UNION = re.compile(r"\s*(?:\\cup|\\lor|\\vee|\bor\b|\\text\s*\{\s*or\s*\})\s*", re.IGNORECASE)
_BOTH = re.compile(r"\s*(?:\\land|\\wedge|\band\b|\\text\s*\{\s*and\s*\})\s*", re.IGNORECASE)
_PROSE = re.compile(r"(?<![A-Za-z\\])(?!sqrt|frac)[A-Za-z]{3,}|[A-Za-z]+ [A-Za-z]+")
_UNBOUND = r"\infty"


def interval(text: str) -> str:
    r"""x > 2, 1 \le x < 3, \{x : x > 2\}, x \ne 2, all real numbers but 2 as intervals."""
    plain = text.replace(r"\lt", "<").replace(r"\gt", ">")
    plain = re.sub(r"\\(?:left|right)(?![a-z])", "", plain).strip()
    builder = _BUILDER.fullmatch(plain)
    plain = builder[2] if builder is not None else plain
    excluded = _EXCEPT.fullmatch(plain) or (_NOT_EQUAL.fullmatch(plain) if "," in plain else None)
    if excluded is not None:
        return _without(re.sub(r"^\\?\{|\\?\}$", "", excluded[excluded.lastindex or 1])) or text
    plain = _FRENCH.sub(_bracketed, plain)
    plain = _EVERY.sub("", plain)
    stated = _ALL.match(plain)
    if stated is not None and re.match(
        rf"\s*{_SIGN}|\s*{_NAME}\s*{_SIGN}|\s*between", plain[stated.end() :]
    ):
        plain = plain[stated.end() :].strip()
    if plain != text and _LITERAL.fullmatch(plain):
        return plain
    if builder is None and not re.search(rf"{_SIGN}|\\ne|\\in(?![a-z])|between", plain):
        return text
    parts = [_one_interval(part) for part in _UNION.split(plain)]
    if not all(parts) or any(_PROSE.search(part) for part in parts):
        return text
    return r" \cup ".join(part for part in parts if part)


def _bracketed(match: re.Match[str]) -> str:
    opening = "(" if match[1] == "]" else "["
    return f"{opening}{match[2].replace(';', ',')}{')' if match[3] == '[' else ']'}"


def _one_interval(text: str) -> str:
    """One condition as an interval; "" if it is none."""
    between = _BETWEEN.fullmatch(text)
    if between is not None:
        opening, closing = "[]" if between[3].lower() == "inclusive" else "()"
        return f"{opening}{between[1]},{between[2]}{closing}"
    parts = [_ends(part) for part in _BOTH.split(text)]
    member = _MEMBER.fullmatch(text) if len(parts) == 1 else None
    if member is not None:
        return member[2]
    unequal = _NOT_EQUAL.fullmatch(text) if len(parts) == 1 else None
    if unequal is not None:
        return _without(unequal[2])
    if not all(parts):
        is_set = re.fullmatch(r"[(\[][^()\[\]]+,[^()\[\]]+[)\]]|\\\{[^{}]+\\\}", text)
        return text if is_set else ""
    lows, highs = ([end for part in parts for end in part[side]] for side in ("low", "high"))
    if len(lows) > 1 or len(highs) > 1:
        return ""
    return ",".join([*(lows or [f"(-{_UNBOUND}"]), *(highs or [f"{_UNBOUND})"])])


_TURNED = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le"}


def _ends(text: str) -> dict[str, list[str]]:
    """The ends, with their brackets, of the numbers that one comparison allows; empty for none."""
    match = _COMPARED.fullmatch(text)
    ends: dict[str, list[str]] = {"low": [], "high": []}
    for side, sign in (("low", "first"), ("high", "second")):
        if match is not None and match[sign]:
            found = _TURNED[match[sign]] if side == "low" else match[sign]
            if found in (">", r"\ge"):
                ends["low"].append(f"{'(' if found == '>' else '['}{match[side].strip()}")
            else:
                ends["high"].append(f"{match[side].strip()}{')' if found == '<' else ']'}")
    return ends if any(ends.values()) else {}


def _without(values: str) -> str:
    """All real numbers except these."""
    points = [point.strip() for point in re.split(r",\s*(?:and\s)?|\s+and\s+|\s+or\s+", values)]
    if len(points) > 1:
        if None in map(as_number, points):
            return ""
        points.sort(key=lambda point: as_number(point) or Fraction(0))
    ends = [f"-{_UNBOUND}", *points, _UNBOUND]
    return r" \cup ".join(f"({low},{high})" for low, high in pairwise(ends))


_READING_TABLES = Tables("reading")

MAX_RUNS = 16  # of digits that are changed, one after the other

_IMAGINARY = _READING_TABLES.pattern("imaginary")
_ROOT = re.compile(r"\\sqrt\s*\{\s*-\s*1\s*\}")
_DECIMAL = re.compile(r"(?<![\d.])(\d{0,40})\.(\d{1,40})(?![\d.])")
_GROUPED = _READING_TABLES.pattern("grouped")
_EXPONENT = re.compile(r"(?<![\w.}])(\d{1,40}(?:\.\d{1,40})?)[eE]([+-]?\d{1,4})(?![\w.{])")
_MIXED = _READING_TABLES.pattern("mixed")
_PRIMES = re.compile(r"(?<![A-Za-z\\])([A-Za-z])('{1,4})(?!')")
_READING_TRANSPOSED = re.compile(r"\^\s*\{?\s*(?:T(?![A-Za-z])|\\top|\\intercal)\s*\}?")
_PRODUCTS = _READING_TABLES.rewrites("products")
_UNREAD = _READING_TABLES.pattern("unread")
_RUN = re.compile(r"\d+")


def readable(text: str) -> str | None:
    """A cleaned formula as latex2sympy reads it: decimals as fractions, i for the root of -1,
    primes in names; None for a text with a part that it would omit."""
    text = _ROOT.sub("i", text.replace("$", "").strip().removeprefix("="))
    text = _EXPONENT.sub(r"\1 \\cdot 10^{\2}", text)
    text = _GROUPED.sub(lambda match: re.sub(r"[ ,]", "", match[0]), text)
    text = _DECIMAL.sub(_as_fraction, text)
    text = _PRIMES.sub(lambda match: f"{match[1]}_{{{'p' * len(match[2])}}}", text)
    text = _MIXED.sub(_as_sum, text.rstrip("\N{DEGREE SIGN} "))
    text = _IMAGINARY.sub("I", _READING_TRANSPOSED.sub("^{t_{T}}", text))
    text = rewritten(text, _PRODUCTS)
    return None if _UNREAD.search(text) else text


def _as_fraction(match: re.Match[str]) -> str:
    digits = (match[1] + match[2]).lstrip("0") or "0"
    return rf"\frac{{{digits}}}{{{10 ** len(match[2])}}}"


def _as_sum(match: re.Match[str]) -> str:
    if int(match[2]) >= int(match[3]):
        return rf"{match[1]}\cdot \frac{{{match[2]}}}{{{match[3]}}}"
    return rf"({match[1]}+\frac{{{match[2]}}}{{{match[3]}}})"


class Reader:
    """Reads two formulas alike: letters of either case are distinct where one text contains both
    cases of a letter."""

    def __init__(self, *texts: str) -> None:
        package = importlib.import_module("latex2sympy2_extended")
        module = importlib.import_module("latex2sympy2_extended.latex2sympy2")
        self._config = module.ConversionConfig(
            lowercase_symbols=not any(_has_both_cases(text) for text in texts)
        )
        self._normal = package.NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
        )
        self._module = module

    def read(self, text: str) -> Any:
        """The expression of a whole text. Raises the errors of latex2sympy."""
        return self._module.latex2sympy(
            self._module.normalize_latex(text, self._normal),
            is_real=True,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=self._config,
        )

    def is_whole(self, text: str, found: Any) -> bool:
        """Whether each run of digits matters: the number is in the expression, or another number
        makes another expression."""
        held = set(_RUN.findall(str(found)))
        runs = [run for run in _RUN.finditer(text) if (run[0].lstrip("0") or "0") not in held]
        return all(self._matters(text, run, found) for run in runs[:MAX_RUNS])

    def _matters(self, text: str, run: re.Match[str], found: Any) -> bool:
        for other in (str(int(run[0]) + 7), "0"):
            try:
                changed = self.read(f"{text[: run.start()]}{other}{text[run.end() :]}")
            except Exception:  # any error of the grammar or SymPy: the digits were read
                return True
            if changed != found:
                return True
        return False


def _has_both_cases(text: str) -> bool:
    letters = set(re.findall(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", text)) - {"i", "I"}
    return any(letter.swapcase() in letters for letter in letters)
