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
from pathlib import Path

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

FIXTURES = Path(__file__).parents[2] / "fixtures"
GOOD = FIXTURES / "one_answer.txt"

JOINTS = [  # beyond those of two_guesses.txt; the rules list some of them
    "{}. {}", "{}; {}", "{}: {}", "{} - {}", "{} \u2013 {}", "{} \u2014 {}", "{}\u2014{}", "{}\n{}",
    "{}\r\n{}", "{}\u2028{}", "{} aka {}", "{}, aka {}", "{} a.k.a. {}", "{} i.e. {}",
    "{}, i.e., {}", "{}, or {}", "{}; or {}", "{} and {}", "{} then {}", "{} ({})", "{} [{}]",
    "{} (aka {})", "{} (also {})", "{} (possibly {})", "{} / {}", "{}/{}", "{} | {}", "{} || {}",
    "{} -> {}", "{} \u2192 {}", "{} => {}", "{} \u21d2 {}", "{} == {}", "{} \u2248 {}",
    "{} \\approx {}", "{},{}", "{} also known as {}", "{}. Alternatively, {}",
    "{}, alternatively {}", "{}, possibly {}", "{}. Possibly {}", "{}... {}", "{}\u2026{}",
    "{}?? {}", "{}! {}", "{}!! {}", "{}\n- {}", "{}\n* {}", "{}\n\u2022 {}", "{}\uff0c{}",
    "{}\u3001{}", "{}\u3002{}", "{}\uff1a{}", "{}\uff08{}\uff09", "{}\u3010{}\u3011",
    "{}\u300c{}\u300d", "{} \u00ab {} \u00bb", "{}. Or {}", "{}. Maybe {}", "{} maybe {}",
    "{} perhaps {}", "{} vs {}", "{} versus {}", "{} , {}", "{}.\n{}", "{}:\n{}", "{} --- {}",
    "{}--{}", "{} + {}", "{} plus {}", "{} as well as {}", "{} otherwise {}", "{}, if not, {}",
    "{} alias {}", "{} namely {}", "{}, that is, {}", "{} e.g. {}", "{}<br>{}", "{} :: {}",
    "{}. Also {}", "{}. Then {}", "{} ; {}", "{} or else {}", "{} or possibly {}",
    "{}, or maybe {}", "{} equals {}", "{} \u6216\u8005 {}", "{}. The answer is {}", "{}. It is {}",
    "{}. I think {}", "{}. My second guess is {}", "{}. Another possibility: {}",
    "{}. Second guess: {}", "{}|  {}", "{} ~ {}", "The answer is {}. The answer is {}.",
    "It is {}. It is {}.", "**{}** **{}**", '"{}" "{}"', "\\boxed{{{}}} \\boxed{{{}}}",
    "\\boxed{{{}}} or \\boxed{{{}}}", "\\boxed{{{}}}, \\boxed{{{}}}", "1. {} 2. {}", "1) {}\n2) {}",
    "(a) {} (b) {}", "- {}\n- {}", "Option 1: {}. Option 2: {}.", "Either {} or {}",
    "It could be {} or {}.", "First guess: {}; second guess: {}", "{} {}", "{0}. {1}. {0}.",
    "{0}, {0}, {1}", "{} is the answer. {} is the answer.", "| {} | {} |", "Answer: {}\nAnswer: {}",
    "Some say {}. Others say {}.", "<answer>{}</answer><answer>{}</answer>", "[{}, {}]",
    "The final answer is {}. {}.", "I think {}, but it might be {}.", "{}. If not, {}.",
    "{}. If that is wrong, {}.",
]  # fmt: skip
FURTHER = [  # of names and amounts
    "{}, followed by {}", "{}, succeeded by {}", "{} superseded by {}", "{}, whence {}",
    "{} hence {}", "{}. Consequently, {}.", "{}. Ultimately, {}.", "{}, not to mention {}",
    "The answer is {} and the answer is {}.", "The answer is {} but the answer is {}.",
    "It is {} and it is also {}.", "Wikipedia says {}; Britannica says {}.",
    "Passage 1 says {}. Passage 2 says {}.", "{} in one source, {} in another",
    "{} per Wikipedia, {} per Britannica", "FINAL ANSWER: {}\nFINAL ANSWER: {}",
    "\\[{}\\] \\[{}\\]", "\\({}\\) \\({}\\)", "A. {}\nB. {}", "{}\u548c{}",
    "{}\uff0c\u4e5f\u5c31\u662f{}", '{{"answer": "{}"}} {{"answer": "{}"}}',
    "{}, previously reported as {}", "{} (some editions have {})", "{} ({} in older sources)",
    "{}. Should that be rejected, {}.", "{}, in other units {}", "{}, N.B. {}",
    "Most people say {} - a few say {}.", "Confidence: {} = high, {} = medium",
    "Yes-case: {}. No-case: {}.", "My final answer: {}, with {} as a spare.",
    "{}, yet a recount produced {}", "This gives {}. That gives {}.",
    "One approach yields {}; the other yields {}.", "Result: {} Result: {}", "1 - {}\n2 - {}",
    "{} \u043e\u0440 {}", "{} (or rather {}?)",
]  # fmt: skip
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


