"""One answer: two candidates in one answer are wrong in either order, whatever joins them, and an
answer that says more about its one candidate is right."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from envs.grading import choice, dates
from envs.grading.candidates import kind_of
from envs.grading.layers import compare
from envs.grading.lists import several
from envs.grading.phrases import is_named, is_nationality, rank_of
from envs.grading.spelling import clean
from envs.grading.words import has_cjk

FIXTURES = Path(__file__).parent.parent / "fixtures"
GOOD = FIXTURES / "one_answer.txt"
NUM_CHUNKS = 6
NUM_CHECKED = 1800  # in each chunk, both orders counted

# An @ is where the second answer stands.
SEPARATORS = [
    ". @", "; @", ": @", " - @", " \u2013 @", " \u2014 @", "\u2014@", "\n@", "\n\n@", "\t@", "\r\n@", "\u2028@",
    " aka @", ", aka @", " a.k.a. @", " i.e. @", ", i.e., @", " or @", ", or @", "; or @", " and @", " then @",
    " (@)", " [@]", " {@}", " (or @)", " (aka @)", " (also @)", " (possibly @)", " / @", "/@", " | @",
    "|@", " || @", " -> @", " \u2192 @", " => @", " \u21d2 @", " = @", " == @", " \u2248 @", " \\approx @", ", @", ",@",
    " also known as @", ", also known as @", ". Alternatively, @", ", alternatively @", ", possibly @",
    ". Possibly @", "... @", "\u2026@", "?? @", "! @", "!! @", "\n- @", "\n* @", "\n\u2022 @", " \u2022 @", "\uff0c@",
    "\u3001@", "\u3002@", "\uff1b@", "\uff1a@", "\uff08@\uff09", "\u3010@\u3011", "\u300c@\u300d", " \u00ab @ \u00bb", ". Or @", ". Maybe @", " maybe @",
    " perhaps @", " & @", " vs @", " versus @", " , @", ".\n@", ":\n@", " --- @", "--@", " \\ @", " + @",
    " plus @", " as well as @", " otherwise @", " else @", ", if not, @", " alias @", " namely @", ", that is, @",
    " e.g. @", "<br>@", " :: @", ". Also @", ". Then @", " and/or @", " ; @", " or else @", " or possibly @",
    ", or maybe @", " equals @", " \u6216\u8005 @", ". The answer is @", ". It is @", ". I think @",
    ". My second guess is @", ". Another possibility: @", ". Second guess: @", "|  @", " ~ @",
]  # fmt: skip
FORMS = [
    "The answer is {}. The answer is {}.", "It is {}. It is {}.", "**{}** **{}**", "`{}` `{}`", '"{}" "{}"',
    "\\boxed{{{}}} \\boxed{{{}}}", "\\boxed{{{}}} or \\boxed{{{}}}", "\\boxed{{{}}}, \\boxed{{{}}}",
    "1. {} 2. {}", "1) {}\n2) {}", "(a) {} (b) {}", "- {}\n- {}", "Option 1: {}. Option 2: {}.",
    "Either {} or {}", "It could be {} or {}.", "First guess: {}; second guess: {}", "{} {}",
    "{0}. {1}. {0}.", "{0} {0} {1}", "{} is the answer. {} is the answer.", "| {} | {} |",
    "Answer: {}\nAnswer: {}", "Some say {}. Others say {}.", "<answer>{}</answer><answer>{}</answer>",
    "[{}, {}]", "The final answer is {}. {}.", "I think {}, but it might be {}.",
]  # fmt: skip
JOINTS = [f"{{}}{mark.replace('@', '{}', 1)}" for mark in
          (one.replace("{", "{{").replace("}", "}}") for one in SEPARATORS)] + FORMS  # fmt: skip
PLAIN_KINDS = ("number", "date", "time", "choice", "truth", "words")


@cache
def golds() -> dict[str, list[str]]:
    """The golds of the fixtures that name one thing, by the layer that reads them."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in ("answer_pairs", "fresh_pairs", "new_pairs"):
        rows = json.loads((FIXTURES / f"{name}.json").read_text(encoding="utf-8"))
        for row in rows["pairs"] if isinstance(rows, dict) else rows:
            gold = row["gold"] if isinstance(row, dict) else row[0]
            gold = clean(gold[0] if isinstance(gold, list) else gold)
            kind = kind_of(gold)
            # a clause, a list and a description are no one name; Chinese has no capitals to tell
            is_one = kind != "words" or (is_named(gold) and several(gold) is None)
            if kind in PLAIN_KINDS and is_one and not has_cjk(gold) and gold not in found[kind]:
                found[kind].append(gold)
    return found


def pairs(chunk: int) -> list[tuple[str, str, str]]:
    """Two golds of a kind that are two things, and how they are joined."""
    drawn, made = random.Random(chunk), []
    kinds = [kind for kind, texts in golds().items() if len(texts) > 1]
    while len(made) < NUM_CHECKED // 2:
        one, other = drawn.sample(golds()[drawn.choice(kinds)], 2)
        if are_two(one, other):
            made.append((one, other, JOINTS[(chunk + NUM_CHUNKS * len(made)) % len(JOINTS)]))
    return made


def are_two(one: str, other: str) -> bool:
    """Whether two golds are two answers: not one place in the other, a nationality, a date and its
    month, or two texts of one letter."""
    if any(rank_of(gold) or is_nationality(gold) for gold in (one, other)):
        return False
    labels = [choice.labelled(gold) for gold in (one, other)]
    if all(labels) and labels[0][0] == labels[1][0]:  # type: ignore[index]
        return False
    days = [dates.dates(gold) for gold in (one, other)]
    if any(all(not a or not b or a == b for a, b in zip(*both, strict=True)) for both in product(*days)):
        return False
    return compare(one, other)[0] is False and compare(other, one)[0] is False


@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_two_candidates_are_wrong_in_either_order(chunk: int) -> None:
    accepted = []
    for one, other, joint in pairs(chunk):
        answer = joint.format(one, other)
        accepted += [(gold, answer) for gold in (one, other) if compare(answer, gold)[0]]
    assert not accepted
