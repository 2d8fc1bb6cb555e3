"""examples/inspect_logs: questions of trees and evaluations, without secrets;
impossible requests are refused. Its logs: test_exports_inspect.py."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from agentenv.assembly.reports.records import EvalRow, trajectory_rows
from agentenv.base.secrets import REDACTED, SECRETS
from agentenv.envs.quickstart.setup import build_tokenizer
from examples.inspect_logs.__main__ import INSTALL, main
from examples.inspect_logs.transcript import of_row, of_tree
from examples.monitors.turns import turns_of
from tests.support.example_tree import SECRET, encode_with, example_tree, write_run
from tests.support.stored_evaluation import row, write_evaluation


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return build_tokenizer()


def test_each_turn_of_a_tree_is_exported_once_below_its_fork_point(tokenizer: Any) -> None:
    question = of_tree(example_tree(encode_with(tokenizer)), tokenizer.decode)
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
    texts = [turn.text for _, turn in question.path(last)]
    assert texts == ["<stock>nuts</stock>", "<stock>bolt</stock>", "so"]
    facts = question.branches[0].turns[0].facts
    assert (facts["adv_pos"], facts["adv_neg"], facts["shared_by"]) == (1.4, -1.4, 3.0)
    assert (facts["policy_versions"], facts["entropy"], facts["num_forks"]) == ([2], 0.25, 1)


def test_a_secret_in_a_tool_result_is_redacted(tokenizer: Any) -> None:
    question = of_tree(example_tree(encode_with(tokenizer), with_secret=True), tokenizer.decode)
    assert SECRET in str(question)
    clean = SECRETS.tree(question)
    assert SECRET not in str(clean)
    assert REDACTED in str(clean)


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
    assert question.scores["em"] == 1.0
    assert branch.turns[0].num_tokens is None


def test_training_rows_match_the_tree(tokenizer: Any) -> None:
    kept = example_tree(encode_with(tokenizer))
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
    return write_run(tmp_path_factory.mktemp("export") / "small", tokenizer, False, True)


def output_of(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def transcripts(*arguments: object) -> int:
    return main([*map(str, arguments)])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["{run}", "{out}", "--step", "9"], "contains no step 9; available: 1 to 2"),
        (["{run}/model", "{out}"], "expected in the folder of a run"),
        (["{evaluation}", "{out}", "--step", "1"], "--step is for the trees of a run"),
        (["{run}", "{run}"], "is not empty; choose another directory"),
    ],
)
def test_an_impossible_export_is_refused(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    expected: str,
) -> None:
    folder = write_evaluation(tmp_path / "e", [row("1")])
    given = [one.format(run=run, out=tmp_path / "out", evaluation=folder) for one in arguments]
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
    assert transcripts(bare, tmp_path / "out") == 2
    assert "contains no trees" in (text := output_of(capsys))
    assert "evaluations are in" in text
    assert "after_rl" in text
    shutil.copytree(run / "trees", bare / "trees")
    assert transcripts(bare, tmp_path / "out") == 2
    assert "no tokenizer.json" in output_of(capsys)


def test_the_logs_require_their_package(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert transcripts(run, tmp_path / "out") == 2
    assert INSTALL in output_of(capsys)
