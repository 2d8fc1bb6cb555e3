"""`evaluate.py --question` takes a text, a row of the set, or a row as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from agentenv.launchers import evaluate

Ask = Callable[..., int]

ENV = """
from agentenv import Task, ToolEnv, register, tool
from agentenv.envs.grading.reward import ExactMatch


class NotedEnv(ToolEnv):
    def __init__(self, task: Task) -> None:
        note = task.metadata["note"]
        super().__init__(task, tools=[], grader=ExactMatch(), prompt=f"The note says {note}.")


register("me/Noted-v0", "noted:NotedEnv")
"""


def turn(prompt: str, rng: Random) -> str:
    """A scripted policy that reads the note."""
    note = prompt.partition("note says ")[2].partition(".")[0]
    return f"<think>read</think><answer>{note}</answer>"


@pytest.fixture
def ask(warehouse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    (tmp_path / "noted.py").write_text(ENV)
    rows = [{"question": "What?", "answer": n, "note": n, "id": f"row-{n}"} for n in range(1, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    model = str(warehouse.parent / "model")
    base = [model, "--env", "me/Noted-v0", "env.module=noted", "engine.name=scripted"]
    base += ["engine.script=tests.pipelines.test_evaluate_question:turn"]
    base += ["limits.max_prompt_tokens=300", "limits.max_response_tokens=300"]

    def run(question: str, *more: str, data: bool = True) -> int:
        rows = ["data=rows.jsonl"] if data else []
        return evaluate.main([*base, *rows, "--question", question, *more])

    return run


@pytest.mark.parametrize(
    ("question", "data", "note"),
    [
        ("#2", True, 2),
        ("row-3", True, 3),
        ('{"question": "What?", "answer": 7, "note": 7}', True, 7),
        ('{"question": "What?", "answer": 7, "note": 7}', False, 7),
    ],
)
def test_a_row_brings_what_its_environment_reads(
    ask: Ask, question: str, data: bool, note: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(question, data=data) == 0
    told = capsys.readouterr().out
    assert f"The note says {note}." in told
    assert "right, reward 1" in told


def test_an_answer_given_comes_before_that_of_the_row(
    ask: Ask, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask("#2", "--answer", "9") == 0
    assert "wrong, reward 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("question", "data", "told"),
    [
        ("#4", True, "--question '#4': the set rows has the rows #1 to #3"),
        ("#1", False, "there is no set with rows; give data=FILE"),
        ("What is it?", True, "give --question '#17', the id of a row of the set, or the row as"),
        ("{broken", True, "--question: expected a row as JSON"),
        ('{"answer": 1}', True, "question"),
    ],
)
def test_what_is_wrong_is_one_clear_line(
    ask: Ask, question: str, data: bool, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(question, data=data) == 2
    said = capsys.readouterr().err
    assert told in said
    assert "Traceback" not in said
    assert said.count("error:") == 1
