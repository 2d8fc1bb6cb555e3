"""Signs that carry a value: with another sign an answer is wrong, in another notation right."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentenv.envs.grading.layers import compare
from agentenv.envs.grading.quantities import load
from tests import check_grader as pairs
from tests.support.grading import FIXTURES, TABLES, is_right

pytest.importorskip("math_verify")

load()

# Each sign with its notations.

COMPARATORS = {
    "<": ("<", r"\lt "),
    ">": (">", r"\gt "),
    "<=": ("<=", "\N{LESS-THAN OR EQUAL TO}", r"\le ", r"\leq "),
    ">=": (">=", "\N{GREATER-THAN OR EQUAL TO}", r"\ge ", r"\geq "),
    "!=": ("!=", "\N{NOT EQUAL TO}", r"\neq "),
}
MINUS = ("-", "\N{MINUS SIGN}")
BEFORE = {"": ("", "+"), "-": (*MINUS, "minus ", "negative ")}
AFTER = {"+": ("+", " plus"), "-": ("-", " minus"), "": ("",)}
NOTES = {
    "#": ("#", "\N{MUSIC SHARP SIGN}", " sharp", "-sharp"),
    "b": ("\N{MUSIC FLAT SIGN}", " flat", "-flat"),
    "": ("",),
}
ARROWS = {
    "to": ("->", "\N{RIGHTWARDS ARROW}", r"\to", r"\rightarrow"),
    "from": ("<-", "\N{LEFTWARDS ARROW}", r"\leftarrow"),
    "both": ("<->", "\N{LEFT RIGHT ARROW}", r"\leftrightarrow"),
}

numbers = st.integers(2, 999).map(str) | st.decimals(
    "0.01", "99", places=2, allow_nan=False, allow_infinity=False
).map(str)
names = st.sampled_from(["x", "n", "the p-value", "the pH", "the temperature", "k"])
units = st.sampled_from(["", " million", " percent", " points", " volts", " degrees"])
places = st.sampled_from(["Rome", "New York", "the lake", "glucose", "Berlin", "p"])

letters, grades = st.sampled_from("ABCDEFG"), st.sampled_from(["A", "B", "AB"])
rated = st.sampled_from(["blood type", "the grade is", "rated"])
FORMS: list[tuple[dict[str, tuple[str, ...]], str, tuple[st.SearchStrategy[str], ...]]] = [
    (COMPARATORS, "{1} {0} {2}", (names, numbers)),
    (COMPARATORS, "We need {1} {0} {2}", (names, numbers)),
    (COMPARATORS, "{1} {0} {2} is the solution", (names, numbers)),
    (BEFORE, "a profit of {0}{1}{2}", (numbers, units)),
    (BEFORE, "{0}{1}{2}", (numbers, units)),
    (BEFORE, "it fell to {0}{1}{2}", (numbers, units)),
    ({"": ("",), "-": MINUS}, "({0}{1}, {2})", (numbers, numbers)),
    ({"": ("",), "-": MINUS}, r"{0}\frac{{{1}}}{{7}}\sqrt{{2}}", (numbers,)),
    ({"+": ("+",), "-": MINUS}, "{1}x^2 {0} {2}x", (numbers, numbers)),
    (AFTER, "{1} {2}{0}", (rated, grades)),
    (NOTES, "{1}{0} minor", (letters,)),
    (ARROWS, "{1} {0} {2}", (places, places)),
]


@st.composite
def signed_pairs(draw: st.DrawFn) -> tuple[str, str, str]:
    """A gold, the same in another notation, and the same with another sign."""
    signs, form, parts = draw(st.sampled_from(FORMS))
    values = [draw(part) for part in parts]
    sign, other = draw(st.permutations(sorted(signs)))[:2]
    gold, same, wrong = (
        form.format(draw(st.sampled_from(signs[one])), *values) for one in (sign, sign, other)
    )
    return gold, same, wrong


@given(signed_pairs())
def test_an_answer_with_another_sign_is_wrong(found: tuple[str, str, str]) -> None:
    gold, same, other = found
    assert is_right(gold, same), (gold, same)
    assert not is_right(gold, other), (gold, other)
    assert not is_right(other, gold), (other, gold)


# Flips in the fixtures. A sign counts by rule: a comparator, an arrow, a minus before a number and
# after no operand, a sign attached to a letter.

_COMPARATOR = re.compile(
    r"\\(?:leq?|geq?|neq?|lt|gt)(?![a-z])\s?|[<>!]=|(?<![-=<])>|<(?![-=>/a-z])"
    "|[\N{LESS-THAN OR EQUAL TO}\N{GREATER-THAN OR EQUAL TO}\N{NOT EQUAL TO}]"
)
_ARROW = re.compile(r"->|\N{RIGHTWARDS ARROW}|\\(?:to|rightarrow)(?![a-z])")
_MINUS = re.compile(
    r"(?<![\w)}\]'!])(?<![\w)}\]] )[-\N{MINUS SIGN}](?=[$\N{EURO SIGN}]?(?:\d|\.\d|\\frac|\\sqrt))"
)
_LETTER = re.compile(r"(?<=[A-Za-z])(?:\+\+|[+#\N{MUSIC FLAT SIGN}])(?!\w)")
_TAG = re.compile(r"</?[a-z]+>")
_PLAIN = {form.strip(): sign for sign, forms in COMPARATORS.items() for form in forms}
MAX_WORDS = 8  # a longer text explains its answer


def flipped(text: str) -> Iterator[str]:
    if len(text.split()) > MAX_WORDS or _TAG.search(text):
        return
    for form, others in (
        (_COMPARATOR, (" < ", " > ", r" \le ", r" \ge ", r" \ne ")),
        (_ARROW, ("\N{LEFTWARDS ARROW}",)),
        (_MINUS, ("", "+")),
        (_LETTER, ("+", "-", "#", "")),
    ):
        for match in form.finditer(text):
            for other in others:
                sign = _PLAIN.get(match[0].strip(), match[0])
                if _PLAIN.get(other.strip(), other) != sign:
                    yield f"{text[: match.start()]}{other}{text[match.end() :]}"


def right_pairs() -> list[tuple[str, str]]:
    rows = [
        row
        for name in ("answer_pairs.json", "fresh_pairs.json", "new_pairs.json")
        for row in pairs.read_pairs(FIXTURES / name, "" if "answer" in name else "development")
    ]
    forms = (FIXTURES / "answer_forms.txt").read_text(encoding="utf-8").splitlines()
    return [(gold, row.answer) for row in rows if row.label for gold in row.golds] + [
        (gold, answer)
        for _, gold, answer in (line.split(" | ") for line in forms if line.startswith("1 | "))
    ]


def test_a_flipped_sign_in_the_fixtures_is_wrong() -> None:
    wrong = []
    num_flips = 0
    for gold, answer in right_pairs():
        flips = [(other, answer) for other in flipped(gold)]
        flips += [(gold, other) for other in flipped(answer)]
        if flips and is_right(gold, answer):
            num_flips += len(flips)
            wrong += [pair for pair in flips if is_right(*pair)]
    assert num_flips > 200
    assert not wrong


@pytest.mark.parametrize(("gold", "answer", "right"), TABLES["signs"])
def test_only_signs_and_letters_that_carry_a_value_count(
    gold: str, answer: str, right: bool
) -> None:
    assert (compare(answer, gold)[0] is True) == right
