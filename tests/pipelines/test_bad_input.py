"""A user's mistake is refused with its place and a way out, before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentenv.launchers import evaluate, sft, train
from tests.support.warehouse import ROOT


def refused(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert code == 2
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return captured.err.replace("\n", " ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("queue.max_stalenes=2", "error: 'queue.max_stalenes=2' on the command line: "
         "queue.max_stalenes: unknown key; did you mean queue.max_staleness?"),
        ("algorithm.name=arop", "'tree_grpo'] or 'module:Class', got 'arop'; did you mean 'arpo'?"),
        ("algorithm.name=apro", "'tree_grpo'] or 'module:Class', got 'apro'; did you mean 'arpo'?"),
        ("algorithm.nam=grpo", "did you mean algorithm.name?"),
        ("algorithm.budget_beta=2", "'algorithm.budget_beta=2' on the command line: "
         "algorithm.budget_beta: unknown key for algorithm.name = 'arpo'; it is valid for "
         "algorithm.name = 'aepo'"),
        ("cluster.workers=2", "cluster.workers: unknown key for cluster.kind = 'local'; it is "
         "valid for cluster.kind = 'processes' or 'ray' or 'external' or 'slurm' or 'kubernetes'; "
         "choose that too, or remove this key"),
        ("nothing.at.all=1", "error: 'nothing.at.all=1' on the command line: nothing: unknown key"),
        ("env.tools=[{name=5}]", "command line: env.tools[0].name: Expected `str`, got `int`: 5"),
        ("engine={name='vllm', urls=['127.0.0.1:9']}",
         "error: engine.urls: '127.0.0.1:9': expected http://HOST:PORT or https://HOST"),
        ("grader.own={name='nowhere'}", "'module:Class', got 'nowhere'"),
        ("cluster.wrkrs=2", "this kind has no keys; other kinds: ['processes'"),
        ("train.num_steps=many", "train.num_steps: Expected `int`, got `str`: 'many'"),
        ("engine.max_num_seqs=4", "unknown key for engine.name = 'scripted'"),
        ("queue.groups_per_step=many", "queue.groups_per_step: Expected `int`, got `str`: 'many'"),
        ("queue.groups_per_step=0", "queue.groups_per_step: Expected `int` >= 1"),
        ("learner={}", "groups_per_minibatch = 8 (its default) does not divide"),
        ("train.num_epochs=1.0", "train.num_epochs=none on the command line removes the one"),
        ("sampling.train.top_p=0.9", "sampling.train: training samples from the policy itself"),
        ("env.id=me/Warehose-v0", "no environment is registered as 'me/Warehose-v0'; did you mean "
         "me/Warehouse-v0"),
        ("env.module=my_evn", "the command runs; did you mean 'my_env'?"),
        ("env.module=agentenv.evns", "No module named 'agentenv.evns'; did you mean "
         "'agentenv.envs'?"),
        ("env.kwargs={size=3}", "env.kwargs.size: unknown to me/Warehouse-v0; it has no"),
        ("env={id='agentenv/Quickstart-v0', kwargs={corpsu='kb.jsonl'}}",
         "env.kwargs.corpsu: unknown to agentenv/Quickstart-v0; did you mean corpus?"),
        ("env={id='agentenv/Quickstart-v0'}",
         "env.kwargs.corpus: missing; agentenv/Quickstart-v0 requires it"),
        ("checkpoint.best_metric=dev/reward", "checkpoint.best_metric= on the command line keeps"),
        ("train.stop_at=0.9", "train.stop_at is a value of checkpoint.best_metric, which is empty"),
        ("run.dir=/dev/null/runs", "cannot be written"),
        ("nonsense", "'nonsense' is not of the form key.sub=value"),
    ],
)  # fmt: skip
def test_a_mistake_in_the_configuration(
    warehouse: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    name = f"run.name=bad-{abs(hash(override))}"
    assert message in refused(capsys, train.main([str(warehouse), name, override]))
    # no leftovers block the next attempt
    assert message in refused(capsys, train.main([str(warehouse), name, override]))


def test_a_mistake_in_the_file_is_not_blamed_on_the_command_line(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(warehouse.read_text() + "\n[cluster]\nknd = 'local'\n")
    told = refused(capsys, train.main([str(path), "run.name=mine", "cluster.kind=local"]))
    assert f"error: {path}: cluster.knd: unknown key" in told  # and not left out for the kind


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "the dataset is empty"),
        ([{"question": "q", "answer": "a"}, {"answer": "a"}], "row 2: key 'question'"),
        ([{"question": "q"}], "row 1: key 'answer'"),
    ],
)
def test_a_mistake_in_the_dataset(
    warehouse: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rows: list[object],
    message: str,
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [str(warehouse), "run.name=bad-data", f"data.train={path}"]
    text = refused(capsys, train.main(arguments))
    assert f"{path}" in text
    assert message in text


A_GRADER = """
from agentenv import ToolEnv
from agentenv import Grade
class Lenient:
    {grade}
