"""Values of SymPy, compared in exact terms.

Two values are equal if their difference is exactly zero, or vanishes to MAX_DIGITS digits (SymPy's
adaptive `evalf`, which never mistakes a small difference for none). Expressions with variables are
compared at random points, after Schwartz and Zippel. Derivatives, functions, limits and integrals
that SymPy does not evaluate become symbols.
"""

from __future__ import annotations

import importlib
import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

from agentenv.envs.grading.numbers import rounds_to

MAX_DIGITS = 400  # working precision at which a difference that still vanishes is zero
NUM_POINTS = 4
MIN_POINTS = 2
MAX_UNORDERED = 60


class Values:
    """Compares numbers, expressions, relations, sets, tuples and matrices of SymPy."""

    def __init__(self, decimals: dict[Fraction, int] | None = None) -> None:
        self.sympy = importlib.import_module("sympy")
        self._decimals = decimals or {}
        self._names: dict[Any, Any] = {}

    def same(self, gold: Any, answer: Any) -> bool:
        """Whether both are equal, each part of the one to a part of the other."""
        s = self.sympy
        gold, answer = self._opened(self._explicit(gold), self._explicit(answer))
        kinds: tuple[tuple[Any, Callable[[Any, Any], bool]], ...] = (
            (s.MatrixBase, self._same_matrix),
            ((s.Set, s.Tuple), self._same_set),
            (s.logic.boolalg.Boolean, self._same_relation),
            (s.Expr, self._same_value),
        )
        for kind, compare in kinds:
            if isinstance(gold, kind) or isinstance(answer, kind):
                both = isinstance(gold, kind) and isinstance(answer, kind)
                return both and compare(gold, answer)
        return False

    def _explicit(self, one: Any) -> Any:
        """A matrix for a product of a number and a matrix."""
        return one.doit().as_explicit() if isinstance(one, self.sympy.MatrixExpr) else one

    def _opened(self, gold: Any, answer: Any) -> tuple[Any, Any]:
        """5 for x = 5 where the other is a value; the set of the numbers that meet a condition."""
        s = self.sympy
        gold, answer = map(self._numbers_of, (gold, answer))
        values = s.Expr | s.Set | s.Tuple | s.MatrixBase
        if isinstance(answer, values):
            gold = self._value_of(gold)
        return gold, self._value_of(answer) if isinstance(gold, values) else answer

    def _numbers_of(self, one: Any) -> Any:
        """The set of the numbers that meet a condition on one variable; the condition where SymPy
        finds none."""
        s = self.sympy
        is_condition = isinstance(one, s.logic.boolalg.Boolean) and not isinstance(one, s.Eq)
        unequal = (s.core.relational._Inequality, s.Ne)  # none in x = 2 + 3 = 5
        if not is_condition or len(one.free_symbols) != 1 or not one.atoms(*unequal):
            return one
        try:
            return importlib.import_module("math_verify.grader").unwrap_fcs(one).as_set()
        except Exception:  # any error of SymPy for a condition that it cannot solve
            return one

    def _value_of(self, one: Any) -> Any:
        """The value of an equation whose left side is a name, a point of names or a sum that was
        worked out: x = 5, (r, t) = (2, 3), 3 + 4 = 7."""
        one = self._chained(one)
        if not isinstance(one, self.sympy.Eq):
            return one
        left = one.lhs
        names = left.args if isinstance(left, self.sympy.Tuple) else (left,)
        is_sum = not left.free_symbols and not one.rhs.free_symbols and self.same(left, one.rhs)
        return one.rhs if is_sum or all(map(self._is_name, names)) else one

    def _chained(self, one: Any) -> Any:
        """x = 5 for x = 2 + 3 = 5, if the values in between are the same."""
        s = self.sympy
        parts = getattr(one, "_unsorted_args", ()) if isinstance(one, s.And) else ()
        if not parts or not all(isinstance(part, s.Eq) for part in parts):
            return one
        first, last = parts[0].lhs, parts[-1].rhs
        is_chain = all(this.rhs == that.lhs for this, that in pairwise(parts))
        if not is_chain or not all(self.same(part.rhs, last) for part in parts[:-1]):
            return one
        return s.Eq(first, last, evaluate=False)

    def _is_name(self, one: Any) -> bool:
        """A variable, f(x), AB, AB/CD or |AB|."""
        s = self.sympy
        kinds = (s.Symbol, s.core.function.AppliedUndef)
        if isinstance(one, s.Abs) or (isinstance(one, s.Pow) and one.exp == -1):
            return self._is_name(one.args[0])
        parts = one.args if one.is_Mul else ()
        return isinstance(one, kinds) or (bool(parts) and all(map(self._is_name, parts)))

    def _same_matrix(self, gold: Any, answer: Any) -> bool:
        return gold.shape == answer.shape and all(map(self.same, gold.flat(), answer.flat()))

    # Numbers and expressions.

    def _same_value(self, gold: Any, answer: Any) -> bool:
        s = self.sympy
        if gold.has(s.UnevaluatedExpr) != answer.has(s.UnevaluatedExpr):  # of a percentage
            percent = s.UnevaluatedExpr(s.Rational(1, 100))
            bare = (self._settled(one.replace(percent, s.Integer(1))) for one in (gold, answer))
            if self._equal(*bare):
                return True
        sides = self._settled(gold), self._settled(answer)
        return self._equal(*sides) or self._rounds(*sides)

    def _settled(self, one: Any) -> Any:
        """The evaluated expression, with a symbol for each remaining derivative, function, limit,
        sum or integral."""
        s = self.sympy
        kinds = (s.Derivative, s.Limit, s.Sum, s.Product, s.Integral, s.core.function.AppliedUndef)
        one = one.replace(lambda part: isinstance(part, kinds), self._named)
        one = one.replace(
            lambda part: isinstance(part, s.Float), lambda part: s.Rational(str(part))
        )
        return one.doit()

    def _named(self, part: Any) -> Any:
        s = self.sympy
        if isinstance(part, s.Derivative) and part.expr.free_symbols == set(part.variables):
            return part.doit()  # d/dx of x^2
        form = part.func(*(arg.doit() for arg in part.args))
        return self._names.setdefault(form, s.Symbol(f"unevaluated_{len(self._names)}", real=True))

    def _equal(self, gold: Any, answer: Any) -> bool:
        """Whether two evaluated expressions are equal, wherever both are defined."""
        s = self.sympy
        if gold == answer:
            return not gold.has(s.nan, s.zoo)
        if gold.has(s.oo, s.nan, s.zoo) or answer.has(s.oo, s.nan, s.zoo):
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
                symbol: self.sympy.Rational(draw.randint(101, 997), draw.choice((211, 307, 401)))
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
        if any(side.has(self.sympy.nan, self.sympy.zoo, self.sympy.oo) for side in sides):
            return None
        if not is_positive and not all(side.evalf(15).is_real for side in sides):
            return None
        return self._vanishes(sides[0] - sides[1])

    def _vanishes(self, difference: Any) -> bool | None:
        """Whether a number is zero, by its digits; None where SymPy finds none."""
        if difference.is_Rational:
            return bool(difference == 0)
        exhausted = importlib.import_module("sympy.core.evalf").PrecisionExhausted
        try:
            found = difference.evalf(15, maxn=MAX_DIGITS, strict=True)
        except exhausted:
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
        value = self.sympy.Rational(str(answer.evalf(60)))
        return rounds_to(Fraction(int(value.p), int(value.q)), decimal, places)

    # Relations.

    def _same_relation(self, gold: Any, answer: Any) -> bool:
        s = self.sympy
        gold, answer = self._chained(gold), self._chained(answer)
        if type(gold) is type(answer) and isinstance(gold, s.And | s.Or):
            return self._same_parts(gold.args, answer.args)
        if isinstance(gold, s.Eq | s.Ne) and type(gold) is type(answer):
            return self._same_equation(gold, answer)
        if not all(isinstance(one, s.core.relational._Inequality) for one in (gold, answer)):
            return False
        is_strict = [one.rel_op in ("<", ">") for one in (gold, answer)]
        sides = [one.gts - one.lts for one in (gold, answer)]
        return is_strict[0] == is_strict[1] and self._ratio_is(*sides, positive=True)

    def _same_equation(self, gold: Any, answer: Any) -> bool:
        """By a constant factor, as y = 2x and 2x - y = 0 have, or by all their solutions."""
        s = self.sympy
        if any(isinstance(side, s.Set | s.Tuple | s.MatrixBase) for side in (gold.rhs, answer.rhs)):
            return self.same(gold.lhs, answer.lhs) and self.same(gold.rhs, answer.rhs)
        is_call = [isinstance(one.lhs, s.core.function.AppliedUndef) for one in (gold, answer)]
        if is_call[0] != is_call[1]:  # f(x) = x^2 and y = x^2
            are_names = self._is_name(gold.lhs) and self._is_name(answer.lhs)
            return are_names and self.same(gold.rhs, answer.rhs)
        sides = [one.lhs - one.rhs for one in (gold, answer)]
        if self._ratio_is(sides[0], sides[1], positive=False):
            return True
        if isinstance(gold, s.Ne):
            return False
        sides = [self._settled(side) for side in sides]
        symbols = sides[0].free_symbols
        if not symbols or symbols != sides[1].free_symbols:
            return False
        return all(self._same_solutions(sides[0], sides[1], symbol) for symbol in symbols)

    def _same_solutions(self, gold: Any, answer: Any, symbol: Any) -> bool:
        golds, answers = (self.sympy.solve(side, symbol) for side in (gold, answer))
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
        s = self.sympy
        if isinstance(gold, s.Interval) and isinstance(answer, s.Interval):
            is_open = [(one.left_open, one.right_open) for one in (gold, answer)]
            ends = map(self._same_value, (gold.start, gold.end), (answer.start, answer.end))
            return is_open[0] == is_open[1] and all(ends)
        row, other = self._row(gold), self._row(answer)
        if row is not None and other is not None:
            if not all(isinstance(one, s.FiniteSet) for one in (gold, answer)):
                return len(row) == len(other) and all(map(self.same, row, other))
            return self._same_parts(row, other)
        is_union = isinstance(gold, s.Union) and isinstance(answer, s.Union)
        if is_union and self._same_parts(gold.args, answer.args):
            return True
        if not (isinstance(gold, s.Set) and isinstance(answer, s.Set)):
            return False
        return bool(gold == answer or gold.symmetric_difference(answer).is_empty)

    def _row(self, one: Any) -> Sequence[Any] | None:
        """The elements of a set, a pair or a point; (1, 2) may be read as an open interval."""
        s = self.sympy
        if isinstance(one, s.Tuple):
            return list(one.args)
        if isinstance(one, s.FiniteSet):
            return list(getattr(one, "_unsorted_args", one.args))
        if isinstance(one, s.Interval) and one.is_open:
            return [one.start, one.end]
        return None

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