TRIPLES = [
    "{}, {}, {}", "{} or {} or {}", "{}, {} or {}", "{}\n{}\n{}", "{}. {}. {}.",
    "{}; {}; {}",
    "{} / {} / {}", "1. {}\n2. {}\n3. {}", "Either {}, {} or {}.",
    "One of {}, {}, {}", "{} ({}, {})",
    "{} -> {} -> {}", "({}) ({}) ({})", "**{}** **{}** **{}**", "{} aka {} aka {}", "{}\n{}, {}",
]  # fmt: skip
PHRASES = [  # two phrases, in each order, with each joint
    ("international football competition", "supervisor of the royal works"),
    ("a uniformed officer", "season three"), ("college student", "built in the 15th century"),
    ("executive in charge of production", "only about half"), ("The public", "In a flowerbed"),
]  # fmt: skip


PHRASE_JOINTS = [
    "{} ({})", "{} [{}]", "{}; {}", "{}. {}.", "{}\n{}", "{} or {}", "{}, {}", "{}: {}", "{} - {}",
    "{} = {}", "1 - {}\n2 - {}", "1: {}, 2: {}", "Result: {} Result: {}", "{} <br/> {}",
    "{}, meaning {}", "{} \u2234 {}", "{} ## {}", "{} \u043e\u0440 {}", "answer1: {} answer2: {}",
    "This gives {}. That gives {}.", "One source gives {}; the other gives {}.",
]  # fmt: skip


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


