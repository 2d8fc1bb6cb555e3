"""Expressions that are not worth evaluating: they would run for ever or fill the memory."""

from __future__ import annotations

import re

MAX_CHARS = 600
MAX_DEPTH = 20
MAX_EXPONENT_DIGITS = 4
MAX_FACTORIAL_DIGITS = 3
MAX_DIGITS = 60

_EXPONENT = re.compile(r"(?:\^|\*\*)\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(-?\d+|\w))")
_FACTORIAL = re.compile(r"(\d+)\s*!|[)}\]]\s*!|!\s*!")
_HEAVY = re.compile(
    r"\\(?:i?i?int|oint|sum|prod|lim)(?![a-zA-Z])"
    r"|(?<![A-Za-z\\])(?:factorial|gamma|fibonacci|prime|binomial|integrate|diff|solve|Sum)\s*\("
)
_DIGITS = re.compile(rf"\d{{{MAX_DIGITS + 1}}}")
_BINOMIAL = re.compile(r"\\[dt]?binom\s*\{?\s*(\d+)")


def risk_of(expression: str) -> str:
    """Why the expression is refused; "" when it may be evaluated."""
    if len(expression) > MAX_CHARS:
        return f"longer than {MAX_CHARS} characters"
    depth = deepest = 0
    for sign in expression:
        depth += (sign in "([{") - (sign in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH:
        return f"brackets nested over {MAX_DEPTH} deep"
    if _DIGITS.search(expression):
        return f"a number of over {MAX_DIGITS} digits"
    for match in _EXPONENT.finditer(expression):
        exponent = match[1] or match[2] or match[3] or ""
        if "!" in exponent or any(
            len(run) > MAX_EXPONENT_DIGITS for run in re.findall(r"\d+", exponent)
        ):
            return "a huge exponent"
        if exponent.strip().isdigit() and int(exponent) > 300 and not _numeric_base(expression):
            return "a polynomial of huge degree"
    if _has_tower(expression):
        return "a tower of powers"
    for match in _FACTORIAL.finditer(expression):
        if match[1] is None or len(match[1]) > MAX_FACTORIAL_DIGITS:
            return "a big factorial"
    if any(len(match[1]) > MAX_FACTORIAL_DIGITS for match in _BINOMIAL.finditer(expression)):
        return "a big binomial"
    return "a sum, product, limit or integral" if _HEAVY.search(expression) else ""


def _has_tower(expression: str) -> bool:
    """A power whose exponent holds a power: 9^{9^9}, but not x^2 y^2."""
    plain = expression.replace("**", "^").replace(" ", "")
    open_exponents: list[bool] = []
    for place, sign in enumerate(plain):
        if sign in "({":
            open_exponents.append(place > 0 and plain[place - 1] == "^")
        elif sign in ")}" and open_exponents:
            open_exponents.pop()
        elif sign == "^" and any(open_exponents):
            return True
    return re.search(r"\^-?(?:\d+|[A-Za-z])\^|\^\{[^{}]*\}\^", plain) is not None


def _numeric_base(expression: str) -> bool:
    return re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", expression)) is None
