"""An evaluation in its directory: stored files, its sets of questions, and errors."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from agentenv.base.types import ToolResult
from agentenv.contract.function_tool import FunctionTool
from agentenv.contract.http import status_error
from agentenv.evaluation.store import load_saved, read_rows
from agentenv.launchers import evaluate
from tests.commands.evaluating import Run, arguments_of, refused, runner, texts
from tests.support.json_files import write_rows


@pytest.fixture
def run(warehouse: Path, tmp_path: Path) -> Run:
    return runner(warehouse, tmp_path)


def test_a_rejected_token_ends_the_evaluation_and_stores_no_row(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Earlier rows stay unchanged; with an accepted token the same command continues."""
    assert run("out", "--n", "2") == 0
    before = texts(tmp_path / "out")
    capsys.readouterr()

    async def rejected(*_: Any) -> ToolResult:
        raise status_error(401, "revoked", what="GET http://host/orders")

    with monkeypatch.context() as patch:
        patch.setattr(FunctionTool, "call", rejected)
        assert run("out", "--n", "6") == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert "'stock': GET http://host/orders" in line
    assert texts(tmp_path / "out") == before
    assert run("out", "--n", "6") == 0
    assert len(texts(tmp_path / "out")) == 6


def test_a_row_holds_the_whole_trajectory(run: Run, tmp_path: Path) -> None:
    assert run("out", "--n", "3") == 0
    rows = read_rows(tmp_path / "out")
    assert sorted(row.key for row in rows) == [("a", f"a-{n}", 0) for n in (1, 2, 3)]
    row = rows[0]
    assert row.question.startswith("How many ")
    assert [next(iter(segment)) for segment in row.segments] == ["env", "policy", "env", "policy"]
    assert row.segments[1]["policy"].endswith("</stock>")
    assert row.segments[3]["eos"] == "<|im_end|>"
    assert f"<answer>{row.prediction}</answer>" == row.segments[3]["policy"]
    assert [(call["name"], call["ok"]) for call in row.tool_calls] == [("stock", True)]
    assert row.success == (row.prediction in row.answers)
    assert (row.end, row.error, row.num_turns) == ("terminated", None, 2)
    assert min(row.prompt_tokens, row.action_tokens, row.tool_tokens) > 0
    assert (tmp_path / "out" / "report.md").is_file()


def test_figures_of_an_environment_are_in_summary_and_report(run: Run, tmp_path: Path) -> None:
    for number in ("1", "3"):  # the second command samples the rest
        assert run("out", "--n", number, "limits.max_tool_result_tokens=1") == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    overall = summary["overall"]
    assert overall["parts"] == {"accuracy": overall["estimates"]["success"]["value"]}
    assert summary["env"] == {"num_results_cut/stock": 2}
    report = (tmp_path / "out" / "report.md").read_text()
    assert "| reward/accuracy |" in report
    assert "cut/stock | 2" in report


def test_sets_of_a_file_have_their_own_keys(
    run: Run, warehouse: Path, tmp_path: Path, prompts: list[str]
) -> None:
    folder = warehouse.parent
    config = tmp_path / "eval.toml"
    config.write_text(f"""
num_samples = 2
[limits]
max_turns = 5
[sets.short]
path = "{folder}/a.jsonl"
max_tasks = 2
limits = {{ max_turns = 1 }}
[sets.long]
path = "{folder}/b.jsonl"
max_tasks = 3
num_samples = 1
""")
    assert run("out", "--config", str(config), data=False) == 0
    rows = read_rows(tmp_path / "out")
    assert [row.limit for row in rows if row.dataset == "short"] == ["turns"] * 4
    assert [row.limit for row in rows if row.dataset == "long"] == [None] * 3
    saved = load_saved(tmp_path / "out").config["sets"]
    assert (saved["short"]["limits"]["max_turns"], saved["long"]["limits"]["max_turns"]) == (1, 5)
    assert run("out", "--config", str(config), "--set", "long", "--n", "4", data=False) == 0
    assert len(prompts) == 8
    assert len(read_rows(tmp_path / "out")) == 8, "the other set stays"


def test_a_table_belongs_to_the_sets_that_read_it(
    run: Run, warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, config = warehouse.parent, tmp_path / "eval.toml"
    text = f"""
[python]
preload = []
[sets.plain]
path = "{folder}/a.jsonl"
max_tasks = 1
[sets.coding]
path = "{folder}/b.jsonl"
max_tasks = 1
env = {{ id = "%s" }}
"""
    config.write_text(text % "agentenv/CodeInterpreter-v0")
    assert run("out", "--config", str(config), data=False) == 0
    assert len(read_rows(tmp_path / "out")) == 2
    config.write_text(text % "agentenv/QAGrader-v0")
    assert run("other", "--config", str(config), data=False) == 2
    assert "[python]: not used" in refused(capsys)


def test_an_error_of_a_column_names_the_key_that_sets_it(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """That of the set which `data` makes, too."""
    path = write_rows(tmp_path / "mine.jsonl", [{"question": "How many bolts?", "gold": 1240}])
    assert run("out", f"data={path}", data=False) == 2
    told = refused(capsys)
    assert told.endswith("set the column by sets.mine.columns.answer")
    key = told.rpartition(" ")[2]
    assert run("out", f"data={path}", f"{key}=gold", data=False) == 0
    (row,) = read_rows(tmp_path / "out")
    assert row.answers == ["1240"]


def test_repeated_task_ids_are_made_unique(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"id": "x", "question": f"How many bolts? {n}", "answer": 1240} for n in range(3)]
    path = write_rows(tmp_path / "twice.jsonl", rows)
    assert run("out", f"data={path}", data=False) == 0
    assert sorted(row.task for row in read_rows(tmp_path / "out")) == ["x", "x#2", "x#3"]
    assert "2 questions have" in capsys.readouterr().out


def test_without_out_each_configuration_has_its_own_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warehouse: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    base = arguments_of(warehouse, "--n", "2", f"data={warehouse.parent}/a.jsonl")
    for keys in ([], ["num_samples=2"], ["seed=1"]):
        assert evaluate.main([*base, *keys]) == 0
    other, one = sorted(map(texts, (tmp_path / "evals").iterdir()), key=len)
    assert (len(other), len(one)) == (2, 4), "more samples of one, another seed in another"
    assert other != {key: one[key] for key in other}


def test_a_log_folder_is_created_only_for_servers_and_kept_if_one_fails(
    run: Run,
    warehouse: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    assert run("bad", "limits.max_response_tokens=-1") == 2
    assert run("good", "--n", "1") == 0
    assert list(folder.iterdir()) == []
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no memory for the judge >&2; exit 3\n")
    broken.chmod(0o755)
    judge = [f"roles.judge={{model='{warehouse.parent}/model', python='{broken}', device='cpu'}}"]
    judge += ["grader.kind=judge", "grader.judge={url='{role:judge}/v1', model='judge'}"]
    capsys.readouterr()
    assert run("failed", "--n", "1", "env.id=agentenv/QAGrader-v0", *judge) == 1
    (log,) = folder.glob("agentenv-logs-*/servers/judge.log")
    assert "memory for the" in log.read_text()
    assert str(log) in capsys.readouterr().err