@pytest.mark.parametrize(
    ("one", "other", "joint"),
    [
        ("5am", "7:30 PM", "{} (p=0.6) / {} (p=0.4)"),
        ("1200", "60", "Reading one way gives {}, reading the other way gives {}."),
        ("480", "4", "The Times reported {}, the Guardian reports {}."),
        ("0.5", "0.15", "Old sources give {}, newer ones {}."), ("A", "(E)", "Heads {}, tails {}"),
        ("We'll Burn That Bridge", "Roma", "The former is {}, the latter {}."),
        ("15", "7 miles", "A={};B={}"), ("0.0015", "six years", "{}  {}"),
        ("Lady Gaga", "Titan IIIE", "{}, lest it be {}"),
        ("1 January 2012", "May 29, 1932", "set(['{}', '{}'])"),
        ("May 29, 1932", "1 January 2012", '{{"answer": ["{}", "{}"]}}'),
        ("yes", "no", "Census: {} Survey: {}"), ("yes", "no", "{} is plausible; {} is more so."),
        ("AC", "B, D", "From the text: '{}'. From the caption: '{}'."),
        ("1", "3", 'Source one: "{}". Source two: "{}".'),
        ("12", "13", "One vote for {}, two votes for {}."),
        ("110", "50%", "{} is given by Smith and {} is given by Jones."),
        ("9,984", "three centuries", "{} respectively {}"), ("30 years.", "2019", "{}\uff5e{}"),
        ("Paris", "London", "print({})\nprint({})"), ("Claude Sr.", "Jefferson City", "{}  {}"),
        ("Hyderabad, India", "Birmingham, Alabama", "Between {} and {}"),
        ("1985 and 1987", "(15, -29)", "{} \u2016 {}"),
        ("1947", "1827", "{}, or if that is wrong, {}."), ("12", "6", "x = {} and x = {}"),
        ("52", "131", "Source 1: {}. Source 2: {}."), ("8", "20", "Answer: {} Answer: {}"),
        ("11", "9", "Between {} and {}"), ("12", "27", "Both {} and {}"),
        ("90", "100", "The range is between {} and {}"), ("023", "699", "{}, which is {}"),
        ("22 January 1794", "October 27, 1893", "{} is one answer, {} is another."),
        ("Helsinki", "Cross Plains", "The first is {}, the second is {}."),
        ("Gerald Weber", "Max Teller", "{}, formerly {}"), ("physicist", "chemist", "{}, {}"),
        ("physicist", "chemist", "{} ({})"), ("Golden State", "Austin", "{}. Its name is {}"),
        ("Evreux", "James B. Harris", "{}, {} are the candidates"),
        ("five unit loads", "1948", "__{}__ __{}__"),
        ("Henry IV of France", "Julius Turing", "{}\r\n{}"),
    ],
)  # fmt: skip
def test_two_candidates_are_wrong_in_sentences_of_unknown_form(
    one: str, other: str, joint: str
) -> None:
    for answer in (joint.format(one, other), joint.format(other, one)):
        assert not any(compare(answer, gold)[0] for gold in (one, other)), answer


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("I first thought of something else, but it is Evelyn.", "Evelyn"),
        ("It is the public.", "the public"), ("It is only about half.", "only about half"),
        ("The teacher is called a guru.", "guru"), ("Yes, it was Paris.", "Paris"),
        ("Spain has Madrid as its capital.", "Madrid"),
        ("It was Tiberius that succeeded Augustus.", "Tiberius"),
        ("The rate rose by 7 points, reaching 13.", "13"), ("Roma, according to Ann Lee.", "Roma"),
        ("13, as stated in chapter 7.", "13"), ("In 1990 they had 13 medals.", "13"),
        ("The place that Ann Lee visited is Roma.", "Roma"),
        ("Roma, because Ann Lee says so.", "Roma"), ("Ann Lee, a UN officer", "Ann Lee"),
        ("Ann Lee wrote about it, and the answer is Roma.", "Roma"),
        ("Roma. Ann Lee was born there.", "Roma"), ("12 in total, counting all 7 groups.", "12"),
        ("12, the sum of 4 and 8", "12"),
        ("According to the 1871 edition, May 9, 2005.", "May 9, 2005"),
        ("B, because A is too small", "B"),
    ],
)  # fmt: skip
def test_one_answer_in_a_sentence_is_right(answer: str, gold: str) -> None:
    assert compare(answer, gold)[0]


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("I have no idea", "no"), ("It is anything but Paris", "Paris"), ("above 13", "13"),
        ("It is not Paris", "Paris"), ("A. It is C", "C"), ("The answer is \u22125", "5"),
        ("Paris, but I know that it is not", "Paris"), ("all but 13", "13"),
        ("Suppose B. Suppose (D) 162.", "(D) 162"), ("B. Compare D.", "B"),
        ("In English (E), in French C) Sea of Japan.", "(E)"), ("A atau (E)", "(E)"),
        ("A nor yet (B) 45", "(B) 45"), ("A atau E", "E"), ("Everything except (B)", "B"),
        ("Seven Samurai", "7"), ("Nine Inch Nails", "9"), ("24 Hour Party People", "24"),
        ("One Direction", "1"), ("n^2+1", "no"), ("y = 3x", "yes"), (r"\mathbb{N}", "no"),
        ("right triangle", "yes"), ("No Country for Old Men", "no"), ("Yes Man", "yes"),
        ("0, quizás 250", "0"), ("7, metres 250", "7"),
    ],
)  # fmt: skip
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


