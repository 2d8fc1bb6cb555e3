"""Report and compare as commands over stored evaluations."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from agentenv.assembly.reports.records import EvalRow
from agentenv.launchers import evaluate
from tests.support.json_files import change_json
from tests.support.stored_evaluation import (
    QUICK,
    failed,
    mixed_rows,
    row,
    rows_of,
    write_evaluation,
)

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m|`*"


# report


def test_a_report_is_written_to_the_terminal_as_json_and_as_markdown(tmp_path, said):
    folder = write_evaluation(tmp_path / "e", mixed_rows(8, 4), QUICK)
    told = said(evaluate.main, "report", folder, "--k", "1,3")
    assert "pass@k" in told
    assert "of a trajectory" in told
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary["overall"]["pass_at"]) == ["1", "3"]
    text = (folder / "report.md").read_text()
    assert "## pass@k" in text
    assert not list(folder.glob("**/*.partial"))
    assert not (folder / "report.html").exists()


def test_text_of_the_policy_is_escaped_in_a_report(tmp_path, said):
    rows = rows_of({EVIL: [EVIL]}, dataset="d" + EVIL, kind=EVIL, reason=EVIL)
    rows[0].tool_calls[0] |= {"name": EVIL, "arguments": {"q": EVIL}, "ok": False, "error": EVIL}
    rows[0].segments[-1]["policy"] += EVIL
    rows.append(EvalRow(dataset="x", task="2", sample=0, end="failed", error=f"{EVIL}: {EVIL}"))
    folder = write_evaluation(tmp_path / "e", rows, QUICK)
    assert "\x1b[31m" not in said(evaluate.main, "report", folder)
    text = (folder / "report.md").read_text()
    assert "<script>" not in text
    assert "<img" not in text


def test_a_report_needs_rows(tmp_path, said):
    assert "contains no evaluation" in said(evaluate.main, "report", tmp_path, status=2)
    with pytest.raises(SystemExit):
        evaluate.main(["report", str(tmp_path), "--k", "0"])


def test_right_answers_in_a_wrong_format_are_reported_with_a_remedy(tmp_path, capsys):
    rows = rows_of({"1": ["Paris"], "2": ["Rome"]})
    for one in rows:
        one.success, one.parts = False, {"format": -1.0}
    folder = write_evaluation(tmp_path / "e", rows, QUICK)
    assert evaluate.main(["report", str(folder)]) == 0
    said = " ".join(capsys.readouterr().err.split())
    text = "1 of 2 answers are correct (EM) but not in the format that the grader requires"
    assert f"warning: {text}" in said
    assert f"agentenv evaluate regrade {folder} grader.reward=answer" in said
    assert text in (folder / "report.md").read_text()


def test_a_report_does_not_change_the_rows(tmp_path):
    folder = write_evaluation(tmp_path / "e", mixed_rows(4, 2), QUICK)
    before = (folder / "rows.jsonl").read_bytes()
    assert evaluate.main(["report", str(folder), "--compat", "reference"]) == 0
    assert (folder / "rows.jsonl").read_bytes() == before
    assert json.loads((folder / "summary.json").read_text())["compat"] == "reference"


@pytest.mark.parametrize(
    ("subject", "told"),
    [
        ({"name": "run-step-000020"}, "0 failed\n"),  # its engine served nothing else: no version
        ({"name": "run", "step": 20, "policy_version": 21}, "0 failed, after step 20 (policy"),
    ],
)
def test_a_report_names_the_evaluated_weights(tmp_path, subject, told):
    folder = write_evaluation(tmp_path / "e", rows_of({"1": ["Paris"]}), QUICK)
    change_json(folder / "config.json", subject=subject)
    assert evaluate.main(["report", str(folder)]) == 0
    assert told in (folder / "report.md").read_text()


# compare


def compared(tmp_path, said, one, two, *more, status=0) -> str:
    """What a comparison of these rows prints: the tables, or the error."""
    rows = (("a", one), ("b", two))
    folders = [write_evaluation(tmp_path / name, of, QUICK) for name, of in rows]
    return said(evaluate.main, "compare", *folders, *more, status=status)


def test_two_evaluations_are_compared_question_by_question(tmp_path, said):
    one = rows_of({str(i): ["Paris" if i < 4 else "Rome"] for i in range(12)})
    two = rows_of({str(i): ["Rome" if i == 0 else "Paris"] for i in range(10)})
    out = tmp_path / "c.md"
    told = compared(tmp_path, said, one, two, "--out", out)
    assert "10 questions are" in told
    assert "Changed: 1 worse" in told
    text = out.read_text()
    assert "0.900 | +0.500" in text
    assert "0.125 | McNemar" in text  # 1 against 6: 2 * (1 + 7) / 128
    assert "2.000 | 2.000" in text


def test_kinds_of_questions_are_compared_as_reports_have_them(tmp_path, said):
    def rows(of_hop: str) -> list[EvalRow]:
        found = rows_of({str(i): ["Paris"] for i in range(4)}, kind="calc")
        return found + rows_of({str(i): [of_hop] for i in range(4, 6)}, kind="hop")

    told = compared(tmp_path, said, rows("Rome"), rows("Paris"))
    assert re.search(r"calc +4 +1.000 +1.000 ", told)
    assert re.search(r"hop +2 +0.000 +1.000 ", told)
    assert re.search(r"all +6 +0.667 +1.000 ", told)


def test_several_samples_are_compared_as_rates(tmp_path, said):
    one = rows_of({str(i): ["Paris", "Rome"] for i in range(8)})
    two = rows_of({str(i): ["Paris", "Paris"] for i in range(8)})
    told = compared(tmp_path, said, one, two)
    assert "sign flip" in told
    assert "pass@2" in told
    assert re.search(r"all +8 +0.500 +1.000 +\+0.500 \[\+0.\d+, \+0.\d+\] +0.008", told)
    low, high = map(float, re.findall(r"\+0.500 \[\+(0.\d+), \+(0.\d+)\]", told)[0])
    assert low < 0.45 < 0.55 < high


def test_failed_samples_are_shown_next_to_the_success_that_excludes_them(tmp_path, said):
    one = rows_of({str(i): ["Paris", "Paris"] for i in range(4)})
    two = rows_of({str(i): ["Paris", "Paris"] for i in range(4)})
    for lost in [*two[:2], two[3]]:
        lost.end, lost.error, lost.success = "failed", "EnvError: closed", False
    told = compared(tmp_path, said, one, two)
    assert "3 questions are" in told
    assert re.search(r"all +3 +1.000 +1.000 ", told)
    assert re.search(r"all +0 of 8 \(0.0%\) +3 of 8 \(37.5%\) +1.000 +0.625", told)


def test_failures_have_a_table_only_if_any_and_failed_evaluations_no_success(tmp_path, said):
    fine = write_evaluation(tmp_path / "fine", [row(str(n)) for n in range(4)])
    gone = write_evaluation(tmp_path / "gone", [failed(str(n), 0) for n in range(4)])
    assert "Failed trajectories" not in said(evaluate.main, "compare", fine, fine)
    told = " ".join(said(evaluate.main, "compare", fine, gone, status=2).split())
    assert "4 shared questions" in told
    assert evaluate.main(["report", str(gone)]) == 0
    text = (gone / "report.md").read_text()
    assert "4 questions, 0" in text
    assert "4 | 0" in text
    assert "4 | 100.0%" in text
    assert evaluate.main(["report", str(fine)]) == 0
    text = (fine / "report.md").read_text()
    assert "failed trajectories" not in text
    assert "Truncated and failed" not in text


def test_evaluations_without_a_common_question_are_refused(tmp_path, said):
    one, two = rows_of({"1": ["Paris"]}), rows_of({"2": ["Paris"]})
    assert "questions to compare" in compared(tmp_path, said, one, two, status=2)


def test_another_question_of_the_same_name_is_refused(tmp_path, said):
    one = rows_of({"1": ["Paris"]})
    two = [msgspec.structs.replace(row, question="Another one?") for row in one]
    assert "question 1 differs" in compared(tmp_path, said, one, two, status=2)
