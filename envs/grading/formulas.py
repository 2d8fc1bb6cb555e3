r"""Formulas in one form: as Python or in words, vectors, sums of a few terms, inequalities.

All is rewritten for math-verify: x**2 and x squared as x^{2}, 2i - 3j as a column, x > 2
and all real numbers greater than 2 as (2,\infty), 40 in base nine as 40_9.
"""

from __future__ import annotations

import re

from agentenv.envs.grading.numbers import words_as_digits
from agentenv.envs.grading.quantities import Quantity, quantity
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


def _measured(text: str) -> tuple[str, Quantity | None]:
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
    return match[1], amount


def formula(text: str) -> str:
    """A cleaned answer, rewritten; unchanged when no rule applies."""
    if len(text) > MAX_CHARS:
        return text
    text = rewritten(text, _PYTHON)
    if re.search(r"[a-z]{4}", text):
        text = rewritten(words_as_digits(text), _WORDS)
    text = rewritten(text, _NOTATIONS)
    return condition(vector(expanded(text))).strip()


_PYTHON = _FORMULA_TABLES.rewrites("python")
_WORDS = _FORMULA_TABLES.rewrites("words")
_NOTATIONS = _FORMULA_TABLES.rewrites("notations")
_MATRIX = re.compile(r"(?:(?:Matrix|np\.array|array)\()?\[(\[[^\[\]]*\](?:,\s*\[[^\[\]]*\])*)\]\)?")
_LISTED = _FORMULA_TABLES.pattern("listed")
_UNIT_VECTOR = _FORMULA_TABLES.text("unit_vector")
_SUM_OF = re.compile(r".[+-]")


def vector(text: str) -> str:
    r"""3\mathbf{i} - \mathbf{j} + 2k, \langle 3, -1, 2 \rangle and (3, -1, 2)^T as a column;
    [[1, 2], [3, 4]] as a matrix."""
    matrix, listed = _MATRIX.fullmatch(text), _LISTED.fullmatch(text)
    if matrix is not None:
        return _column(re.findall(r"\[([^\[\]]*)\]", matrix[1].replace(",", " & ")))
    if listed is not None:
        return _column((listed[1] or listed[2]).split(","))
    plain = re.sub(_UNIT_VECTOR, r"<\1>", text)
    if "<" not in plain or plain == text:
        plain = re.sub(r"(?<![A-Za-z\\])([ijk])(?![A-Za-z])", r"<\1>", text)
        if not {"<i>", "<j>", "<k>"} <= set(re.findall(r"<[ijk]>", plain)):
            return text
    plain = plain.replace(" ", "")
    pieces = re.split(r"(?:\\cdot|\*)?<([ijk])>", plain)
    parts = dict(zip(pieces[1::2], pieces[::2], strict=False))
    if pieces[-1] or 2 * len(parts) != len(pieces) - 1 or any(map(_SUM_OF.search, pieces)):
        return text
    names = "ijk" if "k" in parts else "ij"
    terms = (parts.get(name, "0").removeprefix("+") for name in names)
    return _column([{"": "1", "-": "-1"}.get(term, term) for term in terms])


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


# Inequalities and sets of numbers.

_SETS = _FORMULA_TABLES.rewrites("sets")
_OR = re.compile(r"\s*(?:\\cup|\\lor|\\vee|\bor\b|\\text\s*\{\s*or\s*\})\s*", re.IGNORECASE)
_AND = _FORMULA_TABLES.pattern("and")
_COMPARED = re.compile(rf"{_FORMULA_TABLES.text('sign')}|\\ne")
_NUMBERS = _FORMULA_TABLES.pattern("numbers")
_PROSE = re.compile(r"(?<![A-Za-z\\])(?:(?!sqrt|frac)[A-Za-z]{3,}|[A-Za-z]+ [A-Za-z])")


def condition(text: str) -> str:
    r"""A set of numbers as conditions between \lor and \land: all real numbers but 2, \{x : x > 2\}
    and ]2,3[ as \mathbb{R} \setminus \{2\}, x > 2 and (2,3)."""
    text = re.sub(r"\\(?:left|right)(?![a-z])", "", text).strip()
    plain = rewritten(text, _SETS)
    if plain == text and not _COMPARED.search(text):
        return text
    parts = [_AND.split(part) for part in _OR.split(plain)]
    for one in (one for part in parts for one in part):
        if _PROSE.search(one) or not (_COMPARED.search(one) or _NUMBERS.fullmatch(one)):
            return text
    return r" \lor ".join(map(r" \land ".join, parts))
