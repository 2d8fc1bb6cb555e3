r"""Formulas: equal only if their values are, at any size, and only if the whole text was parsed."""

from __future__ import annotations

from collections.abc import Callable
from math import factorial

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from agentenv.envs.grading.layers import _compare
from agentenv.envs.grading.numbers import same_plain
from agentenv.envs.grading.text import clean
from tests.support.grading import TABLES, is_right

pytest.importorskip("math_verify")

# Numbers of every size: each in two notations, with a key that identifies its value.

digits = st.integers(1, 99)
powers = st.integers(1, 60)


def scaled(base: int) -> Callable[[int, int], int]:
    return lambda top, power: top * base ** (60 - power)


KINDS: tuple[tuple[str, str, Callable[[int, int], object]], ...] = (
    (r"{0} \times 10^{{-{1}}}", r"\frac{{{0}}}{{10^{{{1}}}}}", scaled(10)),
    (r"\frac{{\sqrt{{{0}}}}}{{10^{{{1}}}}}", r"{0}^{{1/2}} \cdot 10^{{-{1}}}", scaled(100)),
    (r"\frac{{{0}\pi}}{{10^{{{1}}}}}", r"{0} \cdot 10^{{-{1}}} \pi", scaled(10)),
    (r"e^{{-{1}}}", r"\frac{{1}}{{e^{{{1}}}}}", lambda _, power: power),
    (r"\frac{{{0}}}{{2^{{{1}}}}}", r"{0} \cdot 2^{{-{1}}}", scaled(2)),
    (r"\frac{{1}}{{{1}!}}", r"({1}!)^{{-1}}", lambda _, power: factorial(power)),
    (r"1 - 2^{{-{1}}}", r"\frac{{2^{{{1}}}-1}}{{2^{{{1}}}}}", lambda _, power: power),
    (r"10^{{{1}}} + {0}", r"{0} + 10^{{{1}}}", lambda top, power: 10**power + top),
)
WRAPPED = (
    "{}", "({}, 1)", "[{}, 100^{{40}}]", r"\{{ {}, -1 \}}", "({}) x^2 + 1", "2 + ({})i", "x = {}",
    r"\begin{{pmatrix}} 1 & {} \\ 0 & 1 \end{{pmatrix}}", "-({})", r"\sqrt{{ {} }}",
)  # fmt: skip


@st.composite
def sized_pairs(draw: st.DrawFn) -> tuple[str, str, str]:
    """A gold, an equal answer, and one of the same form with another value."""
    gold, equal, value = draw(st.sampled_from(KINDS))
    one, another = (draw(st.tuples(digits, powers)) for _ in range(2))
    assume(value(*one) != value(*another))
    form = draw(st.sampled_from(WRAPPED))
    return tuple(map(form.format, (gold.format(*one), equal.format(*one), gold.format(*another))))  # type: ignore[return-value]


@given(sized_pairs())
@example((r"\{ \frac{1}{1!}, -1 \}", r"\{ (1!)^{-1}, -1 \}", r"\{ \frac{1}{2!}, -1 \}"))
def test_different_values_of_any_size_are_unequal(found: tuple[str, str, str]) -> None:
    gold, equal, other = found
    assert is_right(gold, equal), (gold, equal)
    assert not is_right(gold, other), (gold, other)
    assert not is_right(other, gold), (other, gold)


plain = st.from_regex(
    r"[+-]?([0-9]{1,3}|[0-9]{1,2}\.[0-9]{1,2}|\.[0-9]|[0-9],[0-9]{3}|[0-9]/[1-9])", fullmatch=True
)


@given(plain, plain)
def test_plain_numbers_are_compared_as_by_the_layers(answer: str, gold: str) -> None:
    assert same_plain(gold, gold)
    for pair in ((answer, gold), (gold + "0" if "." in gold else gold, gold)):
        cleaned = clean(pair[0]), clean(pair[1])
        by_layers = cleaned[0] == cleaned[1] or _compare(*cleaned)[0] is True
        assert same_plain(*pair) == by_layers


# Texts that are parsed in part or not evaluated.

TAILS: tuple[tuple[str, st.SearchStrategy[int]], ...] = (
    (r" \pmod{{{}}}", st.integers(2, 50)),
    (r"\sqrt({})", st.sampled_from([2, 3, 5, 6, 7, 10])),
    (r" : {} : \ldots", st.integers(2, 50)),
    (r"^{{\circ}} {}'", st.integers(1, 59)),
    (r", k \in \mathbb{{Z}}_{}", st.integers(2, 50)),
    (r" + \frac{{{}}}{{\mathrm{{e}}}}", st.integers(1, 9)),
    (r" + O(x^{})", st.integers(2, 9)),
    (r" \uparrow {}", st.integers(2, 50)),
)


@st.composite
def tailed_pairs(draw: st.DrawFn) -> tuple[str, str, str]:
    """A text with a tail, the same text with another tail, and without a tail."""
    tail, each = draw(st.sampled_from(TAILS))
    values = draw(st.lists(each, min_size=2, max_size=2, unique=True))
    head = draw(st.sampled_from(["4", "x \\equiv 2", "x = 3", "2x + 1", "n = 2k", r"\frac{1}{2}"]))
    return head + tail.format(values[0]), head + tail.format(values[1]), head


@given(tailed_pairs())
def test_a_partly_parsed_text_equals_only_itself(found: tuple[str, str, str]) -> None:
    text, other, head = found
    assert is_right(text, text.replace(" ", "  "))
    for pair in ((text, other), (text, head), (head, text)):
        assert not is_right(*pair), pair


UNEVALUATED = (
    r"\frac{{dy}}{{dx}} = {}x", "y' = {}x", "f'(x) = {}x", r"\frac{{d}}{{dx}} f(x) = {}",
    "f(x) = {}", r"f({}x)", r"\frac{{\partial u}}{{\partial x}} = {}", "y'' + {}y = 0",
    "g(x) + {}g'(x)",
)  # fmt: skip


@given(
    st.sampled_from(UNEVALUATED), st.lists(st.integers(2, 40), min_size=2, max_size=2, unique=True)
)
def test_unevaluated_forms_with_different_values_are_unequal(form: str, values: list[int]) -> None:
    one, other = (form.format(value) for value in values)
    assert not is_right(one, other)
    assert is_right(one, form.format(f"({values[0] - 1}+1)"))


@pytest.mark.parametrize(("gold", "answer", "right"), TABLES["formulas"])
def test_formulas_are_compared_by_value(gold: str, answer: str, right: bool) -> None:
    assert is_right(gold, answer) == right
