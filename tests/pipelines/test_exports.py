"""launchers/export.py transcripts: trees and evaluations as ATIF, without secrets; impossible
requests are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from agentenv.archive import Archive, StepHeader
from agentenv.envs.quickstart_setup import build_tokenizer
from agentenv.errors import install_hint
from agentenv.failures import REDACTED, Redactor
from agentenv.frames import ArchiveConfig
from agentenv.launchers import export
from agentenv.pipelines.run.records import EvalRow, trajectory_rows
from agentenv.pipelines.run.transcript import Question, of_row, of_tree, redacted, turns_of
from agentenv.pipelines.viewing.transcripts import atif_document
from tests.support.example_tree import SECRET, example_tree
from tests.support.stored_evaluation import failed, row, write_evaluation


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def encode(tokenizer: Any) -> Any:
    return lambda text: tokenizer.encode(text, add_special_tokens=False) if text else []


def told(tokenizer: Any, *, with_secret: bool = False) -> Question:
    kept = example_tree(encode(tokenizer), with_secret=with_secret)
    return of_tree(kept, tokenizer.decode, with_tokens=True)


def documents(question: Question) -> dict[str, dict[str, Any]]:
    return {
        branch.name: atif_document(question, branch, session="r/t", model="m", source={"step": 4})
        for branch in question.branches
    }


def test_each_turn_of_a_tree_is_exported_once_below_its_fork_point(tokenizer: Any) -> None:
    question = told(tokenizer)
    assert question.prompt == "How many nuts?\n"
    assert question.scores == {"reward": 1 / 3, "success": 1 / 3}  # failed ones count nowhere
    assert [
        (one.name, one.parent, one.forked_at, [turn.text for turn in one.turns])
        for one in question.branches
    ] == [
        ("0", None, None, ["<stock>nuts</stock>", "<answer>310</answer>"]),
        ("1", None, None, ["<stock>"]),
        ("0.1+1", "0", "node-1", ["<stock>bolt</stock>", "<answer>5</answer>"]),
        ("0.1+1.2+1", "0.1+1", "node-2", ["so"]),
    ]
    last = question.branches[-1]
    assert [turn.text for _, turn in question.path(last)] == [
        "<stock>nuts</stock>",
        "<stock>bolt</stock>",
        "so",
    ]
    facts = question.branches[0].turns[0].facts
    assert (facts["adv_pos"], facts["adv_neg"], facts["shared_by"]) == (1.4, -1.4, 3.0)
    assert (facts["policy_versions"], facts["entropy"], facts["num_forks"]) == ([2], 0.25, 1)


def test_atif_marks_the_shared_steps_of_a_fork_and_its_fork_point(tokenizer: Any) -> None:
    found = documents(told(tokenizer))
    fork = found["0.1+1.2+1"]
    assert [step["step_id"] for step in fork["steps"]] == [1, 2, 3, 4]
    assert [step.get("is_copied_context", False) for step in fork["steps"]] == [
        False,
        True,
        True,
        False,
    ]
    assert fork["extra"]["forked_from"] == {"trajectory_id": "r/t/0.1+1", "step_id": 3}
    assert {one["session_id"] for one in found.values()} == {"r/t"}
    copied = [s["message"] for s in fork["steps"] if s.get("is_copied_context")]
    parent = [s["message"] for s in found["0.1+1"]["steps"]]
    assert parent[1:3] == copied
    assert fork["final_metrics"]["extra"]["limit"] == "turn_tokens"
    assert found["1"]["final_metrics"]["extra"]["error"] == "EnvError: the warehouse burns"
    assert "reward" not in found["1"]["final_metrics"]["extra"]


def test_atif_has_calls_results_tokens_and_log_probs(tokenizer: Any) -> None:
    _, call, answer = documents(told(tokenizer))["0"]["steps"]
    (one,) = call["tool_calls"]
    assert (one["function_name"], one["arguments"]) == ("stock", {"item": "nuts"})
    (result,) = call["observation"]["results"]
    assert result == {"source_call_id": one["tool_call_id"], "content": " 310\n"}
    metrics = answer["metrics"]
    size = metrics["completion_tokens"]
    assert tokenizer.decode(metrics["completion_token_ids"]) == "<answer>310</answer>"
    assert metrics["logprobs"] == [-0.5] * size
    before = tokenizer.decode(metrics["prompt_token_ids"])
    assert before == "How many nuts?\n<stock>nuts</stock> 310\n"
    assert metrics["prompt_tokens"] == len(metrics["prompt_token_ids"])


def test_a_secret_in_a_tool_result_is_redacted_with_its_tokens(
    tokenizer: Any,
) -> None:
    question = told(tokenizer, with_secret=True)
    assert SECRET in json.dumps(documents(question))
    clean = documents(redacted(question, Redactor({}, {})))
    text = json.dumps(clean)
    assert SECRET not in text
    assert REDACTED in text
    assert "token_ids" not in text


ROW = EvalRow(
    dataset="held",
    task="q1",
    sample=1,
    question="6 * 7?",
    answers=["42"],
    segments=[
        {"env": "6 * 7?\n"},
        {"policy": "<python>6 * 7</python>"},
        {"env": " 42\n"},
        {"policy": "<answer>42</answer>", "eos": "<end>"},
    ],
    tool_calls=[{"name": "python", "arguments": {"code": "6 * 7"}, "ok": True, "duration_s": 0.1}],
    prompt_tokens=5,
    action_tokens=9,
    seconds=1.5,
    end="terminated",
    reward=1.0,
    success=True,
    scores={"em": 1.0},
)


def test_a_row_of_an_evaluation_is_a_trajectory_too() -> None:
    question = of_row(ROW)
    (branch,) = question.branches
    assert question.prompt == "6 * 7?\n"
    assert [(turn.text, turn.answer) for turn in branch.turns] == [
        ("<python>6 * 7</python>", " 42\n"),
        ("<answer>42</answer><end>", ""),
    ]
    assert branch.turns[0].calls == ROW.tool_calls
    document = documents(question)["0"]
    assert document["final_metrics"]["extra"]["em"] == 1.0
    assert "completion_tokens" not in document["steps"][1]["metrics"]


def test_training_rows_match_the_tree(tokenizer: Any) -> None:
    kept = example_tree(encode(tokenizer))
    rows = list(trajectory_rows(kept.tree, tokenizer.decode))
    whole = of_tree(kept, tokenizer.decode)
    for one in rows:
        _, turns = turns_of(one["segments"], one["tool_calls"])
        (same,) = [branch for branch in whole.branches if branch.name == one["branch"]]
        path = [turn for _, turn in whole.path(same)]
        assert [turn.text for turn in turns] == [turn.text for turn in path]
        assert [turn.calls for turn in turns] == [turn.calls for turn in path]
        assert (one["reward"], one["limit"]) == (same.reward, same.limit)


# the command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """The files of a run that the command reads."""
    folder = tmp_path_factory.mktemp("export") / "small"
    tokenizer.save_pretrained(folder / "model")
    (folder / "config.json").write_text('{"model": {"path": "{run}/model"}}', encoding="utf-8")
    archive = Archive(folder / "trees", ArchiveConfig())
    for step in (1, 2):
        header = StepHeader(step, 2, 1, "settings", len(tokenizer), 1)
        archive.write(header, [example_tree(encode(tokenizer), with_secret=step == 2)])
    return folder


def output_of(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def transcripts(*arguments: object) -> int:
    return export.main(["transcripts", *map(str, arguments)])


def test_the_trees_of_a_run_are_written_with_one_file_per_trajectory(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert transcripts(run, out, "--format", "atif") == 0
    assert "8 trajectories of 1 question written" in output_of(capsys), (
        "both steps ask the same one"
    )
    files = sorted(out.rglob("*.json"))
    assert len(files) == 8
    found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert len({one["trajectory_id"] for one in found}) == 8
    assert found[0]["extra"]["run"] == "small"
    assert SECRET not in "".join(file.read_text(encoding="utf-8") for file in files)
    assert transcripts(run, tmp_path / "two", "--format", "atif", "--step", 2, "--tree", 3) == 0
    assert len(list((tmp_path / "two").rglob("*.json"))) == 4


def test_questions_of_an_evaluation_are_counted_once_for_all_samples_in_each_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        row(str(task), sample, dataset=dataset, question=f"{task}?")
        for dataset in ("a", "b")
        for task in range(3)
        for sample in range(4)
    ]
    rows[0] = failed("0", 0)
    rows[0].dataset, rows[0].question = "a", "0?"
    folder = write_evaluation(tmp_path / "e", rows)
    out = tmp_path / "out"
    assert transcripts(folder, out, "--format", "atif") == 0
    assert "24 trajectories of 6 questions written" in output_of(capsys)
    files = sorted(out.rglob("*.json"))
    assert len(files) == 24
    ends = [json.loads(one.read_text())["final_metrics"]["extra"] for one in files]
    assert [one.get("error") for one in ends if one["end"] == "failed"] == ["EngineError: down"]


@pytest.mark.parametrize(("num_right", "num_failed"), [(3, 0), (0, 3)])
def test_evaluations_without_failures_or_with_failures_only_are_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_right: int, num_failed: int
) -> None:
    rows = [row(str(n)) for n in range(num_right)] + [failed(str(n), 0) for n in range(num_failed)]
    folder = write_evaluation(tmp_path / "e", rows)
    assert transcripts(folder, tmp_path / "out", "--format", "atif") == 0
    assert "3 trajectories of 3 questions written" in output_of(capsys)
    for file in (tmp_path / "out").rglob("*.json"):
        extra = json.loads(file.read_text())["final_metrics"]["extra"]
        assert ("reward" in extra) is (num_failed == 0)


def test_a_file_left_empty_by_a_kill_is_skipped(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    empty = run / "trees" / "step-000003.frames"
    empty.touch()
    try:
        assert transcripts(run, tmp_path / "out", "--format", "atif") == 0
        assert transcripts(run, tmp_path / "one", "--format", "atif", "--step", 3) != 0
    finally:
        empty.unlink()
    assert len(list((tmp_path / "out").rglob("*.json"))) == 8
    told = caplog.records[0]
    assert str(empty) in told.getMessage()
    assert "skipped" in told.getMessage()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["{run}", "{out}", "--format", "atif", "--step", "9"],
            "contains no step 9; available: 1 to 2",
        ),
        (["{run}", "{out}", "--format", "atif", "--tree", "9"], "no tree 9"),
        (["{run}/model", "{out}", "--format", "atif"], "neither the folder of a run nor of an"),
        (["{run}", "{run}", "--format", "atif"], "is not empty; choose another directory"),
    ],
)
def test_an_impossible_export_is_refused(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    given = [one.format(run=run, out=tmp_path / "out") for one in arguments]
    assert transcripts(*given) == 2
    assert expected in output_of(capsys)
    assert not (tmp_path / "out").exists()


def test_a_run_without_trees_or_tokenizer_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(run / "config.json", bare)
    (bare / "eval" / "after_rl").mkdir(parents=True)
    (bare / "eval" / "after_rl" / "config.json").touch()
    assert transcripts(bare, tmp_path / "out", "--format", "atif") == 2
    assert "contains no trees" in (text := output_of(capsys))
    assert "evaluations are in" in text
    assert "after_rl" in text
    shutil.copytree(run / "trees", bare / "trees")
    assert transcripts(bare, tmp_path / "out", "--format", "atif") == 2
    assert "no tokenizer.json" in output_of(capsys)


def test_the_inspect_format_requires_its_package(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert transcripts(run, tmp_path / "out", "--format", "inspect") == 2
    assert install_hint("inspect") in output_of(capsys)


@pytest.mark.slow
def test_a_finished_run_and_its_evaluation_are_written(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert transcripts(finished, tmp_path / "trees", "--format", "atif", "--tokens") == 0
    assert "32 trajectories of 8 questions" in output_of(capsys)
    rows = finished / "eval" / "after_rl"
    assert transcripts(rows, tmp_path / "rows", "--format", "atif") == 0
    assert "3 trajectories of 3 questions" in output_of(capsys)
    assert transcripts(rows, tmp_path / "no", "--format", "atif", "--step", 1) == 2
    assert "--step is for the trees of a run" in output_of(capsys)
