"""Scores, votes and figures of stored trajectories."""

from __future__ import annotations

import pytest

from agentenv.shared import close_shared
from launchers.evaluation.figures import default_ks, figures_of, questions_of
from launchers.evaluation.rows import EvalRow
from launchers.evaluation.scores import Scorer, contains, is_math, score_rows, text_scores
from launchers.evaluation.summary import summarise
from launchers.evaluation.transcript import calls_that_ran, prediction, written
from launchers.evaluation.votes import count_votes
from tests.support.stored_evaluation import trajectory


@pytest.fixture(autouse=True)
async def _closed():
    yield
    await close_shared()


def row(task: str = "1", sample: int = 0, success: bool = True, **keys: object) -> EvalRow:
    answer = str(keys.pop("answer", "7"))
    filled = {"task": task, "sample": sample, "success": success, "answers": ["7"], **keys}
    return trajectory(answer, **filled)


def failed(task: str, sample: int, error: str = "EngineError: down") -> EvalRow:
    return EvalRow(dataset="qa", task=task, sample=sample, end="failed", error=error)


# what the grader saw


def test_messages_are_what_the_policy_wrote_without_ends_of_turn():
    found = written(row(answer="Paris"))
    assert [bool(message.tool_calls) for message in found] == [True, True, False]
    assert found[-1].content.endswith(r"<answer>\boxed{Paris}</answer>")
    assert prediction(found) == "Paris"
    assert not any("Let us look" in m.content and "<result>" in m.content for m in found)


def test_a_thought_that_the_prompt_opened_is_part_of_the_message():
    plain = EvalRow(
        dataset="qa", task="1", sample=0,
        segments=[{"env": "user\nhi\nassistant\n<think>\n"}, {"policy": "so</think>Rome"}],
    )  # fmt: skip
    assert written(plain)[0].content == "<think>\nso</think>Rome"
    assert prediction(written(plain)) == "Rome"


def test_a_call_that_a_limit_cut_off_is_still_a_call():
    cut = EvalRow(
        dataset="qa", task="1", sample=0,
        segments=[{"env": "q"}, {"policy": "<think>x</think><search>y</search>"}],
    )  # fmt: skip
    assert [call.name for call in written(cut)[0].tool_calls] == ["search"]


def test_only_calls_without_error_count_as_run():
    calls = [{"name": "python", "ok": True}, {"name": "python", "ok": False}]
    assert calls_that_ran(row(tool_calls=calls)) == {"python": 1}


# scores


@pytest.mark.parametrize(
    ("answer", "golds", "em", "f1", "inside"),
    [
        ("NYC", ["NYC", "New York"], 1, 1, 1),  # the last gold does not win
        ("New York", ["NYC", "New York", "Big Apple"], 1, 1, 1),
        ("The New York.", ["New York"], 1, 1, 1),
        ("New York City", ["New York"], 0, 0.8, 1),
        ("a party", ["art"], 0, 0, 0),  # words, not letters
        ("北京市", ["北京"], 0, 0.8, 1),
        ("5", ["5.0"], 1, 0, 0),
        ("yes", ["no"], 0, 0, 0),
        ("", ["x"], 0, 0, 0),
        ("x" * 3000, ["x"], 0, 0, 0),
        ("x", [], 0, 0, 0),
    ],
)
def test_text_scores_are_the_best_over_the_golds(answer, golds, em, f1, inside):
    found = text_scores(answer, golds)
    assert found == pytest.approx({"em": em, "f1": f1, "contains": inside})


def test_contains_of_a_gold_without_words():
    assert contains("...", "...")
    assert not contains("anything", "...")


async def test_mathematics_is_told_by_the_benchmark_or_else_by_its_golds():
    assert is_math(row(answers=[r"\frac{1}{2}"]))
    assert not is_math(row(answers=["Paris"]))
    assert is_math(row(answers=["Evelyn"], metadata={"benchmark": "math500"}))
    assert not is_math(row(answers=["1994"], metadata={"benchmark": "hotpotqa"}))


async def test_equivalent_expressions_are_right_by_the_rules():
    scorer = Scorer()
    same = await scorer.score(row(answer=r"2\sqrt{2}+1", answers=[r"1+\sqrt{8}"]))
    assert same["math"] == same["rule"] == 1
    assert same["em"] == 0
    other = await scorer.score(row(answer=r"2\sqrt{2}", answers=[r"\sqrt{7}"]))
    assert other["math"] == 0


