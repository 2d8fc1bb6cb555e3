"""The worker for formulas: latex2sympy reads them as a whole, SymPy compares them in exact terms.

A text counts as a formula only if all of it was read: the grammar consumes it to its end, and each
run of digits affects the result.

Two values are equal if their difference is exactly zero, or vanishes to MAX_DIGITS digits (SymPy's
adaptive `evalf`, which never mistakes a small difference for none). Expressions with variables are
compared at random points, after Schwartz and Zippel. Derivatives, functions, limits and integrals
that SymPy does not evaluate become symbols.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import sympy as sp
from latex2sympy2_extended import NormalizationConfig, latex2sympy2
from math_verify.grader import unwrap_fcs
from sympy.core.evalf import PrecisionExhausted
from sympy.core.function import AppliedUndef

from agentenv.envs.grading.numbers import long_decimals, rounds_to
from agentenv.envs.grading.text import Tables, rewritten

_READING_TABLES = Tables("reading")

MAX_RUNS = 16  # of digits that are changed, one after the other

_DECIMAL = re.compile(r"(?<![\d.])(\d{0,40})\.(\d{1,40})(?![\d.])")
_GROUPED = _READING_TABLES.pattern("grouped")
_EXPONENT = re.compile(r"(?<![\w.}])(\d{1,40}(?:\.\d{1,40})?)[eE]([+-]?\d{1,4})(?![\w.{])")
_MIXED = _READING_TABLES.pattern("mixed")
_PRIMES = re.compile(r"(?<![A-Za-z\\])([A-Za-z])('{1,4})(?!')")
_PRODUCTS = _READING_TABLES.rewrites("products")
_UNREAD = _READING_TABLES.pattern("unread")
_RUN = re.compile(r"\d+")


def readable(text: str) -> str | None:
    """A cleaned formula as latex2sympy reads it: decimals as fractions, i for the root of -1,
    primes in names; None for a text with a part that it would omit."""
    text = _EXPONENT.sub(r"\1 \\cdot 10^{\2}", text.replace("$", "").strip().removeprefix("="))
    text = _GROUPED.sub(lambda match: re.sub(r"[ ,]", "", match[0]), text)
    text = _DECIMAL.sub(_as_fraction, text)
    text = _PRIMES.sub(lambda match: f"{match[1]}_{{{'p' * len(match[2])}}}", text)
    text = _MIXED.sub(_as_sum, text.rstrip("\N{DEGREE SIGN} "))
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
        self._config = latex2sympy2.ConversionConfig(
            lowercase_symbols=not any(_has_both_cases(text) for text in texts)
        )
        self._normal = NormalizationConfig(
            basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none"
        )

    def read(self, text: str) -> Any:
        """The expression of a whole text. Raises the errors of latex2sympy."""
        for sign, joined in ((r"\lor", ("Or", "Union")), (r"\land", ("And", "Intersection"))):
            if sign in text:
                parts = [self.read(part) for part in text.split(sign)]
                are_sets = any(isinstance(part, sp.Set) for part in parts)
                return getattr(sp, joined[are_sets])(*parts)
        found = self._expression(text)
        is_member = isinstance(found, sp.Eq) and isinstance(found.rhs, sp.Set)
        return found.rhs if is_member else found

    def _expression(self, text: str) -> Any:
        return latex2sympy2.latex2sympy(
            latex2sympy2.normalize_latex(text, self._normal),
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


MAX_DIGITS = 400  # working precision at which a difference that still vanishes is zero
NUM_POINTS = 4
MIN_POINTS = 2
MAX_UNORDERED = 60


class Values:
    """Compares numbers, expressions, relations, sets, tuples and matrices of SymPy."""

    def __init__(self, decimals: dict[Fraction, int] | None = None) -> None:
        self._decimals = decimals or {}
        self._names: dict[Any, Any] = {}

    def same(self, gold: Any, answer: Any) -> bool:
        """Whether both are equal, each part of the one to a part of the other."""
        gold, answer = self._opened(self._explicit(gold), self._explicit(answer))
        kinds: tuple[tuple[Any, Callable[[Any, Any], bool]], ...] = (
            (sp.MatrixBase, self._same_matrix),
            ((sp.Set, sp.Tuple), self._same_set),
            (sp.logic.boolalg.Boolean, self._same_relation),
            (sp.Expr, self._same_value),
        )
        for kind, compare in kinds:
            if isinstance(gold, kind) or isinstance(answer, kind):
                both = isinstance(gold, kind) and isinstance(answer, kind)
                return both and compare(gold, answer)
        return False

    def _explicit(self, one: Any) -> Any:
        """A matrix for a product of a number and a matrix."""
        return one.doit().as_explicit() if isinstance(one, sp.MatrixExpr) else one

    def _opened(self, gold: Any, answer: Any) -> tuple[Any, Any]:
        """5 for x = 5 where the other is a value; the set of the numbers that meet a condition."""
        gold, answer = map(self._numbers_of, (gold, answer))
        values = sp.Expr | sp.Set | sp.Tuple | sp.MatrixBase
        if isinstance(answer, values):
            gold = self._value_of(gold)
        return gold, self._value_of(answer) if isinstance(gold, values) else answer

    def _numbers_of(self, one: Any) -> Any:
        """The set of the numbers that meet a condition on one variable; the condition where SymPy
        finds none."""
        is_condition = isinstance(one, sp.logic.boolalg.Boolean) and not isinstance(one, sp.Eq)
        unequal = (sp.core.relational._Inequality, sp.Ne)  # none in x = 2 + 3 = 5
        if not is_condition or len(one.free_symbols) != 1 or not one.atoms(*unequal):
            return one
        try:
            return unwrap_fcs(one).as_set()
        except Exception:  # any error of SymPy for a condition that it cannot solve
            return one

    def _value_of(self, one: Any) -> Any:
        """The value of an equation whose left side is a name, a point of names or a sum that was
        worked out: x = 5, (r, t) = (2, 3), 3 + 4 = 7."""
        one = self._chained(one)
        if not isinstance(one, sp.Eq):
            return one
        left = one.lhs
        names = left.args if isinstance(left, sp.Tuple) else (left,)
        is_sum = not left.free_symbols and not one.rhs.free_symbols and self.same(left, one.rhs)
        return one.rhs if is_sum or all(map(self._is_name, names)) else one

    def _chained(self, one: Any) -> Any:
        """x = 5 for x = 2 + 3 = 5, if the values in between are the same."""
        parts = getattr(one, "_unsorted_args", ()) if isinstance(one, sp.And) else ()
        if not parts or not all(isinstance(part, sp.Eq) for part in parts):
            return one
        first, last = parts[0].lhs, parts[-1].rhs
        is_chain = all(this.rhs == that.lhs for this, that in pairwise(parts))
        if not is_chain or not all(self.same(part.rhs, last) for part in parts[:-1]):
            return one
        return sp.Eq(first, last, evaluate=False)

    def _is_name(self, one: Any) -> bool:
        """A variable, f(x), AB, AB/CD or |AB|."""
        kinds = (sp.Symbol, AppliedUndef)
        if isinstance(one, sp.Abs) or (isinstance(one, sp.Pow) and one.exp == -1):
            return self._is_name(one.args[0])
        parts = one.args if one.is_Mul else ()
        return isinstance(one, kinds) or (bool(parts) and all(map(self._is_name, parts)))

    def _same_matrix(self, gold: Any, answer: Any) -> bool:
        return gold.shape == answer.shape and all(map(self.same, gold.flat(), answer.flat()))

    # Numbers and expressions.

    def _same_value(self, gold: Any, answer: Any) -> bool:
        if gold.has(sp.UnevaluatedExpr) != answer.has(sp.UnevaluatedExpr):  # of a percentage
            percent = sp.UnevaluatedExpr(sp.Rational(1, 100))
            bare = (self._settled(one.replace(percent, sp.Integer(1))) for one in (gold, answer))
            if self._equal(*bare):
                return True
        sides = self._settled(gold), self._settled(answer)
        return self._equal(*sides) or self._rounds(*sides)

    def _settled(self, one: Any) -> Any:
        """The evaluated expression, with a symbol for each remaining derivative, function, limit,
        sum or integral."""
        kinds = (sp.Derivative, sp.Limit, sp.Sum, sp.Product, sp.Integral, AppliedUndef)
        one = one.replace(lambda part: isinstance(part, kinds), self._named)
        one = one.replace(
            lambda part: isinstance(part, sp.Float), lambda part: sp.Rational(str(part))
        )
        return one.doit()

    def _named(self, part: Any) -> Any:
        if isinstance(part, sp.Derivative) and part.expr.free_symbols == set(part.variables):
            return part.doit()  # d/dx of x^2
        form = part.func(*(arg.doit() for arg in part.args))
        return self._names.setdefault(form, sp.Symbol(f"unevaluated_{len(self._names)}", real=True))

    def _equal(self, gold: Any, answer: Any) -> bool:
        """Whether two evaluated expressions are equal, wherever both are defined."""
        if gold == answer:
            return not gold.has(sp.nan, sp.zoo)
        if gold.has(sp.oo, sp.nan, sp.zoo) or answer.has(sp.oo, sp.nan, sp.zoo):
            return False
        symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
        if not symbols:
            return self._vanishes(gold - answer) is True
        outcomes = [
            self._agree(gold, answer, point, is_positive)
            for point, is_positive in self._points(symbols)
        ]
        return False not in outcomes and outcomes.count(True) >= MIN_POINTS

    def _points(self, symbols: Sequence[Any]) -> Iterator[tuple[dict[Any, Any], bool]]:
        """Random rational points, and whether all of their coordinates are positive."""
        draw = random.Random(len(symbols))
        for number in range(NUM_POINTS + len(symbols)):
            point = {
                symbol: sp.Rational(draw.randint(101, 997), draw.choice((211, 307, 401)))
                for symbol in symbols
            }
            if number >= NUM_POINTS:
                point[symbols[number - NUM_POINTS]] *= -1
            yield point, number < NUM_POINTS

    def _agree(
        self, gold: Any, answer: Any, point: dict[Any, Any], is_positive: bool
    ) -> bool | None:
        """None where one is not defined; where a variable is negative, also where one is not real,
        as answers with roots and logarithms mean positive ones."""
        sides = [side.subs(point) for side in (gold, answer)]
        if any(side.has(sp.nan, sp.zoo, sp.oo) for side in sides):
            return None
        if not is_positive and not all(side.evalf(15).is_real for side in sides):
            return None
        return self._vanishes(sides[0] - sides[1])

    def _vanishes(self, difference: Any) -> bool | None:
        """Whether a number is zero, by its digits; None where SymPy finds none."""
        if difference.is_Rational:
            return bool(difference == 0)
        try:
            found = difference.evalf(15, maxn=MAX_DIGITS, strict=True)
        except PrecisionExhausted:
            return True
        except (ArithmeticError, TypeError, ValueError, AttributeError):
            return None
        return bool(found == 0) if found.is_number and found.is_comparable is not None else None

    def _rounds(self, gold: Any, answer: Any) -> bool:
        """Whether the gold is a decimal so long that it means the value of the answer."""
        if not (gold.is_Rational and answer.is_number and answer.is_real):
            return False
        decimal = Fraction(int(gold.p), int(gold.q))
        places = self._decimals.get(abs(decimal))
        if places is None:
            return False
        value = sp.Rational(str(answer.evalf(60)))
        return rounds_to(Fraction(int(value.p), int(value.q)), decimal, places)

    # Relations.

    def _same_relation(self, gold: Any, answer: Any) -> bool:
        gold, answer = self._chained(gold), self._chained(answer)
        if type(gold) is type(answer) and isinstance(gold, sp.And | sp.Or):
            return self._same_parts(gold.args, answer.args)
        if isinstance(gold, sp.Eq | sp.Ne) and type(gold) is type(answer):
            return self._same_equation(gold, answer)
        if not all(isinstance(one, sp.core.relational._Inequality) for one in (gold, answer)):
            return False
        is_strict = [one.rel_op in ("<", ">") for one in (gold, answer)]
        sides = [one.gts - one.lts for one in (gold, answer)]
        return is_strict[0] == is_strict[1] and self._ratio_is(*sides, positive=True)

    def _same_equation(self, gold: Any, answer: Any) -> bool:
        """By a constant factor, as y = 2x and 2x - y = 0 have, or by all their solutions."""
        if any(isinstance(one.rhs, sp.Set | sp.Tuple | sp.MatrixBase) for one in (gold, answer)):
            return self.same(gold.lhs, answer.lhs) and self.same(gold.rhs, answer.rhs)
        is_call = [isinstance(one.lhs, AppliedUndef) for one in (gold, answer)]
        if is_call[0] != is_call[1]:  # f(x) = x^2 and y = x^2
            are_names = self._is_name(gold.lhs) and self._is_name(answer.lhs)
            return are_names and self.same(gold.rhs, answer.rhs)
        sides = [one.lhs - one.rhs for one in (gold, answer)]
        if self._ratio_is(sides[0], sides[1], positive=False):
            return True
        if isinstance(gold, sp.Ne):
            return False
        sides = [self._settled(side) for side in sides]
        symbols = sides[0].free_symbols
        if not symbols or symbols != sides[1].free_symbols:
            return False
        return all(self._same_solutions(sides[0], sides[1], symbol) for symbol in symbols)

    def _same_solutions(self, gold: Any, answer: Any, symbol: Any) -> bool:
        golds, answers = (sp.solve(side, symbol) for side in (gold, answer))
        return bool(golds) and self._same_parts(golds, answers)

    def _ratio_is(self, gold: Any, answer: Any, *, positive: bool) -> bool:
        """Whether one is the other times a constant, which is no zero."""
        gold, answer = self._settled(gold), self._settled(answer)
        symbols = sorted(gold.free_symbols | answer.free_symbols, key=str)
        if gold.free_symbols != answer.free_symbols or not symbols:
            return False
        point = next(self._points(symbols))[0]
        scale, other = gold.subs(point), answer.subs(point)
        if self._vanishes(scale) is not False or self._vanishes(other) is not False:
            return False
        if positive and not (scale / other).is_positive:
            return False
        return self._equal(gold * other, answer * scale)

    # Sets.

    def _same_set(self, gold: Any, answer: Any) -> bool:
        if isinstance(gold, sp.Interval) and isinstance(answer, sp.Interval):
            is_open = [(one.left_open, one.right_open) for one in (gold, answer)]
            ends = map(self._same_value, (gold.start, gold.end), (answer.start, answer.end))
            return is_open[0] == is_open[1] and all(ends)
        row, other = self._row(gold), self._row(answer)
        if row is not None and other is not None:
            if not all(isinstance(one, sp.FiniteSet) for one in (gold, answer)):
                return len(row) == len(other) and all(map(self.same, row, other))
            return self._same_parts(row, other)
        is_union = isinstance(gold, sp.Union) and isinstance(answer, sp.Union)
        if is_union and self._same_parts(gold.args, answer.args):
            return True
        if not (isinstance(gold, sp.Set) and isinstance(answer, sp.Set)):
            return False
        return bool(gold == answer or gold.symmetric_difference(answer).is_empty)

    def _row(self, one: Any) -> Sequence[Any] | None:
        """The elements of a set, a pair or a point; (1, 2) may be read as an open interval."""
        if isinstance(one, sp.Tuple):
            return list(one.args)
        if isinstance(one, sp.FiniteSet):
            return list(getattr(one, "_unsorted_args", one.args))
        is_pair = isinstance(one, sp.Interval) and one.is_open
        return [one.start, one.end] if is_pair else None

    def _same_parts(self, golds: Sequence[Any], answers: Sequence[Any]) -> bool:
        """Whether each of the one equals another of the other, in any order."""
        if len(golds) != len(answers) or len(golds) > MAX_UNORDERED:
            return False
        left = list(answers)
        for gold in golds:
            place = next((n for n, one in enumerate(left) if self.same(gold, one)), None)
            if place is None:
                return False
            del left[place]
        return True


_APPROXIMATED = re.compile(r"\\approx(?![A-Za-z])|\N{ALMOST EQUAL TO}")
_PLAIN_DECIMAL = re.compile(r"-?\d{1,40}(?:\.(\d{1,40}))?")
_NAME = r"\\?[A-Za-z]+(?:_\{?\w+\}?)?"

WARM: list[list[str]] = Tables("formulas")["warm"]


class Equality:
    """Callable with {"gold", "answer"}: whether the two formulas are equal."""

    def __init__(self) -> None:
        sys.set_int_max_str_digits(100_000)
        for gold, answer in WARM:  # before the first fork: a grammar caches as it reads
            self({"gold": gold, "answer": answer})

    def __call__(self, payload: dict[str, Any]) -> bool:
        """Raises the errors of SymPy for expressions that it cannot evaluate."""
        gold, answer = payload["gold"], payload["answer"]
        decimals = long_decimals(gold, answer)
        return any(
            self._same(one, other, decimals)
            for one in self._forms(gold)
            for other in self._forms(answer)
        )

    def _same(self, gold: str, answer: str, decimals: dict[Fraction, int]) -> bool:
        texts = [form for form in map(readable, (gold, answer)) if form is not None]
        if len(texts) < 2:
            return False
        reader = Reader(*texts)
        try:
            found = [reader.read(text) for text in texts]
        except Exception:  # the grammar, or SymPy, does not know it: no formula
            return False
        if not Values(decimals).same(found[0], found[1]):
            return False
        return all(map(reader.is_whole, texts, found))

    def _forms(self, text: str) -> list[str]:
        """Both sides of a text that gives an exact value and its approximation, if they agree."""
        parts = [part.strip() for part in _APPROXIMATED.split(text)]
        if len(parts) != 2 or not all(parts):
            return [text]
        if re.fullmatch(_NAME, parts[0]):
            return parts[1:]
        decimal, form = _PLAIN_DECIMAL.fullmatch(parts[1]), readable(parts[0].rpartition("=")[2])
        if decimal is None or form is None:
            return [text]
        try:
            value = Fraction(str(Reader(form).read(form).evalf(30)))
        except Exception:  # the grammar, or SymPy, does not know it, or it is no real number
            return [text]
        places = len(decimal[1] or "")
        return parts if abs(value - Fraction(decimal[0])) <= Fraction(1, 10**places) else [text]
