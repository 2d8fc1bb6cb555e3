"""One answer: two candidates in one answer are wrong in either order, whatever joins them, and
further words about a single candidate leave it right.

Not decidable by rules: another name for the gold that only an encyclopedia knows, joints of several
words in another language, a candidate in an aside (see note: 14), two letters after capitals that
may be names (Vitamin C), a remark that numbers a source (source 1).
"""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from functools import cache
from itertools import combinations, permutations, product

import pytest

from agentenv.base.types import Message, Task
from agentenv.envs.grading import dates, forms
from agentenv.envs.grading.forms import several
from agentenv.envs.grading.gold import kind_of
from agentenv.envs.grading.layers import Layered, TokenF1, compare, find
from agentenv.envs.grading.parts import is_named, is_nationality, rank_of
from agentenv.envs.grading.reward import make_grader
from agentenv.envs.grading.text import clean
from agentenv.envs.grading.words import has_cjk
from tests.support.grading import FIXTURES, TABLES

GOOD = FIXTURES / "one_answer.txt"

JOINTS = TABLES["joints"]
FURTHER = TABLES["further_joints"]
WHOLE = ("number", "date", "words")  # the kinds whose golds fit into any sentence
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
            # a clause, a list or a description is not one name; Chinese has no capitals to mark one
            is_one = kind != "words" or (is_named(gold) and several(gold) is None)
            if kind in PLAIN_KINDS and is_one and not has_cjk(gold) and gold not in found[kind]:
                found[kind].append(gold)
    return found


def are_two(one: str, other: str) -> bool:
    """Whether two golds are two answers: no place with a place inside it, no nationality, no date
    with its month, and no choices with a common letter."""
    if any(rank_of(gold) or is_nationality(gold) for gold in (one, other)):
        return False
    labels = [forms.labeled(gold) for gold in (one, other)]
    if all(labels) and labels[0][0] == labels[1][0]:  # type: ignore[index]
        return False
    letters = [forms.chosen(gold) for gold in (one, other)]
    if letters[0] & letters[1]:
        return False
    days = [dates.dates(gold) for gold in (one, other)]
    if any(
        all(not a or not b or a == b for a, b in zip(*both, strict=True)) for both in product(*days)
    ):
        return False
    return compare(one, other)[0] is False and compare(other, one)[0] is False


TRIPLES = TABLES["triples"]
PHRASES = TABLES["phrases"]
PHRASE_JOINTS = TABLES["phrase_joints"]


def test_two_phrases_are_two_candidates() -> None:
    accepted = [
        (gold, answer)
        for pair in PHRASES
        for joint in PHRASE_JOINTS
        for gold, other in permutations(pair)
        for answer in (joint.format(gold, other), joint.format(other, gold))
        if compare(answer, gold)[0]
    ]
    assert not accepted


def fill(template: str, *texts: str) -> str:
    """The template with the texts in place of each @."""
    parts = template.split("@")
    return "".join(part for both in zip(parts, (*texts, ""), strict=True) for part in both)