async def test_scores_that_are_there_are_kept_and_failed_rows_have_none():
    known = row(scores={"em": 0.5, "f1": 0.5})
    rows = [known, row(sample=1), failed("1", 2)]
    assert await score_rows(rows, Scorer(math=False)) == 0
    assert known.scores == {"em": 0.5, "f1": 0.5}
    assert rows[1].scores["em"] == 1
    assert rows[2].scores == {}
    await score_rows(rows, Scorer(math=False), again=True)
    assert known.scores["em"] == 1


FIXTURES = [
    ("qa", "NYC", ["New York", "NYC"], {"em": 1.0}),
    ("qa", "New York.", ["New York"], {"em": 0.0, "contains": 1.0, "f1": 0.5}),  # keeps the stop
    ("math", r"\frac{1}{2}", ["0.5"], {"math": 1.0, "em": 0.0}),
    ("math", "x=5", ["5"], {"math": 1.0, "contains": 1.0}),
]


@pytest.mark.parametrize(("kind", "answer", "golds", "expected"), FIXTURES)
async def test_reference_scores_are_those_of_the_published_code(kind, answer, golds, expected):
    benchmark = {"math": "math500", "qa": "hotpotqa"}[kind]
    scorer = Scorer(compat="reference")
    asked = row(answer=answer, answers=golds, metadata={"benchmark": benchmark})
    found = await scorer.score(asked)
    assert expected.items() <= found.items()
    assert "math" not in found or kind == "math"


# votes


async def test_votes_are_counted_by_equivalence():
    answers = ["8", "8.0", "$8$", "nine", "", r"\frac{16}{2}", "7"]
    rows = [row(sample=i, answer=a, success=a == "7") for i, a in enumerate(answers)]
    votes = await count_votes(rows, Scorer())
    assert votes.num_right == 1
    assert votes.wrong == (4, 1)
    assert votes.num_blank == 1
    assert votes.num_samples == 7


# figures


def test_ks_are_powers_of_two_and_the_whole():
    assert default_ks(questions_of([row(sample=i) for i in range(6)])) == (1, 2, 4, 6)
    assert default_ks(questions_of([row()])) == (1,)


async def figures(rows: list[EvalRow], ks: tuple[int, ...] = ()):
    summary, _ = await summarise("test", rows, Scorer(math=False), ks=ks)
    return summary


async def test_failed_trajectories_are_in_no_score_and_bounded():
    rows = [row("1", 0), row("1", 1, False, answer="8"), failed("1", 2), failed("2", 0, "EnvError")]
    rows.append(row("3", 0, False, answer="9"))
    overall = (await figures(rows)).overall
    assert overall.num_questions == 3
    assert (overall.num_trajectories, overall.num_failed) == (3, 2)
    assert overall.failures == {"EngineError": 1, "EnvError": 1}
    success = overall.estimates["success"]
    assert success.value == pytest.approx((0.5 + 0) / 2)  # question 2 has no success
    assert success.num_questions == 2
    assert overall.success_if_failed_wrong == pytest.approx((1 / 3 + 0 + 0) / 3)
    assert overall.pass_at[2].num_questions == 1


async def test_tool_figures_by_hand():
    used = [{"name": "search", "ok": True}, {"name": "python", "ok": False}]
    rows = [
        row("1", tool_calls=used, success=True),
        row("2", tool_calls=used * 2, success=False),
        row("3", tool_calls=[], success=True),
        row("4", tool_calls=[], success=True, end="truncated", limit="turns"),
    ]
    overall = (await figures(rows)).overall
    assert overall.estimates["tool_calls"].value == pytest.approx(6 / 4)
    assert overall.estimates["tool_productivity"].value == pytest.approx(3 / 6)
    assert overall.estimates["tool_efficiency"].value == pytest.approx(1 / 2)
    assert overall.arpo_tool_productivity == pytest.approx(0.75 * 1.5 / 1.6 * 100)
    assert overall.tools["python"].calls == overall.tools["python"].errors == 3
    assert overall.tools["search"].errors == 0
    assert overall.truncations == {"turns": 1}


async def test_uses_of_helpers_are_added_up():
    rows = [row("1", assist={"debugger_uses": 1, "debugger_ok": 1}), row("2", assist={})]
    rows.append(row("3", assist={"debugger_uses": 2, "debugger_tokens": 90.0}))
    overall = (await figures(rows)).overall
    assert overall.assist == {"debugger_ok": 1, "debugger_tokens": 90, "debugger_uses": 3}


