"""What runs in a worker: mathematical equivalence by math-verify. Imports sympy when made."""

from __future__ import annotations

import importlib
import re
from typing import Any

_ROOT = re.compile(r"\\sqrt\s*\{\s*-\s*1\s*\}")
_DECIMAL = re.compile(r"(?<![\w.])(\d{0,40})\.(\d{1,40})(?![\w.])")


class MathVerify:
    """Callable with {"gold", "answer"}: whether math-verify holds them for equal."""

    def __init__(self) -> None:
        self._verify = importlib.import_module("math_verify")
        self._sympy = importlib.import_module("sympy")
        self({"gold": r"\frac{x^2-1}{2}", "answer": r"\sqrt{3}+2i"})  # warm before the first fork
        self({"gold": r"(1,2]", "answer": r"\{1,2\}"})

    def __call__(self, payload: dict[str, Any]) -> bool:
        """Raises what math-verify raises. `plain` leaves all choices of math-verify as they are."""
        gold, answer = payload["gold"], payload["answer"]
        if payload.get("plain"):
            return self._equal(self._parse(gold), self._parse(answer), sets_as_relations=False)
        golds, answers = self._parse(exact(gold)), self._parse(exact(answer))
        return self._equal(golds, answers) or self._same_equation(golds, answers)

    def _same_equation(self, golds: list[Any], answers: list[Any]) -> bool:
        """Two equations with the same solutions by a constant factor: y = 2x and 2x - y = 0."""
        sides = [
            part.lhs - part.rhs
            for parsed in (golds, answers)
            for part in parsed[:1]
            if isinstance(part, self._sympy.Equality)
        ]
        if len(sides) != 2 or not sides[1]:
            return False
        ratio = self._sympy.simplify(sides[0] / sides[1])
        return bool(ratio.is_number and ratio != 0)

    def _parse(self, text: str) -> list[Any]:
        # its own time-outs use signals; the limit comes from outside, by killing this process
        wrapped = text if "$" in text else f"${text}$"
        parsed: list[Any] = self._verify.parse(wrapped, parsing_timeout=None)
        return parsed

    def _equal(self, golds: list[Any], answers: list[Any], sets_as_relations: bool = True) -> bool:
        return bool(
            self._verify.verify(
                golds, answers, timeout_seconds=None, allow_set_relation_comp=sets_as_relations
            )
        )


def exact(text: str) -> str:
    """Decimals as fractions, so that 1.41421356237 is not the square root of 2; that of -1 as i."""

    def fraction(match: re.Match[str]) -> str:
        digits = (match[1] + match[2]).lstrip("0") or "0"
        return rf"\frac{{{digits}}}{{{10 ** len(match[2])}}}"

    return _DECIMAL.sub(fraction, _ROOT.sub("i", text))
