"""Figures of stored trajectories, by hand."""

from __future__ import annotations

import pytest

from agentenv.assembly.reports.records import EvalRow
from agentenv.evaluation.figures import (
    agreement_of,
    default_ks,
    figures_of,
    questions_of,
    summarize,
)
from agentenv.evaluation.report import hints_of
from agentenv.evaluation.scores import Scorer
from agentenv.training.loop.evaluations import brief_report
from tests.support.stored_evaluation import failed, row

pytestmark = pytest.mark.usefixtures("services")


def test_ks_are_powers_of_two_and_the_number_of_samples():
    assert default_ks(questions_of([row(sample=i) for i in range(6)])) == (1, 2, 4, 6)
    assert default_ks(questions_of([row()])) == (1,)


async def figures(rows: list[EvalRow], ks: tuple[int, ...] = ()):
    summary = await summarize("test", rows, Scorer(math=False), ks=ks)
    return summary


async def test_failed_trajectories_are_excluded_from_scores_and_bounded():
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
    assert (overall.estimates["tool_use"].value, overall.num_valid) == (1 / 2, 4)
    assert overall.arpo_tool_productivity == pytest.approx(0.75 * 1.5 / 1.6 * 100)
    assert overall.tools["python"].calls == overall.tools["python"].errors == 3
    assert overall.tools["search"].errors == 0
    assert overall.truncations == {"turns": 1}


async def test_uses_of_helpers_are_added_up():
    rows = [row("1", assist={"debugger_uses": 1, "debugger_ok": 1}), row("2", assist={})]
    rows.append(row("3", assist={"debugger_uses": 2, "debugger_tokens": 90.0}))
    overall = (await figures(rows)).overall
    assert overall.assist == {"debugger_ok": 1, "debugger_tokens": 90, "debugger_uses": 3}


async def test_without_tool_calls_no_productivity_is_reported():
    overall = (await figures([row(tool_calls=[])])).overall
    assert "tool_productivity" not in overall.estimates
    assert "tool_efficiency" not in overall.estimates
    assert overall.arpo_tool_productivity is None
    assert figures_of([], (1,)).arpo_tool_productivity is None


async def test_answers_with_only_a_wrong_format_are_counted():
    bad = {"format": -1.0, "accuracy": 0.0}
    rows = [
        row("1", success=False, parts=bad),
        row("2", success=False, parts={"style.format": -1.0, "style": -0.5}),  # in a sum of graders
        row("3", success=False, answer="8", parts=bad),
        row("4", success=True, parts={"format": 0.0}),
        failed("5", 0),
    ]
    assert (await figures(rows)).overall.num_misformatted == 2


async def test_the_report_shows_the_counts_of_the_programs_calls():
    counts = ({"refused/x": 2, "discarded": 1}, {"refused/x": 1}, {})
    rows = [row(str(n), endpoint=one) for n, one in enumerate(counts)]
    (said,) = hints_of(await figures(rows), "evals/x")
    assert said.rpartition(": ")[2].split(", ") == ["discarded 1", "refused/x 3"]


async def test_the_report_warns_if_most_calls_of_a_tool_fail_alike():
    """Beyond numbers; calls above the limit are mistakes of the policy."""
    bad = [{"name": "order", "ok": False, "error": f"order {i}: HTTP 401"} for i in range(4)]
    over = {"name": "stock", "ok": False, "error": "no calls", "info": {"limit": "max_calls"}}
    summary = await figures([row("1", tool_calls=[*bad, *[over] * 9])])
    assert hints_of(summary, "evals/x") == []
    good = {"name": "order", "ok": True, "error": None}
    summary = await figures([row("1", tool_calls=[*bad, *bad, good]), row("2", tool_calls=[])])
    (said,) = hints_of(summary, "evals/x")
    assert said.startswith("8 of 9 calls of the tool 'order' failed with the same text")
    assert "0: HTTP 401" in said
    assert summary.overall.tools["order"].num_same == 8


async def test_every_share_has_an_interval_with_a_width():
    """Also where all is right, or nothing, and for one question."""
    used = [{"name": "search", "ok": True}]
    for count, right in ((1, False), (8, True), (40, True), (40, False)):
        rows = [
            row(str(i), j, success=right, tool_calls=used) for i in range(count) for j in range(5)
        ]
        overall = (await figures(rows)).overall
        shares = [overall.estimates[name] for name in ("success", "em", "f1", "tool_efficiency")]
        shares += [*overall.pass_at.values(), *overall.majority_at.values()]
        for one in shares:
            assert one.low <= one.value <= one.high
            assert 0.03 < one.high - one.low < 1
            assert one.low == pytest.approx(0.04 ** (1 / count) if one.value else 0)


async def test_a_run_reports_the_figures_of_the_report():
    """Also where samples of a question failed."""
    rows = [row("1", 0), row("1", 1, False, answer="8"), failed("1", 2), failed("2", 0)]
    rows += [row("3", 0, False, answer="9"), row("4", 0), failed("4", 1)]
    overall, found = (await figures(rows)).overall, brief_report("test", rows).overall
    for name in ("success", "reward", "tool_calls", "action_tokens"):
        assert getattr(found, name) == overall.estimates[name].value, name
    success = overall.estimates["success"]
    assert found.interval == (success.low, success.high)
    assert found.success_if_failed_wrong == overall.success_if_failed_wrong