async def test_without_any_tool_call_there_is_no_productivity():
    overall = (await figures([row(tool_calls=[])])).overall
    assert "tool_productivity" not in overall.estimates
    assert "tool_efficiency" not in overall.estimates
    assert overall.arpo_tool_productivity == 0


async def test_single_samples_have_wilsons_interval_several_a_bootstrap():
    single = (await figures([row(str(i), success=i < 5) for i in range(10)])).overall
    assert single.estimates["success"].interval == "wilson"
    assert single.estimates["success"].low == pytest.approx(0.2366, abs=1e-4)
    several = [row(str(i), j, success=i < 5) for i in range(10) for j in range(2)]
    found = (await figures(several)).overall.estimates["success"]
    assert found.interval == "bootstrap"
    assert 0.1 <= found.low < 0.5 < found.high <= 0.9


async def test_pass_at_k_and_majority_by_hand():
    answers = [("7", True), ("7", True), ("8", False), ("9", False)]
    rows = [row("1", i, right, answer=a) for i, (a, right) in enumerate(answers)]
    overall = (await figures(rows, ks=(1, 3, 4))).overall
    assert overall.pass_at[1].value == pytest.approx(0.5)
    assert overall.pass_at[3].value == 1.0
    # of 4 subsets of 3: two hold both right ones, two hold one beside 8 and 9: a tie of three
    assert overall.majority_at[3].value == pytest.approx((1 + 1 + 1 / 3 + 1 / 3) / 4)
    assert overall.majority_at[4].value == 1.0
    assert list(overall.pass_at) == [1, 3, 4]


async def test_groups_are_datasets_kinds_and_the_fields_of_the_dataset():
    rows = [row(str(i), dataset="gaia", metadata={"Level": 1 + i % 2}) for i in range(4)]
    rows += [row(str(i), dataset="hotpot", kind=k, success=False) for i, k in enumerate("ab")]
    summary = await figures(rows)
    assert list(summary.groups["dataset"]) == ["gaia", "hotpot"]
    assert list(summary.groups["gaia level"]) == ["1", "2"]
    assert list(summary.groups["kind"]) == ["a", "all", "b"]
    assert summary.average == pytest.approx(0.5)
    assert summary.overall.estimates["success"].value == pytest.approx(4 / 6)


async def test_groups_of_a_known_benchmark_are_its_own_fields():
    kept = {"benchmark": "hle", "category": "Math", "answer_type": "exactMatch", "type": "x"}
    rows = [
        row("1", dataset="hle", metadata=kept),
        row("2", dataset="hle", metadata={**kept, "category": "Physics"}),
    ]
    summary = await figures(rows)
    assert list(summary.groups["hle category"]) == ["Math", "Physics"]
    assert "hle type" not in summary.groups
    assert "kind" not in summary.groups


async def test_judge_against_rules():
    cells = [(1, 1)] * 6 + [(1, 0)] * 2 + [(0, 1)] + [(0, 0)] * 3
    rows = [
        row(str(i), success=bool(judge or rule), parts={"judge": judge, "rule": rule})
        for i, (judge, rule) in enumerate(cells)
    ]
    rows.append(row("x", success=False, parts={"rule": 0.0, "judge_unparsed": 1.0}))
    overall = (await figures(rows)).overall
    found = overall.agreement
    assert (found.both_right, found.only_judge, found.only_rules, found.both_wrong) == (6, 2, 1, 3)
    assert found.share == pytest.approx(9 / 12)
    assert found.kappa == pytest.approx((9 / 12 - 38 / 72) / (1 - 38 / 72))
    assert overall.estimates["judge"].value == pytest.approx(9 / 13)


async def test_versions_and_order_of_rows_do_not_matter():
    rows = [row(str(i), j, (i + j) % 3 > 0) for i in range(5) for j in range(3)]
    rows[4].policy_versions = [2, 9]
    one = await figures(rows)
    other = await figures(sorted(rows, key=lambda r: (r.task, -r.sample)))
    assert one == other
    assert one.policy_versions == [2, 9]


def test_figures_of_nothing_are_empty():
    found = figures_of([], (1,))
    assert found.num_questions == 0
    assert found.estimates == {}
