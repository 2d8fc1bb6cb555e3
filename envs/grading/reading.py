r"""Formulas as latex2sympy reads them, if it reads the whole text."""

from __future__ import annotations

import importlib
import re
from typing import Any

from agentenv.envs.grading.tables import Tables

_TABLES = Tables(__file__)

MAX_RUNS = 16  # of digits that are changed, one after the other

_IMAGINARY = _TABLES.pattern("imaginary")
_ROOT = re.compile(r"\\sqrt\s*\{\s*-\s*1\s*\}")
_DECIMAL = re.compile(r"(?<![\d.])(\d{0,40})\.(\d{1,40})(?![\d.])")
_GROUPED = _TABLES.pattern("grouped")
_EXPONENT = re.compile(r"(?<![\w.}])(\d{1,40}(?:\.\d{1,40})?)[eE]([+-]?\d{1,4})(?![\w.{])")
_MIXED = _TABLES.pattern("mixed")
_PRIMES = re.compile(r"(?<![A-Za-z\\])([A-Za-z])('{1,4})(?!')")
_TRANSPOSED = re.compile(r"\^\s*\{?\s*(?:T(?![A-Za-z])|\\top|\\intercal)\s*\}?")
_PRODUCTS = _TABLES.rewrites("products")
_UNREAD = _TABLES.pattern("unread")
_RUN = re.compile(r"\d+")


def readable(text: str) -> str | None:
    """A cleaned formula as latex2sympy reads it: decimals as fractions, i for the root of -1,
    primes in names; None for a text with a part that it would leave out."""
    text = _ROOT.sub("i", text.replace("$", "").strip().removeprefix("="))
    text = _EXPONENT.sub(r"\1 \\cdot 10^{\2}", text)
    text = _GROUPED.sub(lambda match: re.sub(r"[ ,]", "", match[0]), text)
    text = _DECIMAL.sub(_as_fraction, text)
    text = _PRIMES.sub(lambda match: f"{match[1]}_{{{'p' * len(match[2])}}}", text)
    text = _MIXED.sub(_as_sum, text.rstrip("\N{DEGREE SIGN} "))
    text = _IMAGINARY.sub("I", _TRANSPOSED.sub("^{t_{T}}", text))
    for pattern, form in _PRODUCTS:
        text = pattern.sub(form, text)
    return None if _UNREAD.search(text) else text


def _as_fraction(match: re.Match[str]) -> str:
    digits = (match[1] + match[2]).lstrip("0") or "0"
    return rf"\frac{{{digits}}}{{{10 ** len(match[2])}}}"


def _as_sum(match: re.Match[str]) -> str:
    if int(match[2]) >= int(match[3]):
        return rf"{match[1]}\cdot \frac{{{match[2]}}}{{{match[3]}}}"
    return rf"({match[1]}+\frac{{{match[2]}}}{{{match[3]}}})"


class Reader:
    """Reads two formulas alike: letters of either case apart where one text holds both cases of a
    letter."""

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
        """The expression of a whole text. Raises what latex2sympy raises."""
        return self._module.latex2sympy(
            self._module.normalize_latex(text, self._normal),
            is_real=True,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=self._config,
        )

    def is_whole(self, text: str, found: Any) -> bool:
        """Whether each run of digits plays a part: the number stands in the expression, or another
        one makes it another expression."""
        held = set(_RUN.findall(str(found)))
        runs = [run for run in _RUN.finditer(text) if (run[0].lstrip("0") or "0") not in held]
        return all(self._matters(text, run, found) for run in runs[:MAX_RUNS])

    def _matters(self, text: str, run: re.Match[str], found: Any) -> bool:
        for other in (str(int(run[0]) + 7), "0"):
            try:
                changed = self.read(f"{text[: run.start()]}{other}{text[run.end() :]}")
            except Exception:  # whatever the grammar or SymPy raises: it was read
                return True
            if changed != found:
                return True
        return False


def _has_both_cases(text: str) -> bool:
    letters = set(re.findall(r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])", text)) - {"i", "I"}
    return any(letter.swapcase() in letters for letter in letters)