def templates(name: str) -> dict[str, list[str]]:
    """The templates of a fixture file, by heading."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    heading = "all"
    for line in (FIXTURES / name).read_text(encoding="utf-8").splitlines():
        if re.fullmatch(r"\[[a-z]+\]", line):
            heading = line[1:-1]
        elif line and not line.startswith("# "):
            found[heading].append(line.replace("\u23ce", "\n").replace("\u21e5", "\t"))
    return found


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@pytest.mark.parametrize("are_registers", [True, False], ids=["two_guesses.txt", "JOINTS"])
def test_two_candidates_are_wrong_whatever_joins_them(kind: str, are_registers: bool) -> None:
    """About 15,000 comparisons over all kinds: each joint, both orders, both golds."""
    drawn, accepted = random.Random(kind), []
    joints = [*JOINTS, *(FURTHER if kind in WHOLE else ())]
    for joint in templates("two_guesses.txt")["all"] if are_registers else joints:
        one, other = drawn.sample(golds()[kind], 2)
        while not are_two(one, other):
            one, other = drawn.sample(golds()[kind], 2)
        if not joint.startswith("? "):
            for pair in ((one, other), (other, one)):
                answer = fill(joint, *pair) if are_registers else joint.format(*pair)
                accepted += [(gold, answer) for gold in pair if compare(answer, gold)[0]]
    assert not accepted


MAX_REFUSED = {
    "number": 0.17, "date": 0.16, "time": 0.12, "choice": 0.16, "truth": 0.27, "words": 0.21,
}  # fmt: skip


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_few_single_answers_in_frames_of_many_registers_are_refused(kind: str) -> None:
    """As many single answers. The rules alone refuse frames in other languages, with other names or
    with numbers; the bounds are the current shares."""
    frames = [*templates("one_guess.txt")["all"], *templates("one_guess.txt")[kind]]
    drawn = random.Random(kind)
    asked = [(frame, drawn.choice(golds()[kind])) for frame in frames for _ in range(12)]
    refused = [gold for frame, gold in asked if compare(frame.replace("@", gold), gold)[0] is False]
    assert len(refused) <= MAX_REFUSED[kind] * len(asked), len(refused) / len(asked)


@pytest.mark.parametrize(("one", "other", "joint"), TABLES["two_candidates"])
def test_two_candidates_are_wrong_in_sentences_of_unknown_form(
    one: str, other: str, joint: str
) -> None:
    for answer in (joint.format(one, other), joint.format(other, one)):
        assert not any(compare(answer, gold)[0] for gold in (one, other)), answer


@pytest.mark.parametrize(("answer", "gold"), TABLES["one_answer"])
def test_one_answer_in_a_sentence_is_right(answer: str, gold: str) -> None:
    assert compare(answer, gold)[0]


@pytest.mark.parametrize(("answer", "gold"), TABLES["wrong"])
def test_a_denied_or_doubled_gold_a_title_and_a_formula_are_wrong(answer: str, gold: str) -> None:
    assert not compare(answer, gold)[0]


def test_three_candidates_are_wrong() -> None:
    drawn, accepted = random.Random(7), []
    for number in range(80):
        texts = drawn.sample(golds()[WHOLE[number % 3]], 3)
        if all(are_two(*pair) for pair in combinations(texts, 2)):
            form = TRIPLES[number % len(TRIPLES)]
            answers = [form.format(*side) for side in permutations(texts)]
            accepted += [answer for answer in answers if compare(answer, texts[0])[0]]
    assert not accepted  # of 480


@pytest.mark.parametrize(("answer", "gold", "right"), TABLES["corrections"])
def test_corrections_and_calculations_are_graded_by_their_last_answer(
    answer: str, gold: str, right: bool
) -> None:
    assert bool(compare(answer, gold)[0]) is right


def good_forms() -> list[tuple[str, str]]:
    """Gold and answer of each line."""
    lines = GOOD.read_text(encoding="utf-8").splitlines()
    rows = [line.split(" | ") for line in lines if line and not line.startswith("#")]
    return [(gold, answer.replace("\\n", "\n")) for gold, answer in rows]


def test_further_words_about_one_answer_leave_it_right() -> None:
    """None is refused by the rules; formulas may be left to mathematics."""
    found = [(gold, answer, find(answer, gold).right) for gold, answer in good_forms()]
    assert not [pair for *pair, right in found if right is False]
    assert sum(right is None for *_, right in found) < 5


ABOUT = TABLES["remarks"]


def test_remarks_about_a_gold_of_the_fixtures_leave_it_right() -> None:
    refused = [
        (gold, form.format(gold))
        for kind, forms in ABOUT.items()
        for gold in golds()[kind]
        for form in forms
        if compare(form.format(gold), gold)[0] is False
    ]
    num_asked = sum(len(golds()[kind]) * len(forms) for kind, forms in ABOUT.items())
    assert len(refused) < 0.005 * num_asked, refused


async def test_no_grader_rewards_two_answers() -> None:
    text = r"<think>x</think><answer>\boxed{Paris. London}</answer>"
    for keys in (
        {"kind": "layered", "partial_credit": True, "reward": "tools"},
        {"kind": "layered", "partial_credit": True},
        {"kind": "exact"},
        {"kind": "f1"},
        {"kind": "combined", "combined": {"one": {"kind": "f1"}, "two": {"kind": "layered"}}},
    ):
        grader = make_grader({**keys, **({"math": False} if keys["kind"] == "layered" else {})})
        for gold in ("Paris", "London"):
            task = Task("t", "e", "q", (gold,))
            calls = {"search": 1, "python": 1}
            grade = await grader.grade(task, [Message("assistant", text)], calls)
            assert (grade.reward, grade.success) == (0, False), keys
    score = await TokenF1().verdict("", "The city of Paris", ["Paris"])
    assert 0 < score.score < 1  # one candidate keeps its F1


async def test_the_order_of_a_list_counts_when_configured() -> None:
    plain, ordered = Layered(math=False), Layered(math=False, ordered=True)
    for answer, gold in (
        ("Uehara, Yoshida", "Yoshida, Uehara"), ("245, 197, 134", "134, 197, 245"),
        ("3.1.3.1; 1.11.1.7", "1.11.1.7; 3.1.3.1"), ("blue, red and green", "red, blue and green"),
    ):  # fmt: skip
        assert (await plain.verdict("", answer, [gold])).right
        assert not (await ordered.verdict("", answer, [gold])).right
        assert (await ordered.verdict("", gold.replace(",", " ,"), [gold])).right
    assert (await ordered.verdict("", r"\{2, 1\}", [r"\{1, 2\}"])).right  # a set has no order


@pytest.mark.usefixtures("services")
@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("x+2, x+1", "1+x, 2+x"),
        (r"\pi, \sqrt{2}", r"\sqrt{2}, \pi"),
        ("3.1.3.1, 1.11.1.7", "1.11.1.7; 3.1.3.1"),
    ],
)
async def test_the_order_counts_for_items_that_mathematics_compares(answer: str, gold: str) -> None:
    assert (await Layered().verdict("", answer, [gold])).right
    assert not (await Layered(ordered=True).verdict("", answer, [gold])).right
    in_order = ", ".join(reversed(re.split("[,;] ", answer)))
    assert (await Layered(ordered=True).verdict("", in_order, [gold])).right