@pytest.mark.parametrize(
    ("answer", "gold", "right"),
    [
        ("13. Sorry, 14.", "14", True), ("13. Sorry, 14.", "13", False),
        ("London. No, Paris.", "London", False), ("44, I mean 42", "42", True),
        ("44, I mean 42", "44", False), ("13. The final answer is 14.", "14", True),
        ("13. The final answer is 14.", "13", False),
        ("I first thought 13, but it is 14.", "14", True),
        ("I first thought 13. It is 14.", "14", True),
        ("I first thought 13. It is 14.", "13", False),
        ("I first thought 13. It is 14 or 15.", "14", False), ("13. Correction: 14", "14", True),
        ("13. Correction: 14. 15", "14", False), (r"\boxed{13} Wait, \boxed{14}", "14", True),
        (r"\boxed{13} Wait, \boxed{14}", "13", False), (r"\boxed{2} and \boxed{3}", "2, 3", True),
        (r"\boxed{14} \boxed{14}", "14", True), (r"\frac{1}{2}. No, -128.", "-128", True),
        (r"\frac{1}{2}. No, -128.", "128", False),
        ("April 20, 1966... no, wait, May 9, 2005", "May 9, 2005", True),
        ("Combermere. Scratch that, President of the United States.", "Combermere", False),
        (">45", "45", False), ("x + 5 = 0", "0", False), ("5 + 8 = 14", "14", False),
        ("44", "44 BC", False), (r"$\frac{1}{3}$ (about 33.3%)", r"\frac{1}{3}", True),
    ],
)  # fmt: skip
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


ABOUT = {  # remarks about an answer, by kind
    "words": [
        "{}. It is well known.", "The answer is {}.", "**{}**", "{}, as the second source says.",
        "Final answer: {}", "{} (according to the sources)",
        "It is {}, because both sources agree.",
        "{}. They were mentioned in 1990.", "{} - it is the only one that fits.", "Answer: {}",
        "I first thought of something else, but it is {}.", "### Answer\n{}",
        "My first guess was wrong, but the answer is {}.", "{}, and nothing else.",
    ],
    "number": [
        "{}. This is what remains.", "The answer is {}.", "So the answer is {}", "**{}**",
        "Answer: {}",
        "{}, as was shown above.", "{} (by the second equation)", "Therefore, {}", "x = {}",
        "{}. The first term was dropped.",
    ],
    "date": [
        "{}. It was a cold day.", "The answer is {}.", "{}, in the evening", "{} (a holiday)",
    ],
    "truth": ["{}, they are.", "{}. Both are the same.", "The answer is {}."],
}  # fmt: skip


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
            grade = await grader.grade(
                task, [Message("assistant", text)], {"search": 1, "python": 1}
            )
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
        ("x+2, x+1", "1+x, 2+x"), (r"\pi, \sqrt{2}", r"\sqrt{2}, \pi"),
        ("3.1.3.1, 1.11.1.7", "1.11.1.7; 3.1.3.1"),
    ],
)  # fmt: skip
async def test_the_order_counts_for_items_that_mathematics_compares(answer: str, gold: str) -> None:
    assert (await Layered().verdict("", answer, [gold])).right
    assert not (await Layered(ordered=True).verdict("", answer, [gold])).right
    in_order = ", ".join(reversed(re.split("[,;] ", answer)))
    assert (await Layered(ordered=True).verdict("", in_order, [gold])).right
