"""Laws of equality over generated golds: what differs in writing and is no number differs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import permutations, product

import pytest

from agentenv.envs.grading.layers import compare
from agentenv.envs.grading.parts import is_named
from tests.envs.grading.test_grading_one_answer import golds
from tests.support.grading import TABLES, is_right

NUM = 40
JOINTS = [
    "{} or {}", "{}, {}", "{}. {}", "{} ({})", "{}\n{}", "It is {} or maybe {}.", "{}, later {}",
]  # fmt: skip


def _number(draw: random.Random, high: int) -> str:
    return str(draw.randint(0, high))


def _joined(mark: str, high: int, *counts: int) -> Callable[[random.Random], str]:
    return lambda draw: mark.join(_number(draw, high) for _ in range(draw.choice(counts)))


def _word(draw: random.Random) -> str:
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz", k=draw.randint(3, 6)))


IDENTIFIERS: dict[str, Callable[[random.Random], str]] = {
    "version": _joined(".", 20, 3, 4),
    "tagged version": lambda draw: f"v{_joined('.', 9, 2, 3)(draw)}-rc{draw.randint(1, 9)}",
    "address": _joined(".", 255, 4),
    "port": lambda draw: f"{_joined('.', 9, 4)(draw)}:{draw.randint(1, 99)}",
    "mask": lambda draw: f"{_joined('.', 9, 4)(draw)}/{draw.randint(8, 32)}",
    "hardware address": lambda draw: ":".join(f"{draw.randint(0, 255):02x}" for _ in range(6)),
    "score": lambda draw: f"{_number(draw, 9)}-{_number(draw, 9)}",
    "ratio": _joined(":", 9, 3),
    "section": lambda draw: f"Section {_joined('.', 12, 2, 3)(draw)}",
    "season": lambda draw: f"{(year := draw.randint(1900, 2030))}-{(year + 1) % 100:02}",
    "phone number": lambda draw: f"{draw.randint(200, 999)}-0{draw.randint(100, 999)}",
    "long phone number": lambda draw: f"1-800-{draw.randint(100, 999)}-{draw.randint(1000, 9999)}",
    "handle": lambda draw: f"@{_word(draw)}_{_number(draw, 9)}",
    "color": lambda draw: f"#{draw.randrange(16**6):06x}",
    "code": lambda draw: f"{_word(draw)}_{_word(draw)}",
    "code number": lambda draw: f"{_word(draw).upper()}-{_number(draw, 99)}",
}


@pytest.mark.parametrize("kind", IDENTIFIERS)
def test_two_different_identifiers_are_unequal(kind: str) -> None:
    draw, accepted = random.Random(kind), []
    for _ in range(NUM):
        one, other = IDENTIFIERS[kind](draw), IDENTIFIERS[kind](draw)
        assert compare(f"The answer is {one}.", one)[0], one
        if one != other:
            accepted += [pair for pair in ((one, other), (other, one)) if compare(*pair)[0]]
            if kind == "code number":
                continue
            both = draw.choice(JOINTS).format(*draw.sample([one, other], 2))
            accepted += [(both, gold) for gold in (one, other) if compare(both, gold)[0]]
    assert not accepted


def _values() -> Iterator[tuple[str, str]]:
    """An identifier, and the value that it would have as a formula."""
    draw = random.Random(3)
    for _ in range(NUM):
        a, b, c = (draw.randint(0, 20) for _ in range(3))
        yield f"{a}-{b}", str(a - b)
        yield f"{a}.{b}.{c}", str(a * b * c)
        yield f"0.{a}.{b}.{c}", f"{c}.{b}.{a}.0"
        year = draw.randint(1900, 2030)
        yield f"{year}-{(year + 1) % 100:02}", str(year - (year + 1) % 100)
        yield f"{year // 10}0s", f"{year // 10}0"
        yield f"the {year // 10}0s", str(year)


def test_an_identifier_or_a_decade_has_no_value() -> None:
    pairs = [pair for both in _values() for pair in permutations(both)]
    assert not [pair for pair in pairs if pair[0] != pair[1] and is_right(*pair)]


NOUNS = str.split("""
president king capital mayor author director founder father mother brother sister son
daughter wife husband teacher pupil student lawyer doctor biographer rival enemy ally friend critic
neighbour successor owner manager editor translator publisher captain coach population army economy
history language flag currency border coast suburb moon death birthplace grave house portrait statue
sequel cast producer composer killer assassin servant employer patron philosopher weather armour
academy profits limits butcher grandfather""")
KINDS = [
    "elected", "retired", "former", "first", "exiled", "talented", "abandoned", "late", "failed",
]  # fmt: skip
RELATIONS = (
    "the {noun} of {gold}", "a {noun} of {gold}", "the {kind} {noun} of {gold}", "{gold}'s {noun}",
    "It was the {noun} of {gold}.", "{gold}'s {kind} {noun}",
    "It was written by a {noun} of {gold}.",
)  # fmt: skip


def test_what_belongs_to_a_name_is_not_the_name() -> None:
    draw, accepted = random.Random(5), []
    names = [gold for gold in golds()["words"] if is_named(gold) and "'" not in gold]
    places = ["United States", "Alfred Nobel", "Manchester United", "Turkey", "Saw", "Rose Kennedy"]
    for gold, noun in product([*draw.sample(names, 8), *places], NOUNS):
        form = draw.choice(RELATIONS)
        answer = form.format(noun=noun, kind=draw.choice(KINDS), gold=gold)
        accepted += [(gold, answer)] if compare(answer, gold)[0] else []
    for text, noun in product(["(B)", "(5)", "[2,3]", "(2,3)", "option (C)"], NOUNS):
        gold, kind = text.removeprefix("option ").strip("()"), draw.choice(KINDS)
        for answer in (f"the {noun} of {text}", f"It is the {kind} {noun} of {text}."):
            accepted += [(gold, answer)] if is_right(gold, answer) else []
    assert not accepted


@pytest.mark.parametrize("kind", ["city", "town", "country"])
def test_the_kind_of_a_name_before_it_names_nothing_else(kind: str) -> None:
    assert compare(f"the {kind} of Rome", "Rome")[0]


MARKS = ("", "_", "#", "*", "**", "%", "%%", "~", "--", "$", "*.")


@pytest.mark.parametrize("word", ["init", "home", "kwargs", "timeit"])
def test_the_signs_of_a_word_of_code_belong_to_it(word: str) -> None:
    words = [f"{mark}{word}" for mark in MARKS]
    assert all(compare(one, one)[0] for one in words)
    assert not [pair for pair in permutations(words, 2) if compare(*pair)[0]]
    assert not compare(word, f"__{word}__")[0]


OPERATORS = TABLES["operators"]
UNEQUAL = TABLES["unequal_formulas"]


@pytest.mark.parametrize("operators", OPERATORS)
def test_another_operator_makes_another_formula(operators: tuple[str, str]) -> None:
    for name in (r"\mathbf{{{}}}", r"\vec{{{}}}"):
        one, other = name.format("u"), name.format("w")
        texts = [f"{one} {operator} {other}" for operator in operators]
        assert not is_right(*texts), texts
        assert not is_right(*texts[::-1]), texts


@pytest.mark.parametrize(("one", "other"), UNEQUAL)
def test_order_brackets_and_repeated_signs_change_a_formula(one: str, other: str) -> None:
    assert not is_right(one, other)
    assert not is_right(other, one)


def test_other_brackets_make_another_interval() -> None:
    texts = [f"{left}2, 5{right}" for left, right in product("[(", "])")]
    assert not [pair for pair in permutations(texts, 2) if is_right(*pair)]


@pytest.mark.parametrize(("gold", "answer"), TABLES["same_in_another_form"])
def test_the_same_in_another_form_is_right(gold: str, answer: str) -> None:
    assert is_right(gold, answer)