def test_the_interval_of_a_set_with_several_samples_per_question():
    rows = [row(str(i), j) for i in range(8) for j in range(5)]
    found = brief_report("heldout", rows)
    assert found.overall.interval == pytest.approx((0.04 ** (1 / 8), 1))
    assert found.by_kind["all"].interval == found.overall.interval
    assert brief_report("heldout", [failed("1", 0)]).overall.interval == (0, 1)


async def test_the_interval_of_pass_at_k_has_fewer_effective_samples():
    """Eight questions with two right samples of four each: pass@4 is 1 of each, seen once."""
    rows = [row(str(i), j, success=j < 2 - i % 2) for i in range(8) for j in range(4)]
    overall = (await figures(rows, ks=(1, 4))).overall
    assert overall.pass_at[4].value == 1
    assert overall.pass_at[4].low == pytest.approx(0.04 ** (1 / 8))


async def test_a_mean_that_is_not_a_share_has_an_interval_only_if_values_differ():
    rows = [row(str(i), tool_calls=[], action_tokens=i) for i in range(5)]
    found = (await figures(rows)).overall.estimates
    assert (found["tool_calls"].value, found["tool_calls"].low) == (0, None)
    half = 2.776 * 1.5811 / 5**0.5  # Student's t of four
    assert found["action_tokens"].low == pytest.approx(2 - half, abs=1e-3)


async def test_pass_at_k_and_majority_by_hand():
    answers = [("7", True), ("7", True), ("8", False), ("9", False)]
    rows = [row("1", i, right, answer=a) for i, (a, right) in enumerate(answers)]
    overall = (await figures(rows, ks=(1, 3, 4))).overall
    assert overall.pass_at[1].value == pytest.approx(0.5)
    assert overall.pass_at[3].value == 1.0
    # of 4 subsets of 3: two have both right ones, two have one with 8 and 9: a tie of three
    assert overall.majority_at[3].value == pytest.approx((1 + 1 + 1 / 3 + 1 / 3) / 4)
    assert overall.majority_at[4].value == 1.0
    assert list(overall.pass_at) == [1, 3, 4]


async def test_groups_are_datasets_kinds_and_the_fields_of_the_benchmark():
    levels = [{"benchmark": "gaia", "level": f"{1 + i % 2}"} for i in range(4)]
    rows = [row(str(i), dataset="gaia", metadata=one) for i, one in enumerate(levels)]
    rows += [row(str(i), dataset="hotpot", kind=k, success=False) for i, k in enumerate("ab")]
    summary = await figures(rows)
    assert list(summary.groups["dataset"]) == ["gaia", "hotpot"]
    assert list(summary.groups["gaia level"]) == ["1", "2"]
    assert list(summary.groups["kind"]) == ["a", "all", "b"]
    assert summary.average == pytest.approx(0.5)
    assert summary.overall.estimates["success"].value == pytest.approx(4 / 6)


async def test_groups_of_a_known_benchmark_are_its_own_fields():
    kept = {"benchmark": "hle", "category": "Math", "answer_type": "exactMatch", "type": "x"}
    each = {"1": kept, "2": {**kept, "category": "Physics"}}
    rows = [row(task, dataset="hle", metadata=metadata) for task, metadata in each.items()]
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
    rows.append(row("y", success=True, parts={"rule": 1.0}))  # the rules decided
    overall = (summary := await figures(rows)).overall
    assert "kappa 0.47" in hints_of(summary, "e")[0]
    found = overall.agreement
    assert (found.both_right, found.only_judge, found.only_rules, found.both_wrong) == (6, 2, 1, 3)
    assert (found.share, found.num_unparsed) == (pytest.approx(9 / 12), 1)
    alone = agreement_of(rows[12:])
    assert (alone.num_unparsed, alone.kappa) == (1, None)
    assert agreement_of(rows[13:]) is None
    assert found.kappa == pytest.approx((9 / 12 - 38 / 72) / (1 - 38 / 72))
    assert overall.estimates["judge"].value == pytest.approx(8 / 13), "not those of the rules"
    for one in rows[:3]:  # within a combined grader: another "judge" is a weighted reward
        one.parts = {"judge": 0.5, "llm": 1.0, "llm.judge": 0.0, "llm.rule": 1.0, "llm.accuracy": 1}
    assert "kappa 0.03" in hints_of(summary := await figures(rows), "e")[0]
    assert summary.overall.estimates["judge"].value == pytest.approx(5 / 13)


async def test_the_order_of_rows_does_not_matter():
    rows = [row(str(i), j, (i + j) % 3 > 0) for i in range(5) for j in range(3)]
    one = await figures(rows)
    other = await figures(sorted(rows, key=lambda r: (r.task, -r.sample)))
    assert one == other


def test_figures_of_no_rows_are_empty():
    found = figures_of([], (1,))
    assert found.num_questions == 0
    assert found.estimates == {}