class Mine(ToolEnv):
    def __init__(self, task):
        super().__init__(task, tools=[], grader=Lenient())
"""
EXPECTED = "; expected `async def grade(self, task, written, calls)` that returns Grade(reward, "


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("grade", "message"),
    [
        ("async def grade(self, *_): return 1.0",
         "the grader Lenient must return a Grade with a numeric reward, got 1.0"),
        ("async def grade(self, *_): return Grade('1', True)", "got Grade(reward='1', success"),
        ("async def grade(self, *_): return Grade(1.0)",
         "raised TypeError: Missing required argument 'success' (grading_2.py, line 5)"),
        ("def grade(self, *_): return Grade(1.0, True)", "the grader Lenient raised TypeError: "),
        ("async def grade(self, task): return Grade(1.0, True)", "positional arguments"),
    ],
)  # fmt: skip
def test_a_grader_that_returns_no_grade(
    warehouse: Path, capsys: pytest.CaptureFixture[str], grade: str, message: str, more: list[str]
) -> None:
    name = f"grading_{len(message)}"
    message = message.replace("grading_2", name)
    (warehouse.parent / f"{name}.py").write_text(A_GRADER.format(grade=grade))
    told = refused(capsys, train.main([str(warehouse), f"env.id={name}:Mine", *more]))
    assert "the grader fails on the gold answer '1240' of row train-1: " in told
    assert message in told
    assert EXPECTED in told


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("unparsed", "class Mine(", "env.id: 'unparsed:Mine', registered by the configuration, "
         "cannot be loaded: SyntaxError: "),
        ("fails", "\n1 / 0", "cannot be loaded: ZeroDivisionError: division by zero (fails.py, "
         "line 2)"),
        ("making", "class Mine:\n  def __init__(self, task):\n    task.metadata['shop']",
         "the environment making:Mine, begun for task train-1, raised KeyError: 'shop' (making.py, "
         "line 3)"),
    ],
)  # fmt: skip
def test_a_bug_of_an_environment_is_reported_with_its_line(
    warehouse: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    source: str,
    message: str,
    more: list[str],
) -> None:
    (warehouse.parent / f"{name}.py").write_text(source)
    assert message in refused(capsys, train.main([str(warehouse), f"env.id={name}:Mine", *more]))


@pytest.mark.parametrize(
    ("argument", "hint"),
    [
        ("nowhere.toml", ""),
        ("configs/quikstart.toml", "; did you mean configs/quickstart.toml?"),
        ("configs/quickstart", "; did you mean configs/quickstart.toml?"),
        ("run.seed=1", "; the file comes first, then key.sub=value"),
    ],
)
def test_a_missing_configuration_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, argument: str, hint: str
) -> None:
    monkeypatch.chdir(ROOT)
    told = refused(capsys, train.main([argument]))
    assert f"{argument}: no such configuration file{hint}" in told


def test_an_invalid_json_line_is_reported_with_one_number(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "q", "answer": "a"}\n{"question": "q", "answer":}\n')
    told = refused(capsys, train.main([str(warehouse), f"data.train={path}"]))
    assert f"{path}, row 2: not valid JSON: Expecting value at column 28" in told
    assert "line 1" not in told


def test_a_configuration_of_another_command(capsys: pytest.CaptureFixture[str]) -> None:
    told = refused(capsys, sft.main([str(ROOT / "configs" / "quickstart.toml")]))
    assert "env: unknown key; known: ['checkpoint', " in told
    assert "or does the file belong to another command?" in told


def test_a_directory_without_a_run(
    warehouse: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("do not touch")
    arguments = [str(warehouse), f"run.dir={tmp_path}", "run.name=mine"]
    assert "is not empty and not a run: it contains 'thesis.tex'" in refused(
        capsys, train.main(arguments)
    )
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "do not touch"


def test_resuming_a_run_that_never_started(
    warehouse: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(warehouse), "run.name=never", "--resume"]
    assert "contains no run to resume" in refused(capsys, train.main(arguments))


def test_evaluating_a_folder_without_a_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(tmp_path), "--env", "agentenv/Quickstart-v0", "data=x.jsonl"]
    assert "is not a model directory" in refused(capsys, evaluate.main(arguments))
