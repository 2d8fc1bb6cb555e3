"""The messages of a stored trajectory as graded, its scores, and votes."""

from __future__ import annotations

import pytest

from agentenv.assembly.reports.records import EvalRow, calls_that_ran, prediction, written
from agentenv.evaluation import scores
from tests.support.stored_evaluation import failed, row

pytestmark = pytest.mark.usefixtures("services")


# the graded messages


def test_messages_are_the_texts_of_the_policy_without_end_of_turn_tokens():
    found = written(row(answer="Paris"))
    assert [bool(message.tool_calls) for message in found] == [True, True, False]
    assert found[-1].content.endswith(r"<answer>\boxed{Paris}</answer>")
    assert prediction(row(answer="Paris")) == "Paris"
    assert not any("Let us look" in m.content and "<result>" in m.content for m in found)


def test_a_thought_that_the_prompt_opened_is_part_of_the_message():
    segments = [{"env": "user\nhi\nassistant\n<think>\n"}, {"policy": "so</think>Rome"}]
    plain = EvalRow(dataset="qa", task="1", sample=0, segments=segments)
    assert written(plain)[0].content == "<think>\nso</think>Rome"
    assert prediction(plain) == "Rome"


def test_a_call_truncated_by_a_limit_is_still_a_call():
    segments = [{"env": "q"}, {"policy": "<think>x</think><search>y</search>"}]
    cut = EvalRow(dataset="qa", task="1", sample=0, segments=segments)
    assert [call.name for call in written(cut)[0].tool_calls] == ["search"]


def test_only_calls_without_error_count_as_run():
    calls = [{"name": "python", "ok": True}, {"name": "python", "ok": False}]
    assert calls_that_ran(row(tool_calls=calls)) == {"python": 1}


# scores


@pytest.mark.parametrize(
    "gold", ["72.0", "3.50", "1,000", "5e3", "-0", "The Beatles", "C++", "½", ""]
)
def test_no_score_is_below_an_exact_match(gold: str) -> None:
    answers = [gold, "72", "3.5", "1000", "5000", "0", "Beatles", "the beatles.", "C", "72.00", " "]
    for answer in answers:
        found = scores.text_scores(answer, [gold, "other words"])
        assert min(found["f1"], found["contains"]) >= found["em"], answer
    assert scores.text_scores("72", ["72.0"]) == {"em": 1.0, "f1": 1.0, "contains": 1.0}


@pytest.mark.parametrize(("answer", "golds", "em", "f1", "inside"), [
    ("NYC", ["NYC", "New York"], 1, 1, 1),  # the last gold does not win
    ("New York", ["NYC", "New York", "Big Apple"], 1, 1, 1),
    ("The New York.", ["New York"], 1, 1, 1), ("New York City", ["New York"], 0, 0.8, 1),
    ("a party", ["art"], 0, 0, 0),  # words, not letters
    ("\u5317\u4eac\u5e02", ["\u5317\u4eac"], 0, 0.8, 1), ("5", ["5.0"], 1, 1, 1),
    ("yes", ["no"], 0, 0, 0), ("", ["x"], 0, 0, 0), ("x" * 3000, ["x"], 0, 0, 0),
    ("x", [], 0, 0, 0),
])  # fmt: skip
def test_text_scores_are_the_best_over_the_golds(answer, golds, em, f1, inside):
    found = scores.text_scores(answer, golds)
    assert found == pytest.approx({"em": em, "f1": f1, "contains": inside})


def test_contains_of_a_gold_without_words():
    assert scores.contains("...", "...")
    assert not scores.contains("anything", "...")


async def test_math_questions_are_recognized_by_benchmark_or_else_by_golds():
    assert scores.is_math(row(answers=[r"\frac{1}{2}"]))
    assert not scores.is_math(row(answers=["Paris"]))
    assert scores.is_math(row(answers=["Evelyn"], metadata={"benchmark": "math500"}))
    assert not scores.is_math(row(answers=["1994"], metadata={"benchmark": "hotpotqa"}))


async def test_a_row_without_an_answer_has_no_scores():
    assert await scores.Scorer().score(row(answers=[])) == {}


async def test_equivalent_expressions_are_right_by_the_rules():
    scorer = scores.Scorer()
    same = await scorer.score(row(answer=r"2\sqrt{2}+1", answers=[r"1+\sqrt{8}"]))
    assert same["math"] == same["rule"] == 1
    assert same["em"] == 0
    other = await scorer.score(row(answer=r"2\sqrt{2}", answers=[r"\sqrt{7}"]))
    assert other["math"] == 0


@pytest.mark.parametrize(
    ("benchmark", "answer", "rule"),
    [
        ("gaia", "Uehara, Yoshida", 0.0),
        ("gaia", "Yoshida, Uehara", 1.0),
        ("gaia", "Yoshida; Uehara", 1.0),
        ("xbench", "Uehara, Yoshida", 1.0),
        ("", "Uehara, Yoshida", 1.0),
    ],
)
async def test_the_score_of_the_rules_follows_the_order_of_the_benchmark(benchmark, answer, rule):
    asked = row(answer=answer, answers=["Yoshida, Uehara"], metadata={"benchmark": benchmark})
    await scores.score_rows([asked], scores.Scorer(math=False))
    assert asked.scores["rule"] == rule


async def test_existing_scores_are_kept_and_failed_rows_have_none():
    known = row(scores={"em": 0.5, "f1": 0.5})
    rows = [known, row(sample=1), failed("1", 2)]
    await scores.score_rows(rows, scores.Scorer(math=False))
    assert known.scores == {"em": 0.5, "f1": 0.5}
    assert rows[1].scores["em"] == 1
    assert rows[2].scores == {}
    await scores.score_rows(rows, scores.Scorer(math=False, compat="reference"))
    assert known.scores["em"] == 1


FIXTURES = [
    ("qa", "NYC", ["New York", "NYC"], {"em": 1.0}),
    ("qa", "New York.", ["New York"], {"em": 0.0, "contains": 1.0, "f1": 0.5}),  # keeps the stop
    ("math", r"\frac{1}{2}", ["0.5"], {"math": 1.0, "em": 0.0}),
    ("math", "x=5", ["5"], {"math": 1.0, "contains": 1.0}),
]


@pytest.mark.parametrize(("kind", "answer", "golds", "expected"), FIXTURES)
async def test_reference_scores_equal_those_of_the_published_code(kind, answer, golds, expected):
    benchmark = {"math": "math500", "qa": "hotpotqa"}[kind]
    scorer = scores.Scorer(compat="reference")
    asked = row(answer=answer, answers=golds, metadata={"benchmark": benchmark})
    found = await scorer.score(asked)
    assert expected.items() <= found.items()
    assert "math" not in found or kind == "math"


# votes


async def test_votes_are_counted_by_equivalence():
    answers = ["8", "8.0", "$8$", "nine", "", r"\frac{16}{2}", "7"]
    rows = [row(sample=i, answer=a, success=a == "7") for i, a in enumerate(answers)]
    votes = await scores.count_votes(rows, scores.Scorer())
    assert votes == scores.Votes(num_right=1, wrong=(4, 1), num_blank=1)
