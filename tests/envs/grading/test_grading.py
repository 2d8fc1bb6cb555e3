"""The layered grader: accepted and refused answers, the reasons, and hostile answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest

from agentenv.base.types import Message, Task, ToolCall
from agentenv.envs.grading.equality import risk_of
from agentenv.envs.grading.forms import Several, several
from agentenv.envs.grading.keys import grader_config
from agentenv.envs.grading.layers import Layered, compare
from agentenv.envs.grading.reward import ToolReward, check_grader, make_grader
from agentenv.envs.grading.words import f1
from agentenv.reference.grading import ReleasedReward
from tests import check_fixtures
from tests import check_grader as pairs
from tests.support.grading import FIXTURES, TABLES
from tests.support.rollout_checks import rollback

pytestmark = pytest.mark.usefixtures("services")


@pytest.mark.parametrize(("gold", "answer", "layer"), TABLES["layers"])
async def test_a_right_answer_is_accepted_by_its_layer(gold: str, answer: str, layer: str) -> None:
    verdict = await Layered(math=False).verdict("?", answer, ["something else", gold])
    assert (verdict.right, verdict.score) == (True, 1.0)
    assert verdict.reason.endswith(f"by {layer}")


@pytest.mark.parametrize(("gold", "answer"), [
    ("5 euros", "$5"), ("[1, 2)", "(1, 2)"), ("(1, 2)", "(2, 1)"), ("Paris", ""),
    ("B", "Option B is wrong"), ("red and blue", "red or blue"),
    ("7 to 10 percent", "7 to 11 percent"), ("at most 30", "at least 30"),
    ("the mid-1700s", "the mid-17th century"), ("3 cats", "3 kg"), ("10 dB", "10 m"), ("10", "10?"),
    ("\u4e00\u4e07", "\u4e00\u4ebf\u4e00\u4ebf\u4ebf"), ("Paris", "Paris " * 1000),
    ("The public", "The right arm The public"), ("The liver", "The right lung The liver"),
    ("Academy Award for Best Animated Short Film", "It is"),
])  # fmt: skip
async def test_a_wrong_answer_is_refused(gold: str, answer: str) -> None:
    verdict = await Layered(math=False).verdict("?", answer, [gold])
    assert (verdict.right, verdict.score) == (False, 0.0)
    assert verdict.reason.startswith("wrong: ")


@pytest.mark.parametrize(
    ("answer", "gold", "right", "entered"),
    [
        ("41", "42", False, {"layers", "numbers"}),
        ("1,000", "1000", True, {"layers", "numbers"}),
        ("PARIS", "Paris", True, {"layers", "numbers", "text"}),
    ],
)
def test_plain_answers_enter_only_the_modules_they_need(
    answer: str, gold: str, right: bool, entered: set[str]
) -> None:
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if path.parent.name == "grading" and "tests" not in path.parts:
            files.add(path.stem)

    sys.setprofile(note)
    try:
        found = compare(answer, gold)
    finally:
        sys.setprofile(None)
    assert found[0] is right
    assert files == entered


def test_a_long_run_of_spaces_in_an_enumeration_is_read_without_backtracking() -> None:
    assert several(f"1. a{' ' * 4000}2. b") == Several(("a", "b"))


async def test_formulas_are_compared_by_math_verify() -> None:
    pytest.importorskip("math_verify")
    grader = Layered()  # it starts processes once
    for gold, answer, right in (
        ("x^2+2x+1", "(x+1)^2", True),
        (r"(-\infty, 2) \cup (3, \infty)", r"\mathbb{R} \setminus [2,3]", True),
        (r"\sqrt{2}", "1.41421356237", False),
        (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ -2 \end{pmatrix}", False),
    ):
        verdict = await grader.verdict("?", answer, [gold])
        assert verdict.right == right, (gold, answer)
        assert verdict.reason.endswith("by math" if right else "math-verify: not equal")


def test_the_rules_leave_expressions_to_math_verify() -> None:
    assert compare("(x+1)^2", "x^2+2x+1") == (None, "math")


async def test_any_gold_makes_an_answer_right_and_partial_credit_is_the_f1() -> None:
    matcher = Layered(math=False, partial_credit=True)
    assert (await matcher.verdict("?", "NYC", ["New York", "NYC"])).right
    near = await matcher.verdict("?", "blue red", ["red", "12"])
    assert not near.right
    assert near.score == pytest.approx(2 / 3)
    assert near.parts == {"f1": near.score}
    assert (await matcher.verdict("?", "13", ["12"])).score == 0
    assert (await matcher.verdict("?", "13", [])).reason.endswith("no gold answer")


def test_f1_counts_words_or_chinese_characters() -> None:
    assert f1("the red car", "a red bus") == pytest.approx(0.5)
    assert f1("yes it is", "yes") == 0
    assert f1("\u5317\u4eac\u5e02", "\u5317\u4eac") == pytest.approx(0.8)


@pytest.mark.parametrize(("expression", "risk"), [
    ("10^{10^{10}}", "tower"), ("9^9^9", "tower"), ("(10^{10})!", "factorial"),
    ("10000!", "factorial"), ("10^{999999}", "exponent"), ("x^{1000}-1", "degree"),
    (r"\sum_{k=1}^{9} k", "sum"), ("(" * 30 + "1" + ")" * 30, "nested"), ("1+" * 400, "longer"),
    ("9" * 70, "digits"), (r"\binom{10000}{5000}", "binomial"),
])  # fmt: skip
def test_risky_expressions_are_named(expression: str, risk: str) -> None:
    assert risk in risk_of(expression)


@pytest.mark.parametrize("expression", ["x^2 y^2", "2^{10}", r"e^{x_1} + 5!", r"\frac{1}{x^{n+1}}"])
def test_ordinary_expressions_have_no_risk(expression: str) -> None:
    assert risk_of(expression) == ""


HOSTILE = [
    "10^{10^{10}}", "9^{9^{9^9}}", "(10^{10})!", "x^{10000000}-1", r"\sum_{k=1}^{10^9}\sin k",
    "(" * 300 + "1" + ")" * 300, "{" * 10**6, "9" * 10**6, "1+" * 500_000, r"\frac" * 300,
    r"\sqrt{" * 200 + "2" + "}" * 200, "((((((x+1)^9)^9)^9)^9)^9)", "(x+y+z+w)^{200}", "a" * 2000,
    "\N{ARABIC LIGATURE SALLALLAHOU ALAYHE WASALLAM}" * 1900, "1,2," * 490, "\x00\ud800",
]  # fmt: skip


async def test_hostile_answers_are_wrong_and_block_no_other_answer() -> None:
    pytest.importorskip("math_verify")
    matcher = Layered()
    await matcher.start()
    hostile = [asyncio.ensure_future(matcher.verdict("?", text, ["x + 5"])) for text in HOSTILE]
    assert (await matcher.verdict("?", "5 + x", ["x + 5"])).right
    verdicts = await asyncio.gather(*hostile)
    assert not any(verdict.right for verdict in verdicts)
    reasons = [verdict.reason for verdict in verdicts]
    assert any("did not finish" in reason for reason in reasons)
    assert any("not evaluated" in reason for reason in reasons)


async def test_the_grader_agrees_with_the_labeled_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("math_verify")
    rows = pairs.read_pairs(FIXTURES / "answer_pairs.json")
    assert len(rows) >= 400
    assert await pairs.check(rows, alone=False) >= 0.93
    output = capsys.readouterr().out
    assert "F1 == 1)" in output
    assert "slowest pairs" in output


# docs/environments.md reports the agreement of the grader with them
LABELLED = {
    "fresh_pairs.json": "0ce8b99c8b93b0161b0e6c45893fe3d29b7597a3165b9313560da618dabe4b62",
    "new_pairs.json": "de7ed7e9b792513d9548a7fdcca616e8633e971dea64f0848c59a7497b227a12",
}


@pytest.mark.parametrize("name", LABELLED)
def test_the_documentation_names_the_digests_of_the_labeled_pairs(name: str) -> None:
    digest = hashlib.sha256((FIXTURES / name).read_bytes()).hexdigest()
    assert digest == LABELLED[name]
    assert digest in (FIXTURES.parent.parent / "docs" / "environments.md").read_text("utf-8")


@pytest.mark.parametrize("name", LABELLED)
def test_half_of_the_labeled_pairs_is_held_out(name: str) -> None:
    path = FIXTURES / name
    both = pairs.read_pairs(path)
    found = [pairs.read_pairs(path, half) for half in ("development", "held-out")]
    assert sum(map(len, found)) == len(both) >= 500
    assert sum(not row.label for row in both) >= 200
    golds = [{tuple(row.golds) for row in half} for half in found]
    assert not golds[0] & golds[1]
    forms = [Counter((row.kind, row.label) for row in half) for half in found]
    assert all(abs(forms[0][form] - forms[1][form]) <= 4 for form in forms[0] | forms[1])
    seed = json.loads(path.read_text("utf-8"))["seed"]
    seen = [both[number - 1] for number in pairs.READ_BEFORE.get(seed, ())]
    assert all(row in found[0] for row in seen)


def test_only_counts_are_printed_for_the_held_out_half(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("math_verify")
    path = tmp_path / "pairs.json"
    rows = [{"gold": f"gold{n}", "answer": "other", "label": n % 2} for n in range(60)]
    path.write_text(json.dumps({"seed": 1, "pairs": rows}))
    assert pairs.main([str(path), "--no-math-verify", "--half", "held-out"]) == 0
    held_out = capsys.readouterr().out
    assert "right answers refused" in held_out
    assert "other" not in held_out
    assert "gold" not in held_out
    assert pairs.main([str(path), "--no-math-verify"]) == 0
    shown = capsys.readouterr().out
    development = {row.golds[0] for row in pairs.read_pairs(path, "development") if row.label}
    assert {gold for gold in (f"gold{n}" for n in range(60)) if f"'{gold}'" in shown} >= development
    path.write_text('[["5", "5", 1]]')
    assert pairs.main([str(path), "--half", "held-out"]) == 2
    assert 'no "seed"' in capsys.readouterr().err


def test_check_grader_checks_any_list_of_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("math_verify")
    path = tmp_path / "pairs.json"
    path.write_text(json.dumps([["5", "5.0", 1], [["NYC", "New York"], "nyc", 1], ["5", "6", 1]]))
    arguments = [str(path), "--no-math-verify", "--min-agreement"]
    assert pairs.main([*arguments, "0.6"]) == 0
    assert pairs.main([*arguments, "0.7"]) == 1
    assert "'5' <- '6'" in capsys.readouterr().out
    path.write_text('[["5", "5"]]')
    assert pairs.main([str(path)]) == 2
    assert "0 or 1]" in capsys.readouterr().err
    assert pairs.wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-3)


@pytest.mark.parametrize(
    "name", ["reward", "math_equiv", "eval_metrics", "eval_extract_answer", "tags_and_rollback"]
)
def test_compat_equals_the_released_code(name: str) -> None:
    passed, failed = check_fixtures.check_file(FIXTURES / f"{name}.json")
    assert passed
    assert not failed


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("<think> a </think> no call", "<think> a </think> no call"),
        ("<think> a </think>\nSo I compute:\n<python>x", "<think> a </think>\n"),
        ("a\nb\n<think>c\nd </think> \n <python>x</python>", "a\nb\n<think>c\n"),
        ("a </think><python>", ""),
    ],
)
def test_the_rollback_equals_that_of_the_released_backtracer(text: str, kept: str) -> None:
    assert rollback(text) == kept


def test_compat_loads_the_released_reward() -> None:
    assert isinstance(make_grader({"compat": "reference"}, reward="tools"), ReleasedReward)


async def test_the_compat_reward_is_f1_with_a_bonus_for_tags_in_the_text() -> None:
    written = [
        Message("assistant", "<think>.</think><search>q</search>", (ToolCall("search", {}),)),
        Message("assistant", "<think></python></think><answer>\\boxed{Paris France}</answer>"),
    ]
    task = Task("t", "e", "?", ("Paris",))
    found = await ReleasedReward().grade(task, written, {})
    assert found.reward == pytest.approx(2 / 3 + 0.1)
    assert not found.success
    ours = await ToolReward(Layered(math=False, partial_credit=True)).grade(task, written, {})
    assert ours.reward == pytest.approx(2 / 3)
    assert ours.parts["tool_bonus"] == 0


@pytest.mark.parametrize("keys", [{"kind": "exact"}, {"kind": "f1"}, {"math": False}])
async def test_every_kind_of_grader_rewards_the_gold(keys: dict[str, object]) -> None:
    task = Task("t", "e", "?", ("Paris",))
    message = Message("assistant", r"<think>.</think><answer>\boxed{Paris}</answer>")
    for reward, expected in (("answer", 1.0), ("tools", 1.1)):
        grader = make_grader({**keys, "reward": reward})
        await check_grader(grader, [task])
        found = await grader.grade(task, [message], {"search": 1, "python": 1})
        assert found.reward == expected
    assert grader_config(keys).reward == "answer"
